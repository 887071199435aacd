"""Logits processors of a package that is installed for a test: `install` writes its entry points."""

import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec
import torch

from kvern.sample.processors import ProcessedRequest, ProcessedRows, ProcessorModel

NAMES = {"follow": "Follow", "break": "Break", "end": "End", "shift": "Shift", "double": "Double"}


def install(folder: Path) -> Path:
    """Make the package known to whoever has `folder` on its path; the folder."""
    metadata = folder / "processors_of_tests-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: processors-of-tests\nVersion: 1.0\n")
    lines = [f"{name} = tests.support.processors:{kind}" for name, kind in NAMES.items()]
    lines += ["missing = tests.support.processors:Missing", "function = tests.support.processors:install"]
    lines += ["lose engine = tests.support.lost_encoders:LoseEngine"]
    (metadata / "entry_points.txt").write_text("\n".join(["[kvern.logits_processors]", *lines, ""]))
    return folder


@contextmanager
def installed_package(folder: Path) -> Iterator[None]:
    """Installs the package for this process and for those that it starts."""
    import pytest  # not in the processes of engines, which import this module too

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(install(folder)))
        root, known = str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), root, known])))
        yield


def install_example(folder: Path) -> Path:
    """Installs the package in examples/ below a folder, as one installs packages; returns where it is."""
    source, site = folder / "source", folder / "site"
    shutil.copytree(Path(__file__).parents[2] / "examples" / "kvern-alphabet", source)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(site), str(source)], check=True, timeout=120)
    return site


class Step(msgspec.Struct, forbid_unknown_fields=True):
    by: int
    below: int = 100

    def __post_init__(self) -> None:
        if self.by < 1:
            raise ValueError(f"by is {self.by}: it must be at least 1")


class Follow:
    """Each token is the one before plus `by`; between 3 and `below`. What the host knows is checked against it."""

    Arguments = Step

    def __init__(self, model: ProcessorModel) -> None:
        self._steps = torch.zeros(2, model.slots, dtype=torch.int64, device=model.device)
        self._joined: dict[int, tuple[int, int]] = {}

    def join(self, slot: int, request: ProcessedRequest) -> None:
        step, known = request.arguments, request.token_ids[request.prompt_length - 1 :]
        assert all(new == follow(old, step) for old, new in itertools.pairwise(known)), "not its own tokens"
        self._steps[:, slot] = torch.tensor([step.by, step.below])
        self._joined[slot] = len(request.token_ids), request.prompt_length

    def apply(self, logits: torch.Tensor, rows: ProcessedRows) -> None:
        assert logits.shape[0] == len(rows.slots) and logits.dtype == torch.float32
        assert all(self._joined[slot][0] <= at for slot, at in zip(rows.slots, rows.positions, strict=True))
        by, below = self._steps[:, rows.device_slots]
        wanted = 3 + (rows.last_tokens - 3 + by) % (below - 3)
        logits.fill_(float("-inf"))
        logits.scatter_(1, wanted[:, None], 0.0)


def follow(token: int, step: Step) -> int:
    return 3 + (token - 3 + step.by) % (step.below - 3)


class Fault(msgspec.Struct, forbid_unknown_fields=True):
    how: Literal["join", "apply", "nan", "nothing", "infinite", "shape"]
    after: int = 0


class Break:
    """Fails when a request has so many tokens beside its prompt."""

    Arguments = Fault

    def __init__(self, model: ProcessorModel) -> None:
        self._faults: dict[int, tuple[Fault, int]] = {}

    def join(self, slot: int, request: ProcessedRequest) -> None:
        self._faults[slot] = request.arguments, request.prompt_length
        if request.arguments.how == "join":
            raise KeyError("no such\nthing")

    def apply(self, logits: torch.Tensor, rows: ProcessedRows) -> None:
        for row, slot in enumerate(rows.slots):
            fault, prompt = self._faults[slot]
            if rows.positions[row] - prompt < fault.after:
                continue
            if fault.how == "nan":
                logits[row, 5] = float("nan")
            elif fault.how == "nothing":
                logits[row] = float("-inf")
            elif fault.how == "shape":
                logits.resize_(1, 1)  # which nobody expects: all of the step fails
            elif fault.how == "infinite":
                logits[row, 7] = float("inf")
            else:
                logits[:, :] = 0.0
                raise RuntimeError("as planned")


class Ending(msgspec.Struct, forbid_unknown_fields=True):
    how: Literal["exit", "kill", "hang", "assert"]
    after: int = 0


class End:
    """Ends the process when a request has so many tokens beside its prompt."""

    Arguments = Ending

    def __init__(self, model: ProcessorModel) -> None:
        self._endings: dict[int, tuple[Ending, int]] = {}

    def join(self, slot: int, request: ProcessedRequest) -> None:
        self._endings[slot] = request.arguments, request.prompt_length

    def apply(self, logits: torch.Tensor, rows: ProcessedRows) -> None:
        for slot, position in zip(rows.slots, rows.positions, strict=True):
            ending, prompt = self._endings[slot]
            if position - prompt >= ending.after:
                if ending.how == "exit":
                    os._exit(3)
                elif ending.how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                elif ending.how == "assert":  # on a GPU; nothing can be computed in this process any more
                    logits[:, torch.tensor([1 << 30], device=logits.device)] = 0.0
                    return
                time.sleep(1000)


class Nothing(msgspec.Struct, forbid_unknown_fields=True):
    pass


class Shift:
    """Only the token behind the most probable one is left."""

    Arguments = Nothing

    def __init__(self, model: ProcessorModel) -> None:
        pass

    def join(self, slot: int, request: ProcessedRequest) -> None:
        pass

    def apply(self, logits: torch.Tensor, rows: ProcessedRows) -> None:
        best = (logits.argmax(-1) + self.by(logits)) % logits.shape[1]
        logits.fill_(float("-inf"))
        logits.scatter_(1, best[:, None], 0.0)

    def by(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.ones(logits.shape[0], dtype=torch.int64, device=logits.device)


class Double(Shift):
    """Only the token with twice the number of the most probable one is left."""

    def by(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.argmax(-1)
