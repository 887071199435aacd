"""How much a step may still compute: tokens, and with decodes in it no more of prompts than its time allows."""

from bisect import bisect_right
from dataclasses import dataclass

from kvern.engine.step_costs import StepCosts, StepLoad

LEAST_TOKENS = 128
"""Of a step's first prompt, however long its decodes take: nobody starves."""
TILE = 64
"""Rows of products come in tiles, and a tile takes as long with a single row: prompts are cut where one ends."""
OVERTIME = 0.1
"""As a share, by which a step may be longer than it should if a prompt is complete then and needs no step more."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """What steps cost, and how many `seconds` one with decodes should take."""

    costs: StepCosts
    seconds: float


class StepBudget:
    """Of one step. Prompts take theirs in turn: the first LEAST_TOKENS at least, others what is left of the time.

    A prompt that cannot be cut waits until it is the first.
    """

    def __init__(self, tokens: int, chunked: bool) -> None:
        self.tokens = tokens
        self._chunked = chunked
        self._time: StepTime | None = None
        self._load = StepLoad()
        self._first = True

    def limit(self, time: StepTime, load: StepLoad) -> None:
        """Keep to a time from now on; `load` is what the step computes already."""
        self._time, self._load = time, load

    def holds(self, length: int) -> bool:
        """Whether something of a prompt of this length, or all if it cannot be cut, can be computed."""
        if self.tokens <= 0 or (length > self.tokens and not self._chunked):
            return False
        return self._first or self._fits(0, min(length, TILE) if self._chunked else length)

    def chunk(self, start: int, remaining: int) -> int:
        """How many of a prompt's `remaining` tokens, from position `start` on, the step can compute."""
        if not self.holds(remaining):
            return 0
        count = min(remaining, self.tokens)
        if not self._chunked or (count == remaining and self._fits(start, count, OVERTIME)):
            return count
        return self._cut(start, count)

    def take(self, start: int, count: int) -> None:
        """Tokens of a prompt are computed by the step."""
        self.tokens -= count
        self._load = self._load.with_prompt(start, count)
        self._first = False

    def _fits(self, start: int, count: int, overtime: float = 0.0) -> bool:
        if self._time is None:
            return True
        return self._time.costs.seconds(self._load.with_prompt(start, count)) <= self._time.seconds * (1 + overtime)

    def _cut(self, start: int, most: int) -> int:
        """As many tokens as there is time for."""
        if self._fits(start, most):
            return most
        count = bisect_right(range(1, most), False, key=lambda count: not self._fits(start, count))
        count -= (self._load.rows + count) % TILE
        return min(most, max(count, LEAST_TOKENS if self._first else TILE))
