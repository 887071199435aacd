"""Costs of steps with parts of prompts: measured at the start, and corrected by every step that returns.

  seconds = products(rows) + per_key * keys that decodes read + per_pair * pairs of prompt tokens and their keys
          + per_encoding * work of an encoder of images

Products of few rows read weights and take constant time; those of many rows take time for each row. The time is
interpolated between the measured numbers of rows. No clock is read here.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from kvern.request.step import ScheduledTokens

TILE = 64
GAIN = 0.15
"""The share of its error that a step corrects."""
LARGEST_ERROR = 0.5
"""The limit of an error relative to the prediction: a much slower step was the first of its kind, or the host was
busy."""


@dataclass(frozen=True, slots=True)
class StepLoad:
    """The work of a step: `rows` tokens, decodes that read `keys`, and `pairs` of prompt tokens and keys.

    `encoding`: what an encoder of images does besides, as about so many tokens.
    """

    rows: int = 0
    keys: int = 0
    pairs: float = 0.0
    encoding: float = 0.0

    def with_prompt(self, start: int, count: int) -> "StepLoad":
        """Returns the load with tokens of a prompt from position `start` on in addition."""
        return StepLoad(self.rows + count, self.keys, self.pairs + count * (start + count / 2), self.encoding)


def load_of(scheduled: Iterable[ScheduledTokens], encoding: float = 0.0) -> StepLoad:
    """Returns the load of a step with these tokens; drafts count as decodes."""
    rows = keys = 0
    pairs = 0.0
    for item in scheduled:
        rows += item.count
        if item.count > (item.sampled or 1):
            pairs += item.count * (item.start + item.count / 2)
        else:
            keys += item.start + item.count
    return StepLoad(rows, keys, pairs, encoding)


class StepCosts:
    """Predicts times in seconds. `rows` ascend; `seconds` were measured for steps of so many rows.

    Rows of products come in tiles of `tile`; a tile takes as long with a single row.
    """

    def __init__(
        self, rows: Sequence[int], seconds: Sequence[float], per_key: float, per_pair: float, tile: int = TILE
    ) -> None:
        self.tile = tile
        self._rows, self._seconds = list(rows), list(seconds)
        self._per_key, self._per_pair = per_key, per_pair
        self._per_encoding = seconds[-1] / rows[-1]
        self._ascend(down=True)

    def seconds(self, load: StepLoad) -> float:
        """Returns the predicted time of a step; it grows with every row, key and pair."""
        products = sum(share * self._seconds[place] for place, share in self._between(load.rows))
        encoding = self._per_encoding * load.encoding
        return products + self._per_key * load.keys + self._per_pair * load.pairs + encoding

    def prompt_seconds(self, most: int, start: int, end: int) -> float:
        """Returns the predicted time of steps with the tokens `start` to `end` of a prompt, of at most `most` each."""
        begins = range(start, end, most)
        return sum(self.seconds(StepLoad().with_prompt(begin, min(most, end - begin))) for begin in begins)

    def encoding_within(self, seconds: float) -> float:
        """Returns the `StepLoad.encoding` that takes so long."""
        return seconds / self._per_encoding

    def learn(self, load: StepLoad, seconds: float) -> None:
        """Corrects the costs by the time of a step: each term takes its part of the error."""
        expected = self.seconds(load)
        error = max(-LARGEST_ERROR, min(LARGEST_ERROR, seconds / expected - 1))
        for place, share in self._between(load.rows):
            self._seconds[place] *= 1 + GAIN * error * share * self._seconds[place] / expected
        self._per_key *= 1 + GAIN * error * self._per_key * load.keys / expected
        self._per_pair *= 1 + GAIN * error * self._per_pair * load.pairs / expected
        self._per_encoding *= 1 + GAIN * error * self._per_encoding * load.encoding / expected
        self._ascend(down=error < 0)

    def _between(self, rows: int) -> list[tuple[int, float]]:
        """Returns the measured numbers of rows around `rows`, with the weight of each."""
        above = bisect_right(self._rows, rows)
        if above == 0:
            return [(0, 1.0)]
        if above == len(self._rows):
            return [(above - 1, rows / self._rows[-1])]
        low, high = self._rows[above - 1], self._rows[above]
        share = (rows - low) / (high - low)
        return [(above - 1, 1 - share), (above, share)]

    def _ascend(self, down: bool) -> None:
        """Makes the times ascend with the rows: lowers earlier ones, or raises later ones."""
        seconds = self._seconds
        self._seconds = list(accumulate(reversed(seconds), min))[::-1] if down else list(accumulate(seconds, max))


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

    costs: StepCosts
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
