"""An executor whose steps compute nothing and take the seconds that a price says."""

from collections.abc import Callable
from typing import NoReturn, Protocol

from kvern.engine.step_load import StepLoad, load_of
from kvern.request.layer_times import MeasuredStep
from kvern.request.step import ModelRunnerOutput, ScheduledTokens, SchedulerOutput, StepResult
from kvern.simulate.tier_answers import PricedTier


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


class Price(Protocol):
    """The seconds of steps."""

    def seconds(self, load: StepLoad, requests: int, joined: int) -> float:
        """Returns the time from the end of the step before to the end of a step, of which so many requests are new."""
        ...


Observe = Callable[[float, list[ScheduledTokens], list[str]], None]
"""Is told the end of a step, its tokens, and the requests of these."""


class SimulatedStep:
    """The result of a step, which has come when its time has passed."""

    def __init__(self, executor: "SimulatedExecutor", output: SchedulerOutput, submitted: float) -> None:
        self.output, self.submitted = output, submitted
        self._executor = executor

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
        self._clock, self._observe = clock, observe
        self._tokens: dict[int, int] = {}
        self._drawn: float | None = None
        """The seconds of the next step, if they are known already."""

    def submit(self, output: SchedulerOutput) -> StepResult:
        """Begins a step."""
        for new in output.joined:
            self._tokens[new.slot] = new.seed
        step = SimulatedStep(self, output, self._clock.now)
        self.flying.append(step)
        return step

    def end(self, output: SchedulerOutput, submitted: float) -> ModelRunnerOutput:
        """Ends the oldest step, submitted then."""
        begun = max(self.ended, submitted)
        self.ended = self.end_of(output, begun)
        self.busy += self.ended - begun
        self._clock.reach(self.ended)
        self._observe(self.ended, output.scheduled, output.request_ids)
        nothing = [None] * len(output.scheduled)
        return ModelRunnerOutput(self.sampled(output), list(nothing), list(nothing))

    def end_of(self, output: SchedulerOutput, begun: float) -> float:
        """Returns the end of a step that begins now, or when the one before ended."""
        if self._drawn is not None:
            drawn, self._drawn = self._drawn, None
            return begun + drawn
        return begun + self._seconds(output)

    def _seconds(self, output: SchedulerOutput) -> float:
        scheduled = output.scheduled
        return self.price.seconds(load_of(scheduled, output.encoding), len(scheduled), len(output.joined))

    def decode(self, load: StepLoad, most: int, until: float) -> list[float]:
        """Returns the ends of steps in which all rows decode, of which the next to be submitted has this load.

        They are at most so many, and end before a moment. The first is the one that is in flight, if there is one. The
        clock does not know yet that their time has passed.
        """
        rows = load.rows
        keys, reach = load.keys, load.reach
        found: list[float] = []
        flying = self.flying[0] if self.flying else None
        now = max(self.ended, self._clock.now if flying is None else flying.submitted)
        price = self.price.seconds
        while len(found) < most:
            in_flight = None if found else flying
            if self._drawn is None and in_flight is not None:
                self._drawn = self._seconds(in_flight.output)
            elif self._drawn is None:
                self._drawn = price(StepLoad(rows, keys, reach=reach), rows, 0)
            end = now + self._drawn
            if end >= until:
                break
            self.busy += end - now
            now, self._drawn = end, None
            found.append(end)
            if in_flight is None:
                keys += rows
                reach += 1
        if found:
            self.ended = now
        return found

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
