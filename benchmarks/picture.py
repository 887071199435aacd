"""docs/images/compared.svg: three figures of kvern beside vLLM, as README shows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

WIDTH, LABEL, BAR, GAP, HEAD = 760, 150, 22, 8, 30
ROOM = WIDTH - LABEL - 110
STYLE = """
  text { font: 14px system-ui, sans-serif; fill: #1f2328 }
  .head { font-weight: 600 }
  .other { fill: #59636e }
  .kvern-bar { fill: #1a7f64 }
  .other-bar { fill: #b6bec7 }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc }
    .other { fill: #9198a1 }
    .kvern-bar { fill: #2ea886 }
    .other-bar { fill: #4c5560 }
  }
"""


class Compared(NamedTuple):
    """One figure of which less is better: what it is, its unit, and both engines' values."""

    what: str
    unit: str
    kvern: float
    vllm: float


def _bar(name: str, value: float, figure: Compared, at: int) -> str:
    kind = "kvern" if name == "kvern" else "other"
    length = round(ROOM * value / max(figure.kvern, figure.vllm))
    shown = f"{value:.3g}" if value < 100 else f"{value:.0f}"
    middle = at + BAR - 6
    return (
        f'  <text class="{kind}" x="{LABEL - 12}" y="{middle}" text-anchor="end">{name}</text>\n'
        f'  <rect class="{kind}-bar" x="{LABEL}" y="{at}" width="{length}" height="{BAR}" rx="3"/>\n'
        f'  <text class="{kind}" x="{LABEL + length + 8}" y="{middle}">{shown} {figure.unit}</text>\n'
    )


def picture(figures: Sequence[Compared]) -> str:
    """The figures as pairs of bars, one below the other."""
    parts, at = [], 0
    for figure in figures:
        parts.append(f'  <text class="head" x="0" y="{at + HEAD - 10}">{figure.what}</text>\n')
        at += HEAD
        parts.append(_bar("kvern", figure.kvern, figure, at))
        at += BAR + GAP // 2
        parts.append(_bar("vLLM 0.24", figure.vllm, figure, at))
        at += BAR + 2 * GAP
    told = "; ".join(f"{item.what}: kvern {item.kvern:.3g}, vLLM {item.vllm:.3g} {item.unit}" for item in figures)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {at}" width="{WIDTH}" role="img">\n'
        f"  <title>{told}</title>\n  <style>{STYLE}  </style>\n{''.join(parts)}</svg>\n"
    )
