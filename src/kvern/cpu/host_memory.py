"""The memory of the host that a process may still use, and the number of processes that share it."""

import os
from pathlib import Path

from kvern.io.ray_nodes import MOST_PROCESSES


def total_memory() -> int:
    """Bytes of memory that the host has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def processes_here(count: int) -> int:
    """The largest number of `count` kvern processes that run on this machine: all, unless Ray uses other nodes."""
    return min(count, int(os.environ.get(MOST_PROCESSES, count)))


def available_memory() -> int:
    """Bytes of host memory that are available without swapping; half of all memory if unknown."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return total_memory() // 2
