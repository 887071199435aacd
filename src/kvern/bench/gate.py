"""The rule by which figures of new code pass beside those of a baseline."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvern.bench.compare import Comparison, Difference, Side, comparisons, differences
from kvern.errors import ConfigError

FINE = 0
LOSS = 1
UNTOLD = 2
"""Exit codes."""
LEAST_RUNS = 5
"""The runs of each side below which nothing is said: with four, one in eight figures has them all on one side."""
CLEAR = 3
"""An interval is too wide to bear out a loss if it is wider than so many tolerances, and than the loss."""


@dataclass(frozen=True)
class Judgement:
    """The judgement of one figure: its code and a line about it."""

    code: int
    line: str


def judge(found: Comparison, tolerance: float) -> Judgement:
    """Judges a figure: a loss above the tolerance must be borne out by an interval without zero that is not wide."""
    loss, low, high = found.loss
    width = high - low
    name = f"{found.benchmark}, {found.case}, {found.figure}"
    shown = f"{loss:+.1%} ({low:+.1%} to {high:+.1%}), {found.runs} runs".replace("pairs runs", "pairs")
    if (fewest := min(len(found.a), len(found.b))) < LEAST_RUNS:
        return Judgement(UNTOLD, f"cannot tell: {name}: {fewest} runs, and at least {LEAST_RUNS} of each are needed")
    if loss > tolerance and low > 0 and width <= max(CLEAR * tolerance, loss):
        return Judgement(LOSS, f"loss: {name}: {shown}, above {tolerance:.1%}")
    if loss <= tolerance and (width <= 2 * tolerance or high <= tolerance):
        return Judgement(FINE, f"fine: {name}: {shown}")
    return Judgement(UNTOLD, f"cannot tell: {name}: {shown} is too wide for {tolerance:.1%}: make more runs")


def judge_all(
    baseline: Side, candidate: Side, tolerance: float, names: Sequence[str] = (), allowed: Sequence[str] = ()
) -> list[Judgement]:
    """Judges the main figures of a baseline, or those with given names, in a candidate.

    `allowed`: fields, or the beginnings of their names, that may differ. Raises ConfigError for a name that no figure
    of the baseline has.
    """
    known = {name for record in baseline.records for case in record.cases for name in case.figures}
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"figures has {unknown[0]!r:.80}: those of {baseline.name} are {', '.join(sorted(known))}")
    apart = [item for item in differences(baseline, candidate) if _matters(item, allowed)]
    if apart:
        return [Judgement(UNTOLD, f"cannot tell: not comparable: {item}") for item in apart]
    wanted = {
        (record.benchmark, case.name, name)
        for record in baseline.records
        for case in record.cases
        for name, figure in case.figures.items()
        if (name in names if names else figure.main)
    }
    found = {(item.benchmark, item.case, item.figure): item for item in comparisons(baseline, candidate)}
    missing = sorted(wanted - found.keys())
    if not wanted:
        return [Judgement(UNTOLD, "cannot tell: the baseline has no main figures: give --figures")]
    return [
        *(judge(item, tolerance) for key, item in found.items() if key in wanted),
        *(Judgement(UNTOLD, f"cannot tell: {', '.join(key)}: not on both sides") for key in missing),
    ]


def code_of(judgements: Sequence[Judgement]) -> int:
    """Returns the exit code of all: a loss is one whatever else cannot be told."""
    codes = {item.code for item in judgements}
    return LOSS if LOSS in codes else UNTOLD if UNTOLD in codes else FINE


def _matters(item: Difference, allowed: Sequence[str]) -> bool:
    return (item.is_barrier or item.field.startswith("options.")) and not item.field.startswith(tuple(allowed))
