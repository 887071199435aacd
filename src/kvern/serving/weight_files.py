"""Files of weights that came from process groups: they stay as long as engines may read them again."""

import asyncio
import fcntl
import itertools
import os
import secrets
import shutil
import sys
import weakref
from collections.abc import Container
from functools import cached_property
from pathlib import Path

import msgspec

from kvern.config import EngineConfig
from kvern.errors import InvalidWeights
from kvern.io.bytecode import bytecode_environment
from kvern.request.weights import WeightGroup

START_SECONDS = 120.0
"""For which the process that receives weights may take longer than its group: it imports PyTorch first."""
LOCK = "lock"
"""A file of the folder that is locked as long as its server lives."""


class WeightFiles:
    """The files of one model's engines, in a folder of this server."""

    def __init__(self, config: EngineConfig) -> None:
        """`config`: its `model` is a folder."""
        self._config = config
        self._numbers = itertools.count()

    async def receive(self, group: WeightGroup, gpu: str | None) -> Path:
        """Take part in a process group; returns the file of what it brought. `gpu`: on which NCCL is to run.

        Raises InvalidWeights with what is wrong.
        """
        file = await asyncio.to_thread(lambda: self._folder) / f"{next(self._numbers)}.safetensors"
        job = {
            "group": msgspec.to_builtins(group),
            "file": str(file),
            "folder": self._config.model,
            "implementation": self._config.model_implementation,
        }
        card = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvern.runner.weight_receiver"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **bytecode_environment(), **card},
        )
        try:
            async with asyncio.timeout(group.timeout + START_SECONDS):
                said, _ = await process.communicate(msgspec.json.encode(job))
        except TimeoutError:
            raise InvalidWeights(
                f"the process group at {group.address} took more than {group.timeout:g} s: raise timeout, or see what "
                "its first member waits for"
            ) from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            if process.returncode:
                file.unlink(missing_ok=True)
        if process.returncode:
            raise InvalidWeights(said.decode().strip() or "the process that receives weights was ended: try again")
        return file

    def keep(self, paths: Container[str]) -> None:
        """Remove all files but those at these paths."""
        if "_folder" in vars(self):
            for file in self._folder.glob("*.safetensors"):
                if str(file) not in paths:
                    file.unlink(missing_ok=True)

    @cached_property
    def _folder(self) -> Path:
        """The folder, which goes with the server; those of servers that were killed go now."""
        base = self._config.cache_folder / "weights"
        base.mkdir(parents=True, exist_ok=True)
        for left in base.iterdir():
            if (lock := _locked(left)) is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(lock)
        folder = base / secrets.token_hex(8)
        new = base.with_name(folder.name)  # until it is locked no other server may find it
        new.mkdir()
        (new / LOCK).touch()
        lock = _locked(new)
        assert lock is not None, "nobody knows of it"
        new.rename(folder)
        weakref.finalize(self, _end, folder, lock)
        return folder


def _locked(folder: Path) -> int | None:
    """Locks a folder; returns the open file, or None if another server has it, or it is none."""
    try:
        file = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        return None
    return file


def _end(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)
