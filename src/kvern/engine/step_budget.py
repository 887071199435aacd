"""The tokens and the time that a step has for prompts and images."""

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from kvern.engine.step_load import StepLoad

if TYPE_CHECKING:
    from kvern.engine.step_costs import StepCosts

LEAST_TILES = 2
"""The least tiles of a step's first prompt, however long its decodes take, so that no prompt starves."""
FILLED = 1.15
"""The factor over the shortest step with a prompt that steps with prompts may always take.

If the host is slower than the GPU, the GPU computes that much in the same time.
"""
ENCODING = 0.5
"""The share of a step's budget that an encoder of images may take from prompts."""
OVERTIME = 0.1
"""The share by which a step may exceed its time if that completes a prompt and saves a step."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """The costs of steps, and the target of `seconds` for steps with decodes."""

    costs: "StepCosts"
    seconds: float


class StepBudget:
    """The budget of one step. Prompts take from it in turn: the first LEAST_TILES at least, others what is left of the
    time.

    Prompts are cut at the end of a tile of the products' rows. A prompt that cannot be cut waits until it is first.
    `spent` is True if the last prompt that was tried had no room.
    """

    def __init__(self, tokens: int, chunked: bool) -> None:
        self.tokens, self.spent = tokens, tokens <= 0
        self._chunked = chunked
        self._time: StepTime | None = None
        self._load = StepLoad()
        self._first = True

    def limit(self, time: StepTime, load: StepLoad) -> None:
        """Limits the time from now on; `load` is what the step computes already."""
        least = time.costs.seconds(load.with_prompt(0, LEAST_TILES * time.costs.tile))
        self._time, self._load = StepTime(time.costs, max(time.seconds, FILLED * least)), load

    def encode(self, compute: Callable[[float], float]) -> float:
        """Let `compute` add the work of an encoder, whose limit it is given and whose cost it returns, as tokens."""
        limit = float(self.tokens)
        if self._time is not None:
            spare = self._time.seconds - self._time.costs.seconds(self._load)
            limit = min(limit, self._time.costs.encoding_within(spare))
        encoding = compute(ENCODING * limit)
        if encoding:
            self._load = replace(self._load, encoding=encoding)
            self.tokens -= math.ceil(encoding) if self._chunked else 0
        return encoding

    def holds(self, length: int) -> bool:
        """True if some of a prompt of this length can be computed, or all of it if it cannot be cut."""
        self.spent = self.tokens < (1 if self._chunked else length)
        if self._time is not None and not self._first and not self.spent:
            self.spent = not self._fits(0, min(length, self._time.costs.tile) if self._chunked else length)
        return not self.spent

    def chunk(self, start: int, remaining: int, wanted: int | None = None, least: int = 1) -> int:
        """Returns how many of a prompt's `remaining` tokens from position `start` on the step can compute.

        The number is at most `wanted`, if the prompt can be cut, and 0 if it would be below `least`, of a span.
        """
        if not self.holds(remaining) or not self.takes(start, least):
            self.spent = True
            return 0
        count = min(remaining if wanted is None or not self._chunked else wanted, self.tokens)
        if not self._chunked or self._time is None or (count == remaining and self._fits(start, count, OVERTIME)):
            return count
        return max(least, self._cut(self._time, start, count))

    def takes(self, start: int, span: int) -> bool:
        """True if a span can be computed, which is not cut: the first prompt's however long that takes."""
        return span == 1 or (self.tokens >= span and (self._first or self._fits(start, span)))

    def take(self, start: int, count: int) -> None:
        """Subtracts the tokens of a prompt that the step computes, or none."""
        if count:
            self.tokens -= count
            self.spent = self.tokens <= 0
            self._load = self._load.with_prompt(start, count)
            self._first = False

    def _fits(self, start: int, count: int, overtime: float = 0.0) -> bool:
        if self._time is None:
            return True
        return self._time.costs.seconds(self._load.with_prompt(start, count)) <= self._time.seconds * (1 + overtime)

    def _cut(self, time: StepTime, start: int, most: int) -> int:
        """Returns as many tokens as there is time for."""
        if self._fits(start, most):
            return most
        count = bisect_right(range(1, most), False, key=lambda count: not self._fits(start, count))
        tile = time.costs.tile
        count -= (self._load.rows + count) % tile
        return min(most, max(count, LEAST_TILES * tile if self._first else tile))
