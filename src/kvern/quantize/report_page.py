"""The page that shows a mixture of precisions: one file of HTML, readable in light and dark, without scripts."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from kvern.quantize.mixed_report import MixedReport, Unit

PLOT_WIDTH = 760
PLOT_HEIGHT = 340
LEFT = 56
BOTTOM = 44
LEAST_LOSS = 1e-7
"""The smallest loss in plots, whose axis is logarithmic."""
HUES = {"plain": 220, "fp8": 190, "fp8-block": 175, "int8": 150, "int4-g32": 75, "int4-g64": 45, "int4-g128": 18}

STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --quiet: #59636e; --page: #ffffff; --panel: #f6f8fa; --line: #d1d9e0;
  --strong: #0550ae; --cell: 90%; --mark: 38%; --heat: 206, 60, 20; }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --quiet: #9198a1; --page: #0d1117; --panel: #151b23;
  --line: #3d444d; --strong: #79c0ff; --cell: 24%; --mark: 62%; --heat: 240, 110, 60; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page); margin: 2rem auto;
  max-width: 76rem; padding: 0 1.2rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .3rem; }
p { margin: .3rem 0 .8rem; max-width: 62rem; } .quiet { color: var(--quiet); }
.figures { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1rem 0; }
.figures div { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: .5rem 1rem; }
.figures b { display: block; font-size: 1.3rem; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .22rem .6rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { color: var(--quiet); font-weight: 600; } th:first-child, td:first-child { text-align: left; }
td small { opacity: .75; }
td.chosen { outline: 2px solid var(--strong); outline-offset: -2px; font-weight: 600; }
.legend span { display: inline-block; border-radius: 4px; padding: 0 .6rem; margin: 0 .4rem .3rem 0; }
svg { max-width: 100%; height: auto; } svg text { fill: var(--quiet); font-size: 12px; }
svg .axis { stroke: var(--line); } svg .curve { fill: none; stroke: var(--strong); stroke-width: 2; }
svg .here { fill: var(--strong); } svg .strong { fill: var(--text); font-weight: 600; }
"""


def page(report: MixedReport) -> str:
    """The whole document."""
    sections = (
        _head(report),
        _plot(report),
        _choices(report),
        _costs(report),
    )
    title = escape(f"{report.model}: mixed precision")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>\n'
        f"<body>{''.join(sections)}</body></html>\n"
    )


def _head(report: MixedReport) -> str:
    figures = [
        (f"{report.bits:.3f}", f"bits a weight, scales included; plain: {report.plain}"),
        (_number(report.loss), "expected loss, nats a token"),
    ]
    measured = report.measured
    if "loss" in measured:
        figures.append((_number(measured["loss"]), "measured loss of the whole mixture, nats a token"))
    if "perplexity" in measured:
        plain = measured["plain_perplexity"]
        change = f"{measured['perplexity'] / plain - 1:+.2%}"
        figures.append((change, f"perplexity, {plain:.4g} to {measured['perplexity']:.4g}"))
    boxes = "".join(f"<div><b>{escape(value)}</b>{escape(what)}</div>" for value, what in figures)
    texts = {"target_bits": "{:g} bits a weight", "max_loss": "a perplexity that grows by at most {:.3g}"}
    asked = ", ".join(texts.get(name, f"{name} {{:g}}").format(value) for name, value in report.budget.items())
    asked, about = asked or "choices of an edited report", report.calibration
    measured_with = f"{about.get('tokens', '?')} tokens of {about.get('source', 'unknown text')}"
    return (
        f'<h1>{escape(report.model)}</h1><p class="quiet">Mixed precision; asked for: {escape(asked)}. '
        f"Measured with {escape(measured_with)}.</p>"
        f'<div class="figures">{boxes}</div>'
        "<p>Loss is the mean Kullback-Leibler divergence of the next-token distribution from that of the plain model. "
        "Each unit, the matrices that multiply the same numbers, was stored in each precision alone, all others plain; "
        "the losses of a mixture's units add up to what is expected of it.</p>"
    )


