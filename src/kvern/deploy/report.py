"""The report of a deployment: one HTML page that loads nothing from elsewhere, and the same as JSON.

`report.html` is the page's template.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from markupsafe import Markup

from kvern.bench.machine import hardware, software
from kvern.deploy.journal import write_whole
from kvern.deploy.stage import Part, Work
from kvern.io.pages import render

PAGE = "report.html"
DATA = "report.json"


class Section(NamedTuple):
    """A stage: its name, result, seconds, and part of the report."""

    stage: str
    result: msgspec.Struct
    seconds: float
    part: Part

    @property
    def html(self) -> Markup:
        """The stage's HTML, which has escaped what it shows."""
        return Markup(self.part.html)  # noqa: S704


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
    write_whole(work.folder / DATA, data)
    write_whole(work.folder / PAGE, page(work.asked.model, sections, failed).encode())


def page(model: str, sections: Sequence[Section], failed: Sequence[str]) -> str:
    """Returns the page."""
    title = f"{model}: {'failed' if failed else 'deployed'}"
    return render("kvern.deploy", PAGE, title=title, failed=failed, sections=sections)
