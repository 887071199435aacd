"""The report of a deployment: one HTML page that loads nothing from elsewhere, and the same as JSON."""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

import msgspec

from kvern.bench.compare_page import STYLE
from kvern.bench.machine import hardware, software
from kvern.deploy.journal import write_whole
from kvern.deploy.stage import Part, Work

PAGE = "report.html"
DATA = "report.json"


class Section(NamedTuple):
    """A stage: its name, result, seconds, and part of the report."""

    stage: str
    result: msgspec.Struct
    seconds: float
    part: Part


def write_report(work: Work, sections: Sequence[Section], failed: Sequence[str]) -> None:
    """Writes both files into the bundle's folder."""
    told = {
        "model": work.asked.model,
        "failed": list(failed),
        "software": msgspec.to_builtins(software()),
        "hardware": msgspec.to_builtins(hardware()),
        "asked": work.asked.identity,
        "stages": {
            section.stage: {"seconds": section.seconds, "result": msgspec.to_builtins(section.result)}
            for section in sections
        },
    }
    data = msgspec.json.format(msgspec.json.encode(told), indent=1) + b"\n"
    write_whole(work.asked.out / DATA, data)
    write_whole(work.asked.out / PAGE, page(work.asked.model, sections, failed).encode())


def page(model: str, sections: Sequence[Section], failed: Sequence[str]) -> str:
    """Returns the page."""
    title = f"{escape(model)}: {'failed' if failed else 'deployed'}"
    lines = "".join(f'<li class="worse">{escape(line)}</li>' for line in failed)
    return "\n".join(
        [
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
            f"<style>{STYLE}</style></head><body><h1>{title}</h1>",
            f"<ul>{lines}</ul>" if lines else "",
            *map(_section, sections),
            "</body></html>\n",
        ]
    )


def _section(section: Section) -> str:
    rows = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in section.part.rows)
    head = f"<h2>{escape(section.stage)}</h2><p>{section.seconds:.1f} s</p>"
    return f"{head}<table>{rows}</table>{section.part.html}"
