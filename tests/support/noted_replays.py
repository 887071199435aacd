"""Which decodes the processes of an engine replay; imported by a process, it notes its own.

Each writes a line for each replay into the file that REPLAYS names: its number, and how many requests decode.
"""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from kvern.runner.cuda_graph import DecodeGraph, DecodeGraphs

NAME = "REPLAYS"
_replay = DecodeGraphs._replay


def noted(graphs: DecodeGraphs, slots: list[int], *given: Any) -> DecodeGraph:
    """As a replay does, and notes it."""
    with Path(os.environ[NAME]).open("a") as file:
        file.write(f"{os.getpid()} {len(slots)}\n")
    return _replay(graphs, slots, *given)


def note(patch: pytest.MonkeyPatch, folder: Path) -> Path:
    """The file into which this process and those that it starts write; they import what lies in the `folder`."""
    (folder / "sitecustomize.py").write_text(
        "from kvern.runner.cuda_graph import DecodeGraphs\n"
        "from tests import noted_replays\n"
        "DecodeGraphs._replay = noted_replays.noted\n"
    )
    patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *sys.path]))
    patch.setenv(NAME, str(folder / "replays"))
    patch.setattr(DecodeGraphs, "_replay", noted)
    return folder / "replays"


def replays_in(file: Path) -> list[list[int]]:
    """Of each process, for how many requests each of its replays was."""
    found: dict[str, list[int]] = {}
    for line in file.read_text().splitlines():
        process, count = line.split()
        found.setdefault(process, []).append(int(count))
    return [*found.values()]