def _plot(report: MixedReport) -> str:
    """Loss over bits: the best mixtures, models of one precision, and this one."""
    curve, uniform = report.curve(), report.uniform()
    here = (report.bits, report.loss)
    spots = [*curve, *uniform.values(), here]
    low, high = (choose(bits for bits, _ in spots) for choose in (min, max))
    logs = [math.log10(max(loss, LEAST_LOSS)) for _, loss in spots if loss > 0] or [0.0]
    bottom, top = math.floor(min(logs)), math.ceil(max(logs) + 1e-9)
    wide, tall = PLOT_WIDTH - LEFT - 24, PLOT_HEIGHT - BOTTOM - 16

    def place(bits: float, loss: float) -> tuple[float, float]:
        height = (max(math.log10(max(loss, LEAST_LOSS)), bottom) - bottom) / max(top - bottom, 1)
        return LEFT + wide * (bits - low) / max(high - low, 1e-9), 16 + tall * (1 - height)

    lines = []
    for power in range(bottom, top + 1):
        y = place(low, 10.0**power)[1]
        lines.append(f'<line class="axis" x1="{LEFT}" x2="{LEFT + wide}" y1="{y:.1f}" y2="{y:.1f}"/>')
        lines.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">1e{power}</text>')
    lines += [
        f'<text x="{place(bits, 1)[0]:.1f}" y="{16 + tall + 18}" text-anchor="middle">{bits}</text>'
        for bits in range(math.ceil(low), math.floor(high) + 1)
    ]
    title = "bits a weight; loss in nats a token"
    lines.append(f'<text x="{LEFT + wide / 2}" y="{PLOT_HEIGHT - 6}" text-anchor="middle">{title}</text>')
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in curve))
    lines.append(f'<polyline class="curve" points="{path}"/>')
    lines += _spots({name: place(*spot) for name, spot in uniform.items()}, place(*here), LEFT + wide)
    return (
        "<h2>Loss against size</h2><p>The line joins the best mixtures of each size; the points are models in one "
        "precision alone.</p>"
        f'<div class="wide"><svg viewBox="0 0 {PLOT_WIDTH} {PLOT_HEIGHT}" width="{PLOT_WIDTH}" role="img" '
        f'aria-label="Loss against bits a weight">{"".join(lines)}</svg></div>'
    )


def _spots(uniform: Mapping[str, tuple[float, float]], here: tuple[float, float], right: float) -> Iterator[str]:
    """Points with names, placed so that names do not overlap."""
    line, names = 0.0, []
    for name, (x, y) in sorted(uniform.items(), key=lambda item: (-item[1][0], -item[1][1])):
        line = y + 4 if not line or y + 4 < line - 14 or x > right - 90 else line - 14
        names.append((x, line))
        anchor, side = ("end", -9) if x > right - 90 else ("start", 9)
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" style="fill: {_color(name, "--mark")}"/>'
        yield f'<text x="{x + side:.1f}" y="{line:.1f}" text-anchor="{anchor}">{escape(name)}</text>'
    x, y = here
    yield f'<circle class="here" cx="{x:.1f}" cy="{y:.1f}" r="6"/>'
    crossed = any(abs(at - x) < 90 and abs(other - y + 8) < 14 for at, other in names)
    side, line = (-8, y + 30) if crossed else (10, y - 8)
    yield f'<text class="strong" x="{x + side:.1f}" y="{line:.1f}">this mixture</text>'


