"""How much memory of the host a process may still take."""

import os
from pathlib import Path


def available_memory() -> int:
    """Bytes of host memory that can be had without swapping; half of all where the system does not tell."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
