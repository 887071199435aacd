"""Two sides of records of repeated runs: whether they can be compared, and by how much each figure differs.

A figure's ratio is that of the medians of both sides. Its interval is of a bootstrap: the ratio over draws from the
runs, with replacement. Where each side has several records, a record counts as one run with the median of its own,
since starts differ more than the runs of one. Records that were made in turns, A B A B or A B B A, are drawn in pairs,
so that what slows both of a pair cancels out.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvern.bench.record import Better, Case, Record, read_records
from kvern.errors import ConfigError

LEVEL = 0.99
"""Confidence of the intervals."""
DRAWS = 10_000
OWN = ("software.kvern", "software.commit")
"""Fields that are expected to differ: they are what is compared."""
UNCOMPARED = frozenset({"model", "cache_dir"})
"""Options that say nothing more."""
UNKNOWN = "not known"


@dataclass(frozen=True)
class Difference:
    """A field in which two sides differ, with both values as texts."""

    field: str
    a: str
    b: str

    @property
    def is_barrier(self) -> bool:
        """True if figures of the sides are of different things: all but kvern's own version, and options."""
        return self.field not in OWN and not self.field.startswith("options.")

    def __str__(self) -> str:
        return f"{self.field}: {self.a} / {self.b}"


@dataclass(frozen=True)
class Comparison:
    """A figure of both sides, and the ratio B / A with its interval. `pairs`: runs of A and B belong together."""

    benchmark: str
    case: str
    figure: str
    unit: str
    better: Better
    main: bool
    a: list[float]
    b: list[float]
    pairs: bool
    ratio: float
    low: float
    high: float

    @property
    def loss(self) -> tuple[float, float, float]:
        """The share by which B is worse, and its interval; negative where it is better."""
        if self.better == "lower":
            return self.ratio - 1, self.low - 1, self.high - 1
        return 1 / self.ratio - 1, 1 / self.high - 1, 1 / self.low - 1

    @property
    def verdict(self) -> str:
        """better or worse, if the interval bears it out; else empty."""
        _, low, high = self.loss
        return "worse" if low > 0 else "better" if high < 0 else ""

    @property
    def runs(self) -> str:
        """The number of runs, as text."""
        return f"{len(self.a)} pairs" if self.pairs else f"{len(self.a)} and {len(self.b)}"


@dataclass(frozen=True)
class Side:
    """Records of repeated runs of the same thing."""

    name: str
    records: list[Record]

    def of(self, benchmark: str) -> list[Record]:
        return [record for record in self.records if record.benchmark == benchmark]

    def figures(self) -> Iterator[tuple[str, str, str]]:
        """Yields the benchmark, case and name of each figure whose runs are known, once."""
        yield from dict.fromkeys(
            (record.benchmark, case.name, name)
            for record in self.records
            for case in record.cases
            for name, found in case.figures.items()
            if found.runs
        )

    def units(self, benchmark: str, case: str, figure: str) -> list[tuple[str, list[float]]]:
        """Returns the runs of a figure in each record that has them, with the time of the record."""
        return [
            (record.when or "", each.figures[figure].runs)
            for record in self.of(benchmark)
            for each in record.cases
            if each.name == case and figure in each.figures and each.figures[figure].runs
        ]


def read_sides(a: Sequence[Path], b: Sequence[Path]) -> tuple[Side, Side]:
    """Reads two sides from files and folders. Raises ConfigError if records of one side are of different things."""
    return _read(a), _read(b)


def _read(paths: Sequence[Path]) -> Side:
    records = sorted((record for path in paths for record in read_records(path)), key=lambda record: record.when or "")
    side = Side(" ".join(map(str, paths)), records)
    if apart := next(_differences(records), None):
        raise ConfigError(f"records of {side.name} are of different things: {apart}; give repeated runs of one thing")
    return side


def differences(a: Side, b: Side) -> list[Difference]:
    """Returns the fields in which records of two sides differ, those of kvern's own version among them."""
    return list(dict.fromkeys(_differences([*a.records, *b.records])))


