"""Plots of the report, as SVG within the page."""

import statistics
from collections.abc import Iterator, Sequence
from html import escape

WIDTH, LEFT = 900, 330
"""Pixels of a plot, and of the names at its left."""
ROW = 22


def trials_plot(trials: Sequence[tuple[str, Sequence[float], bool]]) -> str:
    """Returns a line for each configuration: its name, its runs as dots, and their mean; kept ones are blue."""
    low = min(min(runs) for _, runs, _ in trials)
    high = max(max(runs) for _, runs, _ in trials)
    high = min(high, 3 * low)

    def place(seconds: float) -> float:
        return LEFT + (WIDTH - LEFT - 20) * (min(seconds, high) - low) / ((high - low) or 1)

    def lines() -> Iterator[str]:
        height = ROW * (len(trials) + 2)
        yield f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="seconds of each configuration">'
        for seconds in (low, (low + high) / 2, high):
            x = place(seconds)
            yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{ROW}" y2="{height}" stroke="#ccc"/>'
            yield f'<text x="{x:.1f}" y="14" text-anchor="middle">{seconds:.4g} s</text>'
        for number, (name, runs, kept) in enumerate(trials):
            y = ROW * (number + 1.5)
            side = "b" if kept or number == 0 else "a"
            yield f'<text x="{LEFT - 10}" y="{y + 4}" text-anchor="end">{escape(name[:60])}</text>'
            for run in runs:
                yield f'<circle class="{side}" cx="{place(run):.1f}" cy="{y}" r="3"><title>{run:.5g} s</title></circle>'
            x = place(statistics.fmean(runs))
            yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y - 7}" y2="{y + 7}" stroke="#222"/>'
        yield "</svg>"

    return (
        "<p>Seconds of the workload: a dot is a run, a stroke the mean. Blue: better than all before it, beyond noise."
        f"</p>{''.join(lines())}"
    )
