"""An executor whose steps compute nothing and take the seconds that a price says."""

from collections.abc import Callable, Sequence
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


class MeanPrice:
    """The mean of several prices."""

    def __init__(self, prices: Sequence[Price]) -> None:
        self._prices = prices

    def seconds(self, load: StepLoad, requests: int, joined: int) -> float:
        """Returns the mean time of a step."""
        return sum(price.seconds(load, requests, joined) for price in self._prices) / len(self._prices)


Observe = Callable[[float, list[ScheduledTokens], list[str]], None]
"""Is told the end of a step, its tokens, and the requests of these."""


class SimulatedStep:
    """The result of a step, which has come when its time has passed."""

    def __init__(self, executor: "SimulatedExecutor", output: SchedulerOutput, submitted: float) -> None:
        self._executor = executor
        self._output, self._submitted = output, submitted

    def result(self) -> ModelRunnerOutput:
        """Lets the time of the step pass; it begins when the step before has ended."""
        return self._executor.end(self._output, self._submitted)


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
        self._clock, self._observe = clock, observe
        self._tokens: dict[int, int] = {}
        self._drawn: float | None = None
        """The seconds of the next step, if they are known already."""

    def submit(self, output: SchedulerOutput) -> StepResult:
        """Begins a step."""
        for new in output.joined:
            self._tokens[new.slot] = new.seed
        return SimulatedStep(self, output, self._clock.now)

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
        scheduled = output.scheduled
        return begun + self.price.seconds(load_of(scheduled, output.encoding), len(scheduled), len(output.joined))

    def decode(self, load: StepLoad, most: int, until: float) -> list[float]:
        """Lets the time of steps pass in which all rows decode, of which this is the first; returns their ends.

        They are at most so many, and end before a moment.
        """
        rows = load.rows
        keys, reach = load.keys, load.reach
        found: list[float] = []
        now = max(self.ended, self._clock.now)
        price = self.price.seconds
        while len(found) < most:
            if self._drawn is None:
                self._drawn = price(StepLoad(rows, keys, reach=reach), rows, 0)
            end = now + self._drawn
            if end >= until:
                break
            self.busy += end - now
            now, self._drawn = end, None
            found.append(end)
            keys += rows
            reach += 1
        if found:
            self.ended = now
            self._clock.reach(now)
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