def _differences(records: Sequence[Record]) -> Iterator[Difference]:
    """Yields the fields in which records differ from the first of their benchmark, and in cases of it from the first
    of the case's name."""
    firsts = dict[str, Record]()
    cases = dict[tuple[str, str], Case]()
    for record in records:
        yield from _settings(firsts.setdefault(record.benchmark, record), record)
        for case in record.cases:
            first = cases.setdefault((record.benchmark, case.name), case)
            yield from _apart(f"{case.name}.", first.workload, case.workload)


def _settings(a: Record, b: Record) -> Iterator[Difference]:
    """Yields the fields outside of cases in which two records of a benchmark differ."""
    for place in ("hardware", "software"):
        mine, other = (msgspec.to_builtins(getattr(record, place)) for record in (a, b))
        yield from _apart(f"{place}.", mine, other, without=frozenset({"memory_bytes"}))
    yield from _apart("", {"model": a.model}, {"model": b.model})
    if a.benchmark == "serve":  # its options are what a case's workload says, and addresses
        mine, other = (record.conditions.get("engine_options") for record in (a, b))
        if mine is not None and other is not None:
            defaults = dict.fromkeys((*mine, *other), "its default")
            yield from _apart("options.", defaults | mine, defaults | other, without=UNCOMPARED)
    else:
        yield from _apart("options.", a.options or {}, b.options or {}, without=UNCOMPARED)
        mine, other = ({"threads": record.conditions.get("threads")} for record in (a, b))
        yield from _apart("", mine, other)


def _apart(
    place: str, a: Mapping[str, Any], b: Mapping[str, Any], without: frozenset[str] = frozenset()
) -> Iterator[Difference]:
    """Yields the entries of both that differ."""
    for name in a:
        if name in b and name not in without and a[name] != b[name]:
            yield Difference(place + name, *(UNKNOWN if value is None else str(value) for value in (a[name], b[name])))


def comparisons(a: Side, b: Side) -> list[Comparison]:
    """Returns the figures that both sides have; those with values of zero or below have no ratio and are left out."""
    both = dict.fromkeys(b.figures())
    found = [_compared(a, b, key) for key in a.figures() if key in both]
    return [item for item in found if item is not None]


def _compared(a: Side, b: Side, key: tuple[str, str, str]) -> Comparison | None:
    of_a, of_b = a.units(*key), b.units(*key)
    whole = len(of_a) > 1 and len(of_b) > 1
    mine, others = (
        [statistics.median(runs) for _, runs in units] if whole else [run for _, runs in units for run in runs]
        for units in (of_a, of_b)
    )
    if min(mine) <= 0 or min(others) <= 0:
        return None
    pairs = whole and _in_turns([when for when, _ in of_a], [when for when, _ in of_b])
    low, high = interval(mine, others, pairs)
    benchmark, name, figure = key
    shown = next(case.figures[figure] for record in a.of(benchmark) for case in record.cases if case.name == name)
    ratio = statistics.median(others) / statistics.median(mine)
    return Comparison(*key, shown.unit, shown.better, shown.main, mine, others, pairs, ratio, low, high)


def _in_turns(a: Sequence[str], b: Sequence[str]) -> bool:
    """True if the times of both are known and each two that follow each other are one of each."""
    if len(a) != len(b) or not all((*a, *b)):
        return False
    order = [side for _, side in sorted([*((when, 0) for when in a), *((when, 1) for when in b)])]
    return all(one != other for one, other in zip(order[::2], order[1::2], strict=True))


def interval(a: Sequence[float], b: Sequence[float], pairs: bool) -> tuple[float, float]:
    """Returns the bootstrap's interval of the ratio of the medians, B over A: the same each time."""
    random = np.random.default_rng(0)
    drawn = random.integers(0, len(a), (DRAWS, len(a)))
    others = drawn if pairs else random.integers(0, len(b), (DRAWS, len(b)))
    ratios = np.median(np.asarray(b)[others], axis=1) / np.median(np.asarray(a)[drawn], axis=1)
    low, high = np.quantile(ratios, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
