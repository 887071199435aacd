"""A watch on the speed of an engine's own steps: whether they take longer than steps of their kind usually do.

    some of the steps --> log(seconds / usual) --> medians of GROUP steps of one bucket --> Page-Hinkley --> warning
                                                                      +-> median of the last ones --> `ratio`

A bucket is of one kind and of nearly one size, so that other traffic is no drift. What is usual is the median of a
bucket's first steps and does not rise afterwards: costs that are learnt all the time would hide a slow drift. It is
kept from start to start (`step_baseline.py`). No clock is read here.
"""

import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from kvern.engine.step_load import StepLoad
from kvern.request.request import Request

logger = logging.getLogger("kvern")
EVERY, SELDOM = 32, 80
"""Each step so many behind the last one is measured: EVERY and one more for each row, SELDOM at most."""
WARM = 16
"""The number of steps after a start that are not measured: they fill caches and may compile."""
LEARNT = 32
"""The number of a bucket's steps whose median is usual."""
GROUP = 8
"""The number of a bucket's steps whose median is judged: a collection of garbage is in one of them."""
DELTA = 0.05
"""A slowdown in logarithms that is none."""
LIMIT = 0.3
"""The sum of what medians are above DELTA that is a drift: seven of them, if steps take 10 % longer."""
RECENT = 15
"""The number of medians whose median is the ratio."""
MOST_BUCKETS = 2000
PAUSE = 60.0
"""The least seconds between two times of writing what is usual, and of looking at the machine."""
FEW_KEYS = 512
"""Keys that take no time worth speaking of."""
PAIRS_OF_KEY = 16
"""So many pairs of a prompt take about as long as a key that is read for a decode."""
COMMON = 3
"""The number of buckets that are compared with other versions before that is said."""


class Bucket(NamedTuple):
    """Steps of one kind, `rows` in quarters of powers of two, `keys` in halves of them."""

    kind: str
    rows: int
    keys: int

    @classmethod
    def of(cls, load: StepLoad, requests: Sequence[Request]) -> "Bucket | None":
        """Returns the bucket of a step; None if it computes nothing, or images."""
        if not load.rows or load.encoding:
            return None
        kind = "prompt" if load.prompt else "decode" if load.rows == len(requests) else "drafts"
        keys = load.keys + int(load.pairs) // PAIRS_OF_KEY
        specs = [request.spec for request in requests]
        if {spec.adapter for spec in specs} - {None}:
            kind += "+adapter"
        if {spec.grammar is None for spec in specs} - {True}:
            kind += "+grammar"
        if {spec.params.logprobs for spec in specs} - {None}:
            kind += "+logprobs"
        return cls(kind, (load.rows**4).bit_length(), (max(keys, FEW_KEYS) ** 2).bit_length())

    @classmethod
    def read(cls, text: str) -> "Bucket":
        """Returns the bucket that `text` names. Raises ValueError."""
        kind, rows, keys = text.split(" ")
        return cls(kind, int(rows), int(keys))

    def __str__(self) -> str:
        return f"{self.kind} {self.rows} {self.keys}"

    def shown(self) -> str:
        """Returns the bucket in words."""
        first, last = _least(self.rows, 4), _least(self.rows + 1, 4) - 1
        rows = f"{first} rows" if first >= last else f"{first} to {last} rows"
        keys = (
            f"below {_least(self.keys + 1, 2):,}"
            if self.keys == (FEW_KEYS**2).bit_length()
            else f"from {_least(self.keys, 2):,}"
        )
        return f"{self.kind} steps of {rows} and {keys} keys"


def _least(length: int, parts: int) -> int:
    """The least number whose power of `parts` has so many bits."""
    return math.ceil(2 ** ((length - 1) / parts) - 1e-9)


class Baseline(Protocol):
    """The usual times of steps, kept from start to start."""

    seconds: dict[Bucket, float]
    earlier: Mapping[Bucket, float]
    """The usual times with other versions, the last ones, which `earlier_name` names."""
    earlier_name: str

    def save(self) -> None:
        """Writes `seconds`; that it cannot is no failure."""


class _Cell:
    """A bucket's times: logarithms of seconds."""

    __slots__ = ("below", "group", "learning", "usual")

    def __init__(self, usual: float | None) -> None:
        self.usual = usual
        self.learning: list[float] = []
        self.group: list[float] = []
        self.below = 0.0
        """The sum of what medians are below usual."""


