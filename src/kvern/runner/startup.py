"""The time that each part of a start took."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


class Startup:
    """Names the stages of a start, in their order, with their seconds.

    The first stage of a process that does nothing else, `own_process`, is "import": from its start, so far as that is
    known, to this object. In a program the time counts from this object.
    """

    def __init__(self, own_process: bool = True) -> None:
        self.stages: dict[str, float] = {"import": process_age()} if own_process else {}
        self.reports: list[str] = []
        """Lines about what was measured and decided."""

    def report(self, lines: Sequence[str]) -> None:
        """Add lines to be shown with the start."""
        self.reports += lines

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time what happens inside; a name may come several times."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.stages[name] = self.stages.get(name, 0.0) + time.perf_counter() - began

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.stages.items())
        return f"{sum(self.stages.values()):.1f} s ({parts})"


def process_age() -> float:
    """Seconds since this process started; 0 where the system does not tell."""
    try:
        ticks = int(Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0.0
    import os

    return max(0.0, uptime - ticks / os.sysconf("SC_CLK_TCK"))
