"""An executor whose steps compute nothing and take the seconds that a price says."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
from msgspec.structs import replace

from kvern.engine.step_load import StepLoad, load_of
from kvern.request.layer_times import MeasuredStep
from kvern.request.step import ModelRunnerOutput, ScheduledTokens, SchedulerOutput, StepResult
from kvern.simulate.launches import Launches
from kvern.simulate.tier_answers import PricedTier

if TYPE_CHECKING:
    import numpy.typing as npt

    Seconds = npt.NDArray[np.float64]


class VirtualClock:
    """Seconds that pass when somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        """Lets time pass."""
        self.now += seconds

    def reach(self, moment: float) -> None:
        """Lets time pass until a moment, unless that is over."""
        self.now = max(self.now, moment)


class Price(ABC):
    """The seconds of steps, each from the end of the step before to its own."""

    launches = Launches()
    """The work of the host meanwhile."""

    @abstractmethod
    def seconds(self, load: StepLoad, requests: int, joined: int) -> float:
        """Returns the time of the next step, of which so many requests are new."""

    def decodes(self, load: StepLoad, steps: int) -> "Seconds":
        """Returns the times of the next steps, in which all rows decode; the first has this load."""
        rows, keys = load.rows, load.keys
        return np.array(
            [self.seconds(replace(load, keys=keys + rows * step), rows, 0) for step in range(steps)], np.float64
        )

    def mark(self) -> Any:
        """Returns what `back` needs to draw again what is drawn from now on."""
        return None

    def back(self, mark: Any) -> None:
        """Forgets what was drawn since `mark`, which is None where nothing is drawn."""
        assert mark is None, "a price that draws goes back itself"


Observe = Callable[[float, list[ScheduledTokens], list[str]], None]
"""Is told the end of a step, its tokens, and the requests of these."""


class SimulatedStep:
    """The result of a step, which has come when its time has passed."""

    def __init__(self, executor: "SimulatedExecutor", output: SchedulerOutput, submitted: float) -> None:
        self.output, self.submitted = output, submitted
        self.is_launched = False
        """The host took long to launch it."""
        self._executor = executor

    def done(self) -> bool:
        """See `StepResult`: the time of a step passes when it is waited for, unless something goes on beside it."""
        return self._executor.has_ended(self)

    def result(self) -> ModelRunnerOutput:
        """Lets the time of the step pass; it begins when the step before has ended."""
        self._executor.flying.remove(self)
        return self._executor.end(self.output, self.submitted)

    def move(self, steps: int, number: int) -> None:
        """Lets it be a later step of the same rows, which has this number: so many of them have decoded."""
        output = self.output
        output.step = number
        output.joined.clear()
        output.scheduled = [
            ScheduledTokens(item.slot, item.start + item.count - 1 + steps, 1, 1) for item in output.scheduled
        ]


class _Ahead(NamedTuple):
    """Steps that were looked at: begin and times, and begin and ends; `known` is 1 if the first one has begun.

    `load`: that of the first one that has not begun. `was_drawn`: the time of the first was drawn before `mark`.
    """

    load: StepLoad
    times: "Seconds"
    ends: "Seconds"
    known: int
    was_drawn: bool
    mark: Any


