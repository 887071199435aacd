"""Costs of steps with parts of prompts: measured at the start, and corrected by every step that returns.

  seconds = products(rows) + per_key * keys that decodes read + per_pair * pairs of prompt tokens and their keys
          + per_encoding * work of an encoder of images

Products of few rows read weights and take constant time; those of many rows take time for each row. The time is
interpolated between the measured numbers of rows. No clock is read here.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from kvern.engine.step_load import StepLoad

TILE = 64
GAIN = 0.15
"""The share of its error that a step corrects."""
LARGEST_ERROR = 0.5
"""The limit of an error relative to the prediction: a much slower step was the first of its kind, or the host was
busy."""


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

    @property
    def told(self) -> tuple[list[int], list[float], float, float]:
        """The present costs, of which equal ones can be made."""
        return list(self._rows), list(self._seconds), self._per_key, self._per_pair

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
