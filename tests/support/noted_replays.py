"""A record of the decodes that processes of an engine replay; each process that imports this module records its own.

Each writes a line for each replay into the file that REPLAYS names: its number, and how many requests decode.
"""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from kvern.runner.decode_graphs import DecodeKind
from kvern.runner.step_graphs import PlannedStep, StepOutputs

NAME = "REPLAYS"
_run = DecodeKind.run


def noted(kind: DecodeKind, step: PlannedStep, captured: Any) -> StepOutputs | None:
    """Runs `DecodeKind.run` and records a replay."""
    outputs = _run(kind, step, captured)
    if outputs is not None:
        with Path(os.environ[NAME]).open("a") as file:
            file.write(f"{os.getpid()} {len(step.scheduled)}\n")
    return outputs


def note(patch: pytest.MonkeyPatch, folder: Path) -> Path:
    """The file into which this process and those that it starts write; they import what lies in the `folder`."""
    (folder / "sitecustomize.py").write_text(
        "from kvern.runner.decode_graphs import DecodeKind\n"
        "from tests.support import noted_replays\n"
        "DecodeKind.run = noted_replays.noted\n"
    )
    patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *sys.path]))
    patch.setenv(NAME, str(folder / "replays"))
    patch.setattr(DecodeKind, "run", noted)
    return folder / "replays"


def replays_in(file: Path) -> list[list[int]]:
    """The numbers of requests of each replay, by process."""
    found: dict[str, list[int]] = {}
    for line in file.read_text().splitlines():
        process, count = line.split()
        found.setdefault(process, []).append(int(count))
    return [*found.values()]
