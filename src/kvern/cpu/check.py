"""Whether the kernels answer rightly on this machine: each group against PyTorch.

    python -m kvern.cpu.check LIBRARY [GROUP ...]

A line for each group, at once: its name, and what is wrong with it, if anything is. Whoever reads them knows by the
lines that are missing where a kernel crashed.
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from kvern.cpu import activation, attention, elementwise, linear, norm, packed, ranks, rotary, sampling
from kvern.cpu.library import load


def check_layers() -> None:
    """What stands between a layer's products and its attention."""
    norm.check()
    elementwise.check()
    activation.check()
    rotary.check()


GROUPS: Mapping[str, Callable[[], None]] = {
    "cpu_layers": check_layers,
    "cpu_linear": linear.check,
    "cpu_attention": attention.check,
    "cpu_packed": packed.check,
    "cpu_sampling": sampling.check,
    "cpu_ranks": ranks.check,
}
"""By name, what raises an AssertionError with the reason if the group's kernels answer wrongly."""
THREADS = 2
"""Enough for jobs to meet."""


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
