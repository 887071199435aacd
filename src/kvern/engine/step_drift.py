"""A watch on the speed of an engine's own steps: whether they take longer than steps of their kind usually do.

    some of the steps --> log(seconds / usual) --> medians of GROUP steps of one bucket --> Page-Hinkley --> warning
                                                                      +-> median of the last ones --> `ratio`

A bucket is of one kind and of nearly one size, so that other traffic is no drift. What is usual is the median of a
bucket's first steps, of more of them the noisier they are. It falls if steps stay faster for long, but costs that were
learnt all the time would hide a slow drift: it rises only if a bucket was slow for AGAIN medians, when it is learnt
anew. It is kept from start to start (`step_baseline.py`). No clock is read here.
"""

import logging
import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from kvern.engine.step_load import StepLoad
from kvern.request.request import Request

logger = logging.getLogger("kvern")
EVERY, SELDOM = 32, 80
"""Each step so many behind the last one is measured: EVERY and one more for each row, SELDOM at most."""
WARM = 16
"""The number of steps after a start that are not measured: they fill caches and may compile."""
LEARNT = 32
"""The number of a bucket's steps whose median is usual: so many, or so many more until it is known well."""
MOST_LEARNT = 16 * LEARNT
ERROR = 0.015
"""The standard error in logarithms of a median that is known well."""
GROUP = 8
"""The number of a bucket's steps whose median is judged: a collection of garbage is in one of them."""
DELTA = 0.05
"""A slowdown in logarithms that is none."""
LIMIT = 0.3
"""The least sum of what medians are above DELTA that is a drift: seven of them, if steps take 10 % longer."""
NOISE = 10.0
"""The sum that is a drift divided by the square of a group's spread, for noisy steps: once in a million medians."""
LOWERS = 6.0
"""The sum of what a bucket's medians are below -DELTA that lowers what is usual: a cold card's fast spell does not."""
AGAIN = 2500
"""The number of a bucket's medians while steps are slow after which it is learnt again: 20,000 measured steps."""
RECENT = 15
"""The number of medians whose median is the ratio."""
SPREADS = 63
"""The number of groups whose median spread is the noise."""
MOST_BUCKETS = 2000
PAUSE = 60.0
"""The least seconds between two times of writing what is usual."""
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


def _is_known(values: Sequence[float]) -> bool:
    """Returns whether the median of these is known well, asked for each one more."""
    if len(values) % LEARNT or len(values) >= MOST_LEARNT:
        return len(values) >= MOST_LEARNT
    low, _, high = statistics.quantiles(values, n=4)
    deviation = (high - low) / 1.35  # as long as most of them are spread like a normal distribution
    return 1.25 * deviation / math.sqrt(len(values)) <= ERROR


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


class Look(Protocol):
    """A look at what a machine does that slows steps."""

    def begin(self) -> None:
        """A slowdown may begin now, which is cheap and often wrong."""

    def __call__(self) -> str:
        """Returns what is seen, since the last call of either, and what to do."""


class _Cell:
    """A bucket's times: logarithms of seconds."""

    __slots__ = ("below", "group", "learning", "run", "slow", "usual")

    def __init__(self, usual: float | None) -> None:
        self.usual = usual
        self.learning: list[float] = []
        self.group: list[float] = []
        self.below, self.run = 0.0, 0
        """The sum of what the last medians are below usual, and their number."""
        self.slow = 0
        """The number of medians since steps are slow."""


class StepDrift:
    """Is told how long steps took. `look` says why they may be slow."""

    def __init__(self, baseline: Baseline, look: Look) -> None:
        self._baseline, self._look = baseline, look
        self._cells = {bucket: _Cell(math.log(seconds)) for bucket, seconds in baseline.seconds.items()}
        self._warm = WARM
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._spreads: deque[float] = deque(maxlen=SPREADS)
        self._sum, self._run = 0.0, 0
        self._level = 0.0
        self._slow = False
        self._changed = False
        self._save_at = 0.0
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
            if _is_known(cell.learning):
                # what is learnt while steps are slow is not usual, unless they are for very long
                level = self._level if self._slow and cell.slow < AGAIN else 0.0
                usual = statistics.median(cell.learning) - level
                cell.learning, cell.slow = [], 0
                self._set(bucket, cell, usual)
                self._compare(bucket, usual)
        else:
            cell.group.append(value - cell.usual)
            if len(cell.group) == GROUP:
                group = sorted(cell.group)
                cell.group.clear()
                self._spreads.append(group[-2] - group[1])
                self._judge(bucket, cell, statistics.median(group))
        if self._changed and now >= self._save_at:
            self._changed, self._save_at = False, now + PAUSE
            self._baseline.save()

    def _set(self, bucket: Bucket, cell: _Cell, usual: float) -> None:
        cell.usual = usual
        self._baseline.seconds[bucket] = math.exp(usual)
        self._changed = True

    def _judge(self, bucket: Bucket, cell: _Cell, middle: float) -> None:
        assert cell.usual is not None
        cell.below, cell.run = max(0.0, cell.below - middle - DELTA), cell.run + 1
        if not cell.below:
            cell.run = 0
        elif cell.below > LOWERS:  # it was learnt from slow steps, or something has become faster
            self._set(bucket, cell, cell.usual - DELTA - cell.below / cell.run)
            cell.below, cell.run = 0.0, 0
            return
        cell.slow += self._slow
        if cell.slow >= AGAIN:
            logger.warning(
                "what %s usually take is learnt again: in the last %d that were measured it was %.3g ms, and they took "
                "longer", bucket.shown(), GROUP * AGAIN, 1000 * math.exp(cell.usual),
            )  # fmt: skip
            cell.usual = None
            return
        self._recent.append(middle)
        self._level = statistics.median(self._recent)
        # between the two limits neither is found, so that steps at one of them do not alternate
        self._sum += DELTA / 2 - middle if self._slow else middle - DELTA
        self._run += 1
        if self._sum <= 0:
            self._sum, self._run = 0.0, 0
        elif self._sum > max(LIMIT, NOISE * statistics.median(self._spreads) ** 2):
            self._turn(bucket, cell.usual)
        elif self._run == 1 and not self._slow:
            self._look.begin()

    def _turn(self, bucket: Bucket, usual: float) -> None:
        mean = self._sum / self._run
        self._sum, self._run = 0.0, 0
        self._slow = not self._slow
        for each in self._cells.values():
            each.slow = 0
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