def _choices(report: MixedReport) -> str:
    """A row for each layer, a column for each kind of unit."""
    kinds = list(dict.fromkeys(_kind(unit) for unit in report.units))
    layers: dict[str, dict[str, Unit]] = {}
    for unit in report.units:
        layers.setdefault(_layer(unit), {})[_kind(unit)] = unit
    rows = []
    for layer, units in layers.items():
        cells = [_choice_cell(units[kind]) if kind in units else "<td></td>" for kind in kinds]
        rows.append(f"<tr><td>{escape(layer)}</td>{''.join(cells)}</tr>")
    names = [name for name in HUES if any(name == unit.chosen for unit in report.units)]
    names += sorted({unit.chosen for unit in report.units} - set(names))
    share = {name: sum(unit.parameters for unit in report.units if unit.chosen == name) for name in names}
    legend = "".join(
        f'<span style="background: {_color(name)}">{escape(name)}: {share[name] / report.parameters:.1%} of the weights'
        "</span>"
        for name in names
    )
    return (
        "<h2>Each layer's choice</h2><p>With the loss that it is expected to cost.</p>"
        f'<p class="legend">{legend}</p>'
        f'<div class="wide"><table>{_header(["layer", *kinds])}{"".join(rows)}</table></div>'
    )


def _choice_cell(unit: Unit) -> str:
    text = f"{escape(unit.chosen)} <small>{_number(unit.choice.loss)}</small>"
    return f'<td style="background: {_color(unit.chosen)}" title="{escape(unit.name)}">{text}</td>'


def _costs(report: MixedReport) -> str:
    """A table of all units with the loss of each precision, ordered by the loss that one bit less would cost."""
    names = list(dict.fromkeys(name for unit in report.units for name in unit.choices))
    losses = [choice.loss for unit in report.units for choice in unit.choices.values() if choice.loss > 0]
    least, largest = math.log10(max(min(losses, default=1), LEAST_LOSS)), math.log10(max(losses, default=1))
    rows = []
    for unit in sorted(report.units, key=_price, reverse=True):
        cells = [f"<td>{escape(unit.name)}</td><td>{unit.parameters:,}</td>"]
        for name in names:
            if name not in unit.choices:
                cells.append("<td></td>")
                continue
            choice = unit.choices[name]
            heat = (math.log10(max(choice.loss, 10**least)) - least) / max(largest - least, 1e-9)
            mark = ' class="chosen"' if name == unit.chosen else ""
            bits = choice.size / unit.parameters
            cells.append(
                f'<td{mark} style="background: rgba(var(--heat), {0.5 * heat:.2f})" title="{bits:.3f} bits a weight">'
                f"{_number(choice.loss)}</td>"
            )
        cells += [_step(unit.smaller(), "+"), _step(unit.larger(), "-")]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    head = ["unit", "weights", *names, "a megabit less", "a megabit more"]
    return (
        "<h2>What each precision costs, and why one was chosen</h2><p>Loss of each unit in each precision, nats a "
        "token; the chosen one is framed. First come the units that would lose most for each bit saved. The "
        "last two columns name the cheapest step to fewer bits, with the loss that it adds for each megabit saved, and "
        "the best step to more, with the loss that it takes away for each megabit spent: bits lie where they are worth "
        "most.</p>"
        f'<div class="wide"><table>{_header(head)}{"".join(rows)}</table></div>'
    )


def _step(step: tuple[str, float] | None, sign: str) -> str:
    """The best step to another precision and its loss a megabit."""
    return "<td></td>" if step is None else f"<td><small>{escape(step[0])}</small> {sign}{_number(1e6 * step[1])}</td>"


def _price(unit: Unit) -> float:
    step = unit.smaller() or unit.larger()
    return step[1] if step else 0.0


def _kind(unit: Unit) -> str:
    return re.sub(r"^.*layers\.\d+\.", "", unit.name)


def _layer(unit: Unit) -> str:
    found = re.search(r"layers\.(\d+)\.", unit.name)
    return found[1] if found else unit.name


def _color(name: str, lightness: str = "--cell") -> str:
    return f"hsl({HUES.get(name, sum(name.encode()) % 360)} 60% var({lightness}))"


def _header(names: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in names)}</tr>"


def _number(value: float) -> str:
    return (
        "0"
        if value == 0
        else f"{value:.1e}"
        if abs(value) < 1e-3
        else f"{value:.4f}"
        if abs(value) < 1
        else f"{value:.3g}"
    )
