"""Progress on stderr: a bar on a terminal, an occasional line otherwise."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Report = Callable[..., None]
"""Takes the items done (such as requests), the units done (such as tokens), and optionally a note."""

LINE_SECONDS = 5.0
"""The time between two lines if stderr is not a terminal."""


def generation_progress(total: int | None, done: int = 0) -> AbstractContextManager[Report]:
    """Yields a function report(requests done, tokens generated); `total` is the number of requests, None if unknown."""
    return work_progress("generating", "requests", "tokens", total, done)


@contextmanager
def work_progress(doing: str, items: str, unit: str, total: int | None, done: int = 0) -> Iterator[Report]:
    """Yields a function report(items done, units done), which shows the units per second."""
    started = time.monotonic()

    def rate(units: float) -> str:
        value = units / max(time.monotonic() - started, 1e-9)
        return f"{value:.0f} {unit}/s" if value >= 10 else f"{value:.2g} {unit}/s"

    if not sys.stderr.isatty():
        last = started

        def report_line(done: int, units: float, note: str = "") -> None:
            nonlocal last
            if time.monotonic() - last >= LINE_SECONDS:
                last = time.monotonic()
                sys.stderr.write(f"{done}/{total if total is not None else '?'} {items}, {rate(units)}{note}\n")

        yield report_line
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(doing, total=total, completed=done, rate="")
        yield lambda done, units, note="": bar.update(task, completed=done, rate=rate(units) + note)
