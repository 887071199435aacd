"""The time of the parts of steps on a GPU: events at their marks, in steps without a graph and in second captures.

    a graph with events  of the two shapes that measured steps had last; captured in idle moments, it reads the inputs
                         of the plain graph, in whose place a measured step replays it
    without a graph      events are recorded as kernels are launched

Nothing waits: the times of a step are read once its last event has passed.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from kvern.device import marks
from kvern.request.layer_times import MeasuredStep
from kvern.request.step import SchedulerOutput
from kvern.runner.layer_times import StepClock
from kvern.runner.step_graphs import CaptureMemory, PlannedStep, Priority, StepGraph, StepGraphs, StepOutputs

logger = logging.getLogger("kvern")

MOST_GRAPHS = 2
MOST_PENDING = 8
"""Measured steps whose events have not passed; of ranks behind the first nobody reads them."""

Place = tuple[StepGraphs[Any, Any], Any]
"""The graphs of a kind of step, and one of its shapes."""


def new_event(*, external: bool) -> torch.cuda.Event:
    """An event that takes the time; an `external` one also when a graph that was captured with it is replayed."""
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True, external=external)  # type: ignore[no-untyped-call]
    return event


class EventMarks(marks.Marks):
    """Records an event of the present stream at each mark, and passes the mark on to the `profile` that listens."""

    def __init__(self, *, external: bool, profile: marks.Marks | None = None) -> None:
        super().__init__(self._record)
        self._external, self._profile = external, profile
        self.clear()

    def clear(self) -> None:
        """Forgets all marks."""
        self._codes: list[int] = []
        self._events: list[torch.cuda.Event] = []

    def _record(self, code: int) -> None:
        if self._profile is not None:
            self._profile.note(code)
        event = new_event(external=self._external)
        event.record()
        self._codes.append(code)
        self._events.append(event)

    @property
    def has_passed(self) -> bool:
        """The device has come to the last mark."""
        return bool(self._events[-1].query())  # type: ignore[no-untyped-call]

    def seconds(self) -> dict[int, float]:
        """The seconds from each mark to the next, summed by code; the last mark is the end."""
        found: dict[int, float] = {}
        for code, begun, ended in zip(self._codes, self._events, self._events[1:], strict=False):
            found[code] = found.get(code, 0.0) + begun.elapsed_time(ended) / 1000
        return found


@dataclass(frozen=True)
class _TimedGraph:
    graph: StepGraph[Any, Any]
    marks: EventMarks


class _Pending(NamedTuple):
    """A measured step: the marks around it, and those within its graph, if it had one."""

    step: int
    around: EventMarks
    within: EventMarks | None

    def seconds(self) -> dict[int, float]:
        found = self.around.seconds()
        if self.within is not None:  # for what is around it, a graph is a part of the rest
            for code, seconds in self.within.seconds().items():
                found[code] = found.get(code, 0.0) + seconds
                found[marks.OTHER] -= seconds
        return found


class DeviceClock(StepClock):
    """Measures steps of a device that is not waited for.

    Ranks of a stage replay the same graphs, with events or without, since one of them would wait for the others'.

    memory       for graphs with events; None: there are none
    on_all       whether what is so here is so on all ranks of the stage, which ask at the same time
    """

    def __init__(self, every: int) -> None:
        super().__init__(every)
        self.memory: CaptureMemory | None = None
        self.on_all: Callable[[bool], bool] = lambda here: here
        self.missing: deque[Place] = deque()
        self._timed: dict[Place, _TimedGraph] = {}
        """The graphs with events, the one last used at the end."""
        self._replayed: list[Place] = []
        """The graph of the step that is measured now."""
        self._pending: deque[_Pending] = deque(maxlen=MOST_PENDING)

    @property
    def priority(self) -> int:
        """The priority of graphs with events: all others come first."""
        return Priority.FEW_STEPS

    def expect(self, graphs: StepGraphs[Any, Any]) -> None:
        """Capture the largest and the smallest of these graphs first, since steps may begin before one is idle."""
        plain = [shape for shape in graphs.kind.shapes if graphs.kind.priority(shape) is Priority.MOST_STEPS]
        self.missing.extend((graphs, shape) for shape in dict.fromkeys([*plain[:1], *plain[-1:]]))

    def capture_next(self) -> None:
        """Captures the next graph that is missing, in the place of the one that was not used for longest."""
        graphs, shape = place = self.missing.popleft()
        plain = graphs.captured.get(shape)
        if plain is None or self.memory is None:
            return
        while len(self._timed) >= MOST_GRAPHS:
            del self._timed[next(iter(self._timed))]
        taken, captured = EventMarks(external=True), None
        try:
            captured = self.memory.capture(partial(_compute, shape, graphs, plain, taken))
        except RuntimeError as error:  # steps do without: these graphs only measure
            logger.warning("steps of CUDA graphs are not measured layer by layer: %s", error)
        if not self.on_all(captured is not None) or captured is None:
            self.memory = None
            self.missing.clear()
            return
        replay, outputs = captured
        self._timed[place] = _TimedGraph(replace(plain, outputs=outputs, replay=replay), taken)

    @contextmanager
    def of_device(self, output: SchedulerOutput) -> Iterator[None]:
        """Measures a step that is started within, unless it replays a graph without events.

        What a profile slows down is measured for nothing, as other ranks do.
        """
        profile = marks.listener()
        around, self._replayed = EventMarks(external=False, profile=profile), []
        with marks.listened(around):
            around.begin(marks.OTHER)
            yield
            around.begin(marks.OTHER)
        if not self._replayed:
            self._add(_Pending(output.step, around, None), profile)
            return
        (place,) = self._replayed
        if (timed := self._timed.pop(place, None)) is not None:
            self._timed[place] = timed
            self._add(_Pending(output.step, around, timed.marks), profile)
        elif place not in self.missing and self.memory is not None:
            self.missing = deque([*self.missing, place][-MOST_GRAPHS:])

    def run(self, graphs: StepGraphs[Any, Any], step: PlannedStep) -> StepOutputs | None:
        """Starts a step as `StepGraphs.run`, by a graph with events if there is one."""
        captured = {
            shape: replace(graph, replay=partial(self._replay, (graphs, shape), graph))
            if (timed := self._timed.get((graphs, shape))) is None
            else replace(timed.graph, replay=partial(self._replay, (graphs, shape), timed.graph))
            for shape, graph in graphs.captured.items()
        }
        return graphs.run(step, captured)

    def take(self) -> list[MeasuredStep]:
        while self._pending and self._pending[0].around.has_passed:
            passed = self._pending.popleft()
            self.add(passed.step, passed.seconds())
        return super().take()

    def forget(self) -> None:
        super().forget()
        self._pending.clear()

    def _add(self, measured: _Pending, profile: marks.Marks | None) -> None:
        if profile is None:
            self._pending.append(measured)

    def _replay(self, place: Place, graph: StepGraph[Any, Any]) -> None:
        self._replayed.append(place)
        if (timed := self._timed.get(place)) is not None:  # its events are about to be overwritten
            kept = [each for each in self._pending if each.within is not timed.marks]
            self._pending = deque(kept, MOST_PENDING)
        graph.replay()


def _compute(shape: Any, graphs: StepGraphs[Any, Any], plain: StepGraph[Any, Any], taken: EventMarks) -> StepOutputs:
    """Computes a step as its graph does, with an event at each mark."""
    taken.clear()
    with marks.listened(taken):
        taken.begin(marks.OTHER)
        outputs: StepOutputs = graphs.kind.compute(shape, plain.inputs)
        taken.begin(marks.OTHER)
    return outputs
