"""The time of the parts of steps, taken in one of so many."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvern.config import EngineConfig
from kvern.device import marks
from kvern.plugins import imported
from kvern.ranks.ranks import Ranks
from kvern.request.layer_times import MeasuredStep
from kvern.request.step import SchedulerOutput


class StepClock:
    """Measures the steps whose number `every` divides, which are the same on all ranks."""

    def __init__(self, every: int, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._every = every
        self._clock = clock
        self._measured: list[MeasuredStep] = []

    def is_due(self, output: SchedulerOutput) -> bool:
        """Returns whether this step is measured: all ranks say the same, or some would wait for others."""
        return output.step % self._every == 0 and bool(output.scheduled)

    @contextmanager
    def of_host(self, output: SchedulerOutput) -> Iterator[None]:
        """Measures a step that is computed within, by the host's clock; none that a profile slows down."""
        if marks.listener() is not None:
            yield
            return
        taken = marks.TimedMarks(self._clock)
        with marks.listened(taken):
            taken.begin(marks.OTHER)
            yield
        if taken.is_usual:
            self.add(output.step, taken.seconds())

    def add(self, step: int, seconds: dict[int, float]) -> None:
        """Takes the seconds of a step by code."""
        self._measured.append(MeasuredStep(step, seconds))

    def forget(self) -> None:
        """Forgets what was measured: those steps were no request's."""
        self._measured = []

    def take(self) -> list[MeasuredStep]:
        """Returns what was measured since the last call."""
        taken, self._measured = self._measured, []
        return taken


def step_clock(config: EngineConfig, ranks: Ranks, *, on_device: bool) -> StepClock | None:
    """The clock of steps on the first rank of each stage; None: no option asks for it.

    On GPUs all ranks have one, since they replay the same graphs; that of the first is read.
    """
    if config.trace_layers is None or (ranks.rank and not on_device):
        return None
    make: type[StepClock] = imported("kvern.runner.timed_graphs:DeviceClock") if on_device else StepClock
    return make(config.trace_layers)
