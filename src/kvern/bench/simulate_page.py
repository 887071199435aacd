"""The page of `kvern simulate --report`: one HTML file with a table and plots, which loads nothing from elsewhere.

`simulate_page.html` is its template.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kvern.bench.compare_page import LEFT, ROW, WIDTH
from kvern.io.pages import render
from kvern.simulate.report import PERCENTS, interval

TIMES = {"ttft": "Time to the first token", "itl": "Time between tokens", "e2e": "Time to the last token"}
OVER_TIME = {
    "Requests per second": ("arrived", "ended"),
    "Tokens per second": ("tokens",),
    "Requests at a time": ("waiting", "answering"),
}
TALL = 110
"""Pixels of a plot over time."""

Runs = Sequence[Mapping[str, Any]]
"""The figures of a condition, run by run; each has its `series`."""


def page(found: Mapping[str, Runs], rows: Sequence[tuple[str, Sequence[str]]], load: str, basis: str) -> str:
    """Returns the page. `rows`: the table's, with a cell for each condition."""
    return render(
        "kvern.bench",
        "simulate_page.html",
        found=found,
        rows=rows,
        load=load,
        basis=basis,
        width=WIDTH,
        left=LEFT,
        row=ROW,
        tall=TALL,
        over_time=OVER_TIME,
        percentiles=[(title, *each) for name, title in TIMES.items() if (each := _percentiles(name, found))[1]],
        greatest=lambda series, keys: max([1e-9, *(value for key in keys for value in series[key])]),
        place=lambda share: LEFT + (WIDTH - LEFT - 20) * share,
    )


def _percentiles(name: str, found: Mapping[str, Runs]) -> tuple[float, list[tuple[str, list[float], float, float]]]:
    """Returns the greatest time, and of each condition the means of its percentiles and the bounds of the last.

    Conditions of which no run has the time are left out.
    """
    keys = [f"p{percent}_{name}_ms" for percent in PERCENTS]
    conditions = []
    for condition, runs in found.items():
        all_runs = [interval(values) for key in keys if (values := [run[key] for run in runs if key in run])]
        if all_runs:
            conditions.append((condition, [mean for mean, _, _ in all_runs], *all_runs[-1][1:]))
    return max([1e-9, *(high for *_, high in conditions)]), conditions
