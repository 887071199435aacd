"""Comparison of each group of kernels with PyTorch on this machine.

    python -m kvern.cpu.check LIBRARY [GROUP ...]

prints a line for each group as soon as it is done: its name, and its fault if it has one. Missing lines tell the caller
where a kernel crashed.
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from kvern.cpu import attention, linear, packed, ranks, rotary, rows, sampling
from kvern.cpu.library import load


def check_layers() -> None:
    """Checks the kernels between a layer's products and its attention."""
    rows.check()
    rotary.check()


GROUPS: Mapping[str, Callable[[], None]] = {
    "cpu_layers": check_layers,
    "cpu_linear": linear.check,
    "cpu_attention": attention.check,
    "cpu_packed": packed.check,
    "cpu_sampling": sampling.check,
    "cpu_ranks": ranks.check,
}
"""The check of each group, which raises an AssertionError with the reason if a kernel is wrong."""
THREADS = 2
"""The number of threads, so that jobs run in parallel."""


def main() -> None:
    """The command above."""
    load(Path(sys.argv[1]), THREADS)
    for name in sys.argv[2:] or GROUPS:
        try:
            GROUPS[name]()
            problem = ""
        except Exception as error:  # whatever it is, the engine does without this group
            problem = " ".join(f"{type(error).__name__}: {error}".split())
        sys.stdout.write(f"{name} {problem}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
