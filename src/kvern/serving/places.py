"""The devices of a model's engines on this machine: a GPU each, or a share of the processors each."""

import dataclasses
import importlib.util
import os
import runpy
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from kvern.config import EngineConfig
from kvern.cpu.cores import available_memory, shares_of_cores
from kvern.errors import ConfigError
from kvern.serving.child import EngineChild, EngineProcess


@dataclass(frozen=True)
class Place:
    """The devices of an engine's process. `threads` is None if the engine chooses their number."""

    gpus: Sequence[str] = ()
    """GPUs by their names in CUDA_VISIBLE_DEVICES; empty for all that this process sees."""
    processors: Set[int] = frozenset()
    """The processors that it may use; empty for all."""
    threads: int | None = None
    shares_memory: ClassVar[bool] = True
    """The process runs on this machine."""

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables that the process has in addition to those of this one."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else {}

    def config(self, config: EngineConfig) -> EngineConfig:
        """Returns the engine's options at this place."""
        return dataclasses.replace(config, threads=config.threads or self.threads)

    def launch(self) -> EngineProcess:
        """Starts a process for an engine at this place."""
        return EngineChild(self.environment)


def places_of(config: EngineConfig) -> list[Place]:
    """Returns a place for each engine of `config.data_parallel_size`. Raises ConfigError if there are too few."""
    count = config.data_parallel_size
    if count == 1:
        return [Place()]
    try:
        return [place_of(config, number, count) for number in range(count)]
    except ConfigError as error:
        raise ConfigError(f"data_parallel_size is {count}, and {error}; lower it") from None


def place_of(config: EngineConfig, number: int, count: int) -> Place:
    """Returns the place of engine `number` (from 0) of `count`. Raises ConfigError if there is none."""
    each, most = config.ranks, max(number + 1, count)
    gpus = seen_gpus(config)
    if gpus or config.device == "cuda":
        if most * each > len(gpus):
            raise ConfigError(f"this process sees {len(gpus)} GPUs: each engine needs {each}")
        return Place(gpus[number * each : (number + 1) * each])
    cores = shares_of_cores(most)
    if len(cores) < most:
        raise ConfigError(f"this process may use {len(cores)} processor cores: each engine needs one")
    threads, processors = cores[number]
    return Place(processors=processors, threads=threads)


def seen_gpus(config: EngineConfig) -> list[str]:
    """Returns the GPUs that engines may use, by their names in CUDA_VISIBLE_DEVICES."""
    return [] if config.device == "cpu" else visible_gpus(gpu_count(), os.environ.get("CUDA_VISIBLE_DEVICES"))


def check_memory(config: EngineConfig, place: Place) -> None:
    """Raises ConfigError if the host's memory has no room for the weights of another engine on a CPU, as they are
    stored.

    An engine on a GPU or on a node of a Ray cluster checks its memory itself.
    """
    if config.executor == "ray" or place.gpus:
        return
    folder = Path(config.model or "")
    files = [folder] if folder.is_file() else [*folder.glob("*.safetensors"), *folder.glob("*.gguf")]
    needed, free = sum(file.stat().st_size for file in files), available_memory()
    if needed > free:
        raise ConfigError(f"the weights take {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB of memory are free")


def gpu_count() -> int:
    """Returns the number of this machine's GPUs; 0 if there is none, or PyTorch is built without CUDA."""
    if not _has_cuda():
        return 0
    try:
        import pynvml

        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except Exception:  # the driver's library may raise anything: there is no driver
        return 0


def _has_cuda() -> bool:
    """True if PyTorch is built with CUDA, found without importing it, which takes seconds."""
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    return bool(runpy.run_path(str(Path(found.origin).with_name("version.py")))["cuda"])


def visible_gpus(count: int, named: str | None) -> list[str]:
    """Returns the GPUs of `count` that CUDA shows with CUDA_VISIBLE_DEVICES=`named`, by their names there."""
    if named is None:
        return [str(number) for number in range(count)]
    gpus: list[str] = []
    for gpu in named.split(",") if count else []:
        name = gpu.strip()
        if not name or name.startswith("-") or (name.isdecimal() and int(name) >= count):
            break  # CUDA shows those before the first that it does not know
        gpus.append(name)
    return gpus