class SimulatedExecutor:
    """Gives every row that samples a token of its request: the seed of its `RequestSpec`.

    `observe` is told of each step that ends.
    """

    tier: PricedTier | None = None

    def __init__(self, clock: VirtualClock, price: Price, observe: Observe) -> None:
        self.price = price
        self.ended = 0.0
        """The end of the last step."""
        self.busy = 0.0
        """The seconds of all steps."""
        self.flying: list[SimulatedStep] = []
        """The steps that have begun, the oldest first."""
        self._launched = 0.0
        """When the host had launched the last step of those that take it long."""
        self._clock, self._observe = clock, observe
        self._tokens: dict[int, int] = {}
        self._drawn: float | None = None
        """The seconds of the next step, if they are known already."""
        self._ahead: _Ahead | None = None

    def submit(self, output: SchedulerOutput) -> StepResult:
        """Begins a step."""
        for new in output.joined:
            self._tokens[new.slot] = new.seed
        step = SimulatedStep(self, output, self._clock.now)
        self.flying.append(step)
        if self.price.launches.tokens and (seconds := self.price.launches.of(load_of(output.scheduled))):
            step.is_launched = True
            self._clock.sleep(seconds)
            self._launched = self._clock.now
        return step

    def end(self, output: SchedulerOutput, submitted: float) -> ModelRunnerOutput:
        """Ends the oldest step, submitted then."""
        begun = max(self.ended, submitted)
        self.ended = self.end_of(output, begun)
        self.busy += self.ended - begun
        self._clock.reach(self.ended)
        self._observe(max(self.ended, self._launched), output.scheduled, output.request_ids)
        nothing = [None] * len(output.scheduled)
        return ModelRunnerOutput(self.sampled(output), list(nothing), list(nothing))

    def has_ended(self, step: SimulatedStep) -> bool:
        """Returns whether the oldest step has ended, as far as somebody would look before it is waited for."""
        return True

    def end_of(self, output: SchedulerOutput, begun: float) -> float:
        """Returns the end of a step that begins now, or when the one before ended."""
        if self._drawn is not None:
            drawn, self._drawn = self._drawn, None
            return begun + drawn
        return begun + self._seconds(output)

    def _seconds(self, output: SchedulerOutput) -> float:
        scheduled = output.scheduled
        return self.price.seconds(load_of(scheduled, output.encoding), len(scheduled), len(output.joined))

    def look(self, load: StepLoad, steps: int) -> "Seconds":
        """Returns the ends of steps in which all rows decode, of which the next to be submitted has this load.

        The first is the one that is in flight, if there is one. None has happened yet; see `take`.
        """
        flying = self.flying[0] if self.flying else None
        begun = max(self.ended, self._clock.now if flying is None else flying.submitted)
        mark, drawn = self.price.mark(), self._drawn is not None
        if flying is not None and not drawn:
            self._drawn = self._seconds(flying.output)
        elif flying is None and drawn:
            load = replace(load, keys=load.keys + load.rows, reach=load.reach + 1)
        known = [begun] if self._drawn is None else [begun, self._drawn]
        times = np.concatenate((known, self.price.decodes(load, steps + 1 - len(known))))
        self._ahead = _Ahead(load, times, np.add.accumulate(times), len(known) - 1, drawn, mark)
        return self._ahead.ends[1:]

    def take(self, count: int) -> None:
        """Lets the first of the steps have happened that were looked at; the clock does not know yet of their time."""
        ahead, self._ahead = self._ahead, None
        assert ahead is not None
        last = len(ahead.ends) - 1
        if count:
            self.ended = float(ahead.ends[count])
            self.busy += self.ended - float(ahead.ends[0])
        self._drawn = None if count == last else float(ahead.times[count + 1])  # the next has begun
        if count + 1 < last and ahead.mark is not None:
            self.price.back(ahead.mark)
            if ahead.known and not ahead.was_drawn:
                self._seconds(self.flying[0].output)
            if drawn := count + 1 - ahead.known:
                self.price.decodes(ahead.load, drawn)

    def sampled(self, output: SchedulerOutput) -> list[list[int]]:
        """Returns the tokens of each row."""
        tokens = self._tokens
        return [[tokens[item.slot]] if item.sampled else [] for item in output.scheduled]

    def idle(self) -> bool:
        """Nothing can be prepared."""
        return False

    def measured(self) -> list[MeasuredStep]:
        """No step is measured."""
        return []

    def abandon(self) -> NoReturn:
        """A simulated step never fails."""
        raise AssertionError("a simulated step has failed")