class StepDrift:
    """Is told how long steps took. `look` says what a machine does that slows steps, since it was called last."""

    def __init__(self, baseline: Baseline, look: Callable[[], str]) -> None:
        self._baseline, self._look = baseline, look
        self._cells = {bucket: _Cell(math.log(seconds)) for bucket, seconds in baseline.seconds.items()}
        self._warm = WARM
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._sum, self._run = 0.0, 0
        self._level = 0.0
        self._slow = False
        self._changed = False
        self._save_at = self._look_at = 0.0
        self._compared: dict[Bucket, float] | None = {} if baseline.earlier else None

    @property
    def ratio(self) -> float:
        """The time of steps relative to what is usual; 0: that is not known yet."""
        return math.exp(self._level) if self._recent else 0.0

    def interval(self, rows: int) -> int:
        """Returns the number of steps from one that is measured, of so many rows, to the next."""
        return min(EVERY + rows, SELDOM)

    def took(self, bucket: Bucket, seconds: float, now: float) -> None:
        """Learns from or judges a step that took so long and ended `now`."""
        if self._warm:
            self._warm -= 1
            return
        cell = self._cells.get(bucket)
        if cell is None:
            if len(self._cells) >= MOST_BUCKETS:
                return
            cell = self._cells[bucket] = _Cell(None)
        value = math.log(max(seconds, 1e-9))
        if cell.usual is None:
            cell.learning.append(value)
            if len(cell.learning) == LEARNT:
                # what is learnt while steps are slow is not usual
                usual = statistics.median(cell.learning) - (self._level if self._slow else 0.0)
                cell.learning.clear()
                self._set(bucket, cell, usual)
                self._compare(bucket, usual)
        else:
            cell.group.append(value - cell.usual)
            if len(cell.group) == GROUP:
                middle = statistics.median(cell.group)
                cell.group.clear()
                self._judge(bucket, cell, middle)
        if now >= self._look_at:
            self._look_at = now + PAUSE
            self._look()
        if self._changed and now >= self._save_at:
            self._changed, self._save_at = False, now + PAUSE
            self._baseline.save()

    def _set(self, bucket: Bucket, cell: _Cell, usual: float) -> None:
        cell.usual = usual
        self._baseline.seconds[bucket] = math.exp(usual)
        self._changed = True

    def _judge(self, bucket: Bucket, cell: _Cell, middle: float) -> None:
        assert cell.usual is not None
        cell.below = max(0.0, cell.below - middle - DELTA)
        if cell.below > LIMIT:  # it was learnt from slow steps, or something has become faster
            cell.below = 0.0
            self._set(bucket, cell, cell.usual + middle)
            return
        self._recent.append(middle)
        self._level = statistics.median(self._recent)
        # between the two limits neither is found, so that steps at one of them do not alternate
        self._sum += DELTA / 2 - middle if self._slow else middle - DELTA
        self._run += 1
        if self._sum <= 0:
            self._sum, self._run = 0.0, 0
        elif self._sum > LIMIT:
            self._turn(bucket, cell.usual)

    def _turn(self, bucket: Bucket, usual: float) -> None:
        mean = self._sum / self._run
        self._sum, self._run = 0.0, 0
        self._slow = not self._slow
        if not self._slow:
            logger.warning("steps take as long as usual again: %.2f times as long", math.exp(DELTA / 2 - mean))
            return
        drift = DELTA + mean
        logger.warning(
            "steps take %.2f times as long as usual, the last of them %s: %.3g ms instead of %.3g ms. %s",
            math.exp(drift), bucket.shown(), 1000 * math.exp(usual + drift), 1000 * math.exp(usual), self._look(),
        )  # fmt: skip

    def _compare(self, bucket: Bucket, usual: float) -> None:
        """Says, once, how long steps take of what they took with other versions."""
        before = self._baseline.earlier.get(bucket)
        if self._compared is None or before is None:
            return
        self._compared[bucket] = usual - math.log(before)
        if len(self._compared) == COMMON:
            change = statistics.median(self._compared.values())
            say = logger.warning if change > DELTA else logger.info
            say("steps take %.2f times as long as with %s", math.exp(change), self._baseline.earlier_name)
            self._compared = None
