"""The page that shows a mixture of precisions: one file of HTML, readable in light and dark, without scripts.

`report_page.html` is its template.
"""

import math
import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple

from kvern.io.pages import render
from kvern.quantize.mixed_report import MixedReport, Unit

PLOT_WIDTH = 760
PLOT_HEIGHT = 340
LEFT = 56
BOTTOM = 44
LEAST_LOSS = 1e-7
"""The smallest loss in plots, whose axis is logarithmic."""
HUES = {"plain": 220, "fp8": 190, "fp8-block": 175, "int8": 150, "int4-g32": 75, "int4-g64": 45, "int4-g128": 18}


class Spot(NamedTuple):
    """A point of the plot; its name stands at `at`, on `line`, whose start or end is the `anchor`."""

    name: str
    x: float
    y: float
    at: float
    line: float
    anchor: str = "start"


def page(report: MixedReport) -> str:
    """The whole document."""
    layers: dict[str, dict[str, Unit]] = {}
    for unit in report.units:
        layers.setdefault(_layer(unit), {})[_kind(unit)] = unit
    used = [name for name in HUES if any(name == unit.chosen for unit in report.units)]
    used += sorted({unit.chosen for unit in report.units} - set(used))
    share = {name: sum(unit.parameters for unit in report.units if unit.chosen == name) for name in used}
    texts = {"target_bits": "{:g} bits a weight", "max_loss": "a perplexity that grows by at most {:.3g}"}
    asked = ", ".join(texts.get(name, f"{name} {{:g}}").format(value) for name, value in report.budget.items())
    about = report.calibration
    losses = [choice.loss for unit in report.units for choice in unit.choices.values() if choice.loss > 0]
    least, largest = math.log10(max(min(losses, default=1), LEAST_LOSS)), math.log10(max(losses, default=1))
    return render(
        "kvern.quantize",
        "report_page.html",
        report=report,
        figures=list(_figures(report)),
        asked=asked or "choices of an edited report",
        measured_with=f"{about.get('tokens', '?')} tokens of {about.get('source', 'unknown text')}",
        plot=_plot(report),
        layers=layers,
        kinds=list(dict.fromkeys(map(_kind, report.units))),
        legend=[(name, share[name] / report.parameters) for name in used],
        units=sorted(report.units, key=_price, reverse=True),
        names=list(dict.fromkeys(name for unit in report.units for name in unit.choices)),
        heat=partial(_heat, least=least, largest=largest),
        number=_number,
        color=_color,
    )


def _figures(report: MixedReport) -> Iterator[tuple[str, str]]:
    yield f"{report.bits:.3f}", f"bits a weight, scales included; plain: {report.plain}"
    yield _number(report.loss), "expected loss, nats a token"
    measured = report.measured
    if "loss" in measured:
        yield _number(measured["loss"]), "measured loss of the whole mixture, nats a token"
    if "perplexity" in measured:
        plain = measured["plain_perplexity"]
        yield f"{measured['perplexity'] / plain - 1:+.2%}", f"perplexity, {plain:.4g} to {measured['perplexity']:.4g}"


def _plot(report: MixedReport) -> dict[str, object]:
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

    named = list(_named({name: place(*spot) for name, spot in uniform.items()}, LEFT + wide))
    return {
        "width": PLOT_WIDTH,
        "height": PLOT_HEIGHT,
        "left": LEFT,
        "right": LEFT + wide,
        "bottom": 16 + tall,
        "losses": [(place(low, 10.0**power)[1], power) for power in range(bottom, top + 1)],
        "bits": [(place(bits, 1)[0], bits) for bits in range(math.ceil(low), math.floor(high) + 1)],
        "curve": [place(*point) for point in curve],
        "spots": named,
        "here": _here(*place(*here), named),
    }


def _named(uniform: Mapping[str, tuple[float, float]], right: float) -> Iterator[Spot]:
    """Points with names, placed so that names do not overlap."""
    line = 0.0
    for name, (x, y) in sorted(uniform.items(), key=lambda item: (-item[1][0], -item[1][1])):
        line = y + 4 if not line or y + 4 < line - 14 or x > right - 90 else line - 14
        anchor, side = ("end", -9) if x > right - 90 else ("start", 9)
        yield Spot(name, x, y, x + side, line, anchor)


def _here(x: float, y: float, others: list[Spot]) -> Spot:
    crossed = any(abs(spot.x - x) < 90 and abs(spot.line - y + 8) < 14 for spot in others)
    side, line = (-8, y + 30) if crossed else (10, y - 8)
    return Spot("this mixture", x, y, x + side, line)


def _heat(loss: float, least: float, largest: float) -> str:
    share = (math.log10(max(loss, 10**least)) - least) / max(largest - least, 1e-9)
    return f"{0.5 * share:.2f}"


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
