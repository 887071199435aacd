"""The fewest engines with which a load keeps to its limits."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from kvern.errors import ConfigError
from kvern.loads.request import LoadRequest
from kvern.simulate.report import Slo
from kvern.simulate.study import Condition, run_once

Runs = list[dict[str, Any]]
WORDS = {"ttft": "the first token comes too late", "itl": "tokens come too slowly", "e2e": "answers end too late"}


class Sized(msgspec.Struct, frozen=True):
    """A number of engines of some cards each, with the figures of its runs.

    `split`: how many of them compute long prompts and how many answer; None: all do both.
    """

    engine: str
    replicas: int
    cards: int
    runs: Runs
    split: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        """The engines in words."""
        divided = "" if self.split is None else f" ({self.split[0]}+{self.split[1]})"
        return f"{self.replicas} x {self.engine}{divided}"

    @property
    def good_share(self) -> float:
        """The share of good answers in the worst run."""
        return float(min(run["good_share"] for run in self.runs))

    def mean(self, name: str) -> float:
        """Returns the mean of a figure in the runs that have it; NaN if none has."""
        values = [run[name] for run in self.runs if name in run]
        return float(sum(values)) / len(values) if values else math.nan

    @property
    def limit(self) -> str:
        """The limit that most answers miss."""
        late = {name: self.mean(f"late_{name}") for name in WORDS if f"late_{name}" in self.runs[0]}
        return max(late, key=lambda name: late[name])


class Sizing(msgspec.Struct, frozen=True):
    """The choice, and what one engine fewer would do.

    `others`: the fewest engines of each other kind, the best first; `short`: the most of those that never suffice.
    `left_out`: what was not run, with the reason.
    """

    chosen: Sized
    fewer: Sized | None
    others: list[Sized]
    short: list[Sized]
    left_out: list[str]

    def verdict(self, wanted: float) -> list[str]:
        """Returns lines that say what was chosen, what limits, and what came next."""
        chosen, margin = self.chosen, self.chosen.good_share - wanted
        good = f"in the worst run {chosen.good_share:.1%} of answers are good, and {wanted:.1%} are wanted"
        lines = [f"Chosen: {_named(chosen)}: {good}, a margin of {100 * margin:.1f} points."]
        if self.fewer is not None:
            fewer = self.fewer
            late = fewer.mean(f"late_{fewer.limit}")
            lines.append(f"With {_named(fewer)}, {fewer.good_share:.1%} are: for {late:.1%} {WORDS[fewer.limit]}.")
        if self.others:
            other = self.others[0]
            margin = 100 * (other.good_share - wanted)
            lines.append(
                f"The next best: {_named(other)}, with {other.good_share:.1%}, a margin of {margin:.1f} points."
            )
        for most in self.short:
            late = most.mean(f"late_{most.limit}")
            lines.append(f"Not even {_named(most)} suffice: {most.good_share:.1%}; for {late:.1%} {WORDS[most.limit]}.")
        return [*lines, *(f"Left out: {each}." for each in self.left_out)]


def _named(sized: Sized) -> str:
    return sized.name + (f" on {sized.cards} card{'s' * (sized.cards > 1)}" if sized.cards else "")


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
            several = _several(condition, replicas)
            runs = [run_once(several, load, seed, slo) for seed, load in loads]
            seen[name, replicas] = Sized(name, replicas, cards * replicas, runs, several.split)
        return seen[name, replicas]

    def suffices(name: str, replicas: int) -> bool:
        return run(name, replicas).good_share >= wanted

    short: list[Sized] = []
    left_out: list[str] = []
    for name, (condition, _, most) in engines.items():
        first = 1 if condition.split is None else 2
        if most < first:
            left_out.append(f"{name}: a split needs at least two engines")
            continue
        fewest = least(partial(suffices, name), most, first)
        (short if fewest is None else found).append(run(name, most if fewest is None else fewest))
    if not seen:
        raise ConfigError("a split needs at least two engines: allow more, or let split be none")
    if not found:
        best = max(seen.values(), key=lambda sized: sized.good_share)
        raise ConfigError(
            f"the limits cannot be met: with {_named(best)} {best.good_share:.1%} of answers are good and {wanted:.1%} "
            f"are wanted; for {best.mean(f'late_{best.limit}'):.1%} {WORDS[best.limit]}"
        )
    found.sort(key=lambda sized: (sized.cards or sized.replicas, -sized.good_share))
    chosen = found[0]
    first = 1 if engines[chosen.engine][0].split is None else 2
    fewer = run(chosen.engine, chosen.replicas - 1) if chosen.replicas > first else None
    return Sizing(chosen, fewer, found[1:], short, left_out)


def _several(condition: Condition, replicas: int) -> Condition:
    """Returns a condition with so many engines; prefill and decode engines keep to their ratio as far as possible."""
    split = condition.split
    if split is not None:
        prefill = min(max(1, round(replicas * split[0] / sum(split))), replicas - 1)
        split = prefill, replicas - prefill
    return msgspec.structs.replace(condition, replicas=replicas, split=split)


def least(suffices: Callable[[int], bool], most: int, first: int = 1) -> int | None:
    """Returns the least number from `first` to `most` that suffices, if more never do less; None: `most` does not."""
    low, high = first - 1, first
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
