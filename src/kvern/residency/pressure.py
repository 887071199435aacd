"""The memory of this machine that is still free, and how much of it must stay so while several models are served.

    /proc/meminfo, control groups --> host_memory --> HostMemory: free - floor = spare --> `Residency.host`

What was free at the start may be taken by other programs. The kernel would end an engine when nothing is left; before
that `Residency` puts idle models to sleep. There is no clock here: each call says what time it is.
"""

import logging
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from kvern.cpu.cores import ROOT, available_memory, total_memory

logger = logging.getLogger("kvern")

LEAST_FREE = 256 << 20
"""Bytes that stay free: what programs, and the steps of engines, take between two looks."""
LEAST_SHARE = 0.02
"""The limit as a share of all memory. The kernel looks for pages in the background below 0.1 to 1 %, and files
that are read often are worth more in its cache than a model that nobody asks."""
MOST_SHARE = 0.25
"""The largest share of all memory that has to stay free."""
STALLED = 10.0
"""The percentage of the last 10 s in which programs waited for memory, from which on the floor is twice as high: then
what the kernel calls available is in use."""
LOOK_SECONDS = 1.0
WARN_SECONDS = 60.0
"""The least seconds between two looks, and between two warnings."""


@dataclass(frozen=True)
class HostMemory:
    """The memory that this process and its engines may use: of the machine, or of their container."""

    free: int
    """Bytes that can be taken without swapping."""
    total: int
    stalled: float = 0.0
    """Per cent of the last 10 s in which some program waited for memory."""

    @property
    def floor(self) -> int:
        """The bytes that shall stay free."""
        floor = max(LEAST_FREE, int(LEAST_SHARE * self.total))
        return min(2 * floor if self.stalled >= STALLED else floor, int(MOST_SHARE * self.total))

    @property
    def spare(self) -> int:
        """The bytes that models may still take; below 0, those that they should give back."""
        return self.free - self.floor

    def __str__(self) -> str:
        """The numbers, as a part of a sentence."""
        free, total, floor = (f"{number / 1e9:.2f} GB" for number in (self.free, self.total, self.floor))
        return f"{free} of {total} are free, and {floor} shall stay so"


def host_memory(root: Path = ROOT) -> HostMemory | None:
    """Reads what memory is free; None where the system has no /proc/meminfo. `root`: the folder with /proc and /sys."""
    if not (root / "proc/meminfo").is_file():
        return None
    try:
        stalled = re.match(r"some avg10=([\d.]+)", (root / "proc/pressure/memory").read_text())
    except OSError:
        stalled = None  # a kernel without PSI, or one that does not count it
    return HostMemory(available_memory(root), total_memory(root), float(stalled[1]) if stalled else 0.0)


class Watch:
    """Looks at the free memory once a second, and warns once a minute."""

    def __init__(self, read: Callable[[], HostMemory | None] = host_memory) -> None:
        self._read = read
        self._found: HostMemory | None = None
        self.next_at = -math.inf
        """When it looks again."""
        self._warned_at = -math.inf

    def look(self, now: float) -> HostMemory | None:
        """Returns the memory as it was at most a second ago, and after the last `renew`."""
        if now >= self.next_at:
            self._found, self.next_at = self._read(), now + LOOK_SECONDS
        return self._found

    def renew(self) -> None:
        """Lets the next look read anew: models have taken memory, or given some back."""
        self.next_at = -math.inf

    def freed(self, size: int) -> None:
        """Counts bytes that were just given back as free until the next look."""
        if self._found is not None:
            self._found = replace(self._found, free=self._found.free + size)

    def warn(self, now: float, text: str) -> None:
        """Logs what becomes of models, with the numbers, unless it has done so within a minute."""
        if now >= self._warned_at + WARN_SECONDS:
            self._warned_at = now
            logger.warning("little memory is left: %s: %s", self._found, text)
