"""The page of `kvern bench compare`: one HTML file with a table and plots, which loads nothing from elsewhere."""

import statistics
from collections.abc import Iterator, Sequence
from html import escape

from kvern.bench.compare import LEVEL, Comparison, Difference, Side

WIDTH, LEFT = 900, 330
"""Pixels of a plot, and of the names at its left."""
ROW = 22
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 960px; padding: 0 1em; color: #222;
  background: #fff }
table { border-collapse: collapse; margin: 1em 0 } td, th { padding: .15em .8em; text-align: right }
td:first-child, td:nth-child(2), th:first-child, th:nth-child(2) { text-align: left }
tr:nth-child(even) td { background: #f4f4f4 } svg { width: 100%; height: auto } svg text { font-size: 12px }
.worse { color: #b3261e; fill: #b3261e; stroke: #b3261e } .better { color: #1b6e3c; fill: #1b6e3c; stroke: #1b6e3c }
.even { color: #555; fill: #555; stroke: #555 } .a { fill: #7a7a7a } .b { fill: #1f5fbf } text { stroke: none }
"""


def page(a: Side, b: Side, apart: Sequence[Difference], found: Sequence[Comparison]) -> str:
    """Returns the page."""
    barriers = "".join(f"<li>{escape(str(item))}</li>" for item in apart if item.is_barrier)
    others = "".join(f"<li>{escape(str(item))}</li>" for item in apart if not item.is_barrier)
    rows = "".join(_row(item) for item in found)
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>kvern bench compare</title>',
            f"<style>{STYLE}</style></head><body><h1>kvern bench compare</h1>",
            f"<p>A: {escape(a.name)}<br>B: {escape(b.name)}</p>",
            f"<h2>Not comparable</h2><ul>{barriers}</ul>" if barriers else "",
            f"<h2>What differs</h2><ul>{others}</ul>" if others else "",
            f"<h2>B beside A</h2><p>Change of the median with its interval ({LEVEL:.0%}). Red: B is worse.</p>",
            _forest(found),
            "<table><tr><th>case</th><th>figure</th><th>A</th><th>B</th><th>change</th><th>interval</th><th>runs</th>",
            f"</tr>{rows}</table><h2>Runs</h2><p>Each dot is a run, in order; grey: A, blue: B.</p>",
            *(_runs(item) for item in found if item.main),
            "</body></html>\n",
        ]
    )


def _row(item: Comparison) -> str:
    cells = cells_of(item)
    first = "".join(f"<td>{escape(cell)}</td>" for cell in cells[:4])
    return f'<tr>{first}<td class="{item.verdict or "even"}">{cells[4]}</td><td>{cells[5]}</td><td>{cells[6]}</td></tr>'


def cells_of(item: Comparison) -> tuple[str, ...]:
    """Returns case, figure with its unit, medians of A and B, change, interval and runs as texts."""
    medians = (f"{statistics.median(runs):,.4g}" for runs in (item.a, item.b))
    interval = f"{item.low - 1:+.1%} to {item.high - 1:+.1%}"
    return item.case, f"{item.figure}, {item.unit}", *medians, f"{item.ratio - 1:+.1%}", interval, item.runs


def _forest(found: Sequence[Comparison]) -> str:
    """The change of each figure, as a dot on its interval."""
    reach = max([0.01, *(abs(edge - 1) for item in found for edge in (item.low, item.high))])
    reach = min(reach, 2.0)

    def place(ratio: float) -> float:
        return LEFT + (WIDTH - LEFT - 20) * (max(-1.0, min(1.0, (ratio - 1) / reach)) + 1) / 2

    def lines() -> Iterator[str]:
        height = ROW * len(found) + 2 * ROW
        yield f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="changes with intervals">'
        for share in (-reach, 0.0, reach):
            x = place(1 + share)
            yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{ROW}" y2="{height}" stroke="#ccc"/>'
            yield f'<text x="{x:.1f}" y="14" text-anchor="middle">{share:+.1%}</text>'
        for number, item in enumerate(found):
            y = ROW * (number + 1.5)
            yield f'<text x="{LEFT - 10}" y="{y + 4}" text-anchor="end">{escape(f"{item.case}, {item.figure}")}</text>'
            yield (
                f'<g class="{item.verdict or "even"}"><line x1="{place(item.low):.1f}" x2="{place(item.high):.1f}" '
                f'y1="{y}" y2="{y}" stroke-width="2"/><circle cx="{place(item.ratio):.1f}" cy="{y}" r="4"/></g>'
            )
        yield "</svg>"

    return "".join(lines())


def _runs(item: Comparison) -> str:
    """The runs of a figure in order, A beside B."""
    values = [*item.a, *item.b]
    low, high = min(values), max(values)
    count = max(len(item.a), len(item.b))

    def lines() -> Iterator[str]:
        title = escape(f"{item.case}, {item.figure}, {item.unit}: {low:,.4g} to {high:,.4g}")
        yield f'<svg viewBox="0 0 {WIDTH} 130" role="img" aria-label="{title}"><text x="10" y="16">{title}</text>'
        for side, runs in (("a", item.a), ("b", item.b)):
            for number, value in enumerate(runs):
                x = 20 + (WIDTH - 40) * (number + (0.4 if side == "a" else 0.6)) / count
                y = 115 - 80 * (value - low) / ((high - low) or 1)
                yield f'<circle class="{side}" cx="{x:.1f}" cy="{y:.1f}" r="5"><title>{value:,.5g}</title></circle>'
        yield "</svg>"

    return "".join(lines())
