"""The page of `kvern bench compare`: one HTML file with a table and plots, which loads nothing from elsewhere.

`compare_page.html` is its template.
"""

import statistics
from collections.abc import Sequence

from kvern.bench.compare import LEVEL, Comparison, Difference, Side
from kvern.io.pages import render

WIDTH, LEFT = 900, 330
"""Pixels of a plot, and of the names at its left."""
ROW = 22


def page(a: Side, b: Side, apart: Sequence[Difference], found: Sequence[Comparison]) -> str:
    """Returns the page."""
    reach = max([0.01, *(abs(edge - 1) for item in found for edge in (item.low, item.high))])
    reach = min(reach, 2.0)

    def place(ratio: float) -> float:
        return LEFT + (WIDTH - LEFT - 20) * (max(-1.0, min(1.0, (ratio - 1) / reach)) + 1) / 2

    return render(
        "kvern.bench",
        "compare_page.html",
        a=a,
        b=b,
        barriers=[str(item) for item in apart if item.is_barrier],
        others=[str(item) for item in apart if not item.is_barrier],
        found=found,
        level=LEVEL,
        width=WIDTH,
        left=LEFT,
        row=ROW,
        scale=[(share, place(1 + share)) for share in (-reach, 0.0, reach)],
        place=place,
        cells_of=cells_of,
    )


def cells_of(item: Comparison) -> tuple[str, ...]:
    """Returns case, figure with its unit, medians of A and B, change, interval and runs as texts."""
    medians = (f"{statistics.median(runs):,.4g}" for runs in (item.a, item.b))
    interval = f"{item.low - 1:+.1%} to {item.high - 1:+.1%}"
    return item.case, f"{item.figure}, {item.unit}", *medians, f"{item.ratio - 1:+.1%}", interval, item.runs
