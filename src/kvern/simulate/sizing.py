"""The fewest engines with which a load keeps to its limits."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from kvern.errors import ConfigError
from kvern.loads.request import LoadRequest
from kvern.simulate.report import Slo
from kvern.simulate.study import Condition, run_once

Runs = list[dict[str, Any]]
WORDS = {"ttft": "the first token comes too late", "itl": "tokens come too slowly", "e2e": "answers end too late"}


class Sized(msgspec.Struct, frozen=True):
    """A number of engines of some cards each, with the figures of its runs."""

    engine: str
    replicas: int
    cards: int
    runs: Runs

    @property
    def good_share(self) -> float:
        """The share of good answers in the worst run."""
        return float(min(run["good_share"] for run in self.runs))

    def mean(self, name: str) -> float:
        """Returns the mean of a figure."""
        return float(sum(run[name] for run in self.runs)) / len(self.runs)

    @property
    def limit(self) -> str:
        """The limit that most answers miss."""
        late = {name: self.mean(f"late_{name}") for name in WORDS if f"late_{name}" in self.runs[0]}
        return max(late, key=lambda name: late[name])


class Sizing(msgspec.Struct, frozen=True):
    """The choice, the best that was not chosen, and what one engine fewer would do."""

    chosen: Sized
    fewer: Sized | None
    other: Sized | None

    def verdict(self, wanted: float) -> list[str]:
        """Returns lines that say what was chosen, what limits, and what came next."""
        chosen, margin = self.chosen, self.chosen.good_share - wanted
        good = f"in the worst run {chosen.good_share:.1%} of answers are good, and {wanted:.1%} are wanted"
        lines = [f"Chosen: {_named(chosen)}: {good}, a margin of {100 * margin:.1f} points."]
        if self.fewer is not None:
            fewer = self.fewer
            late = fewer.mean(f"late_{fewer.limit}")
            lines.append(f"With {_named(fewer)} {fewer.good_share:.1%} are: for {late:.1%} {WORDS[fewer.limit]}.")
        if self.other is not None:
            lines.append(f"The next best: {_named(self.other)}, with {self.other.good_share:.1%}.")
        return lines


def _named(sized: Sized) -> str:
    return f"{sized.replicas} x {sized.engine}" + (f", cards in all: {sized.cards}" if sized.cards else "")


def size(
    engines: Mapping[str, tuple[Condition, int, int]],
    loads: Sequence[tuple[int, Sequence[LoadRequest]]],
    slo: Slo,
    wanted: float,
) -> Sizing:
    """Finds the fewest cards, or engines, with which at least the share `wanted` of answers is good in every run.

    `engines`: by name the condition of an engine, its cards (0: unknown), and how many there may be. `loads`: seeds,
    and the load of each. All numbers of engines get the same. Raises ConfigError if none suffices.
    """
    found: list[Sized] = []
    seen: dict[tuple[str, int], Sized] = {}

    def run(name: str, replicas: int) -> Sized:
        if (name, replicas) not in seen:
            condition, cards, _ = engines[name]
            several = msgspec.structs.replace(condition, replicas=replicas)
            runs = [run_once(several, load, seed, slo) for seed, load in loads]
            seen[name, replicas] = Sized(name, replicas, cards * replicas, runs)
        return seen[name, replicas]

    for name, (_, _, most) in engines.items():
        fewest = least(lambda count, name=name: run(name, count).good_share >= wanted, most)  # type: ignore[misc]
        if fewest is not None:
            found.append(run(name, fewest))
    if not found:
        best = max(seen.values(), key=lambda sized: sized.good_share)
        raise ConfigError(
            f"the limits cannot be met: with {_named(best)} {best.good_share:.1%} of answers are good and {wanted:.1%} "
            f"are wanted; for {best.mean(f'late_{best.limit}'):.1%} {WORDS[best.limit]}"
        )
    found.sort(key=lambda sized: (sized.cards or sized.replicas, -sized.good_share))
    chosen = found[0]
    fewer = run(chosen.engine, chosen.replicas - 1) if chosen.replicas > 1 else None
    return Sizing(chosen, fewer, found[1] if len(found) > 1 else None)


def least(suffices: Callable[[int], bool], most: int) -> int | None:
    """Returns the least number from 1 to `most` that suffices, if more never do less; None: not even `most` does."""
    low, high = 0, 1
    while not suffices(high):
        if high == most:
            return None
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        if suffices(middle):
            high = middle
        else:
            low = middle
    return high
