"""Progress of generation on the terminal: a bar where someone looks, a line now and then where it is logged."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Report = Callable[[int, int], None]
"""Takes the requests done and the tokens generated so far."""

LINE_SECONDS = 5.0
"""Between two lines where stderr is not a terminal."""


@contextmanager
def generation_progress(total: int | None, done: int = 0) -> Iterator[Report]:
    """Give a function report(requests done, tokens generated); `total` requests, None if unknown."""
    started = time.monotonic()

    def rate(tokens: int) -> str:
        return f"{tokens / max(time.monotonic() - started, 1e-9):.0f} tokens/s"

    if not sys.stderr.isatty():
        last = started

        def report_line(done: int, tokens: int) -> None:
            nonlocal last
            if time.monotonic() - last >= LINE_SECONDS:
                last = time.monotonic()
                sys.stderr.write(f"{done}/{total if total is not None else '?'} requests, {rate(tokens)}\n")

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
        task = bar.add_task("generating", total=total, completed=done, rate="")
        yield lambda done, tokens: bar.update(task, completed=done, rate=rate(tokens))
