"""Where the engines of one model run: a GPU each, a share of the processors each, or nodes of a Ray cluster."""

import dataclasses
import os
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from kvern.config import EngineConfig
from kvern.cpu.cores import shares_of_cores
from kvern.engine.child import EngineChild, EngineProcess
from kvern.engine.node_engine import EngineOnNode
from kvern.errors import ConfigError
from kvern.ray_nodes import NodeProcess, check_room, join_cluster


@dataclass(frozen=True)
class Place:
    """What the process of an engine is given; `threads`: None where the engine decides how many compute."""

    environment: Mapping[str, str] = field(default_factory=dict)
    processors: Set[int] = frozenset()
    """Those that it may use; none are named: all."""
    threads: int | None = None

    def config(self, config: EngineConfig) -> EngineConfig:
        """The options of the engine here."""
        return dataclasses.replace(config, threads=config.threads or self.threads)

    def launch(self) -> EngineProcess:
        """The process of an engine here."""
        return EngineChild(self.environment)


@dataclass(frozen=True)
class RayPlace(Place):
    """On some node of a Ray cluster, which has `cpus` and `gpus` for each of the engine's `ranks`."""

    cpus: int = 1
    gpus: int = 0
    ranks: int = 1

    def launch(self) -> EngineProcess:
        return EngineOnNode(NodeProcess(self.cpus, self.gpus, self.ranks))


def places_of(config: EngineConfig) -> list[Place]:
    """A place for each engine of `config.data_parallel_size`. Raises ConfigError if there are too few."""
    count = config.data_parallel_size
    if config.executor == "ray":
        return _ray_places(config)
    if count == 1:
        return [Place()]
    each = config.tensor_parallel_size
    gpus = [] if config.device == "cpu" else visible_gpus(gpu_count(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    if gpus or config.device == "cuda":
        if count * each > len(gpus):
            raise ConfigError(
                f"data_parallel_size is {count}, and this process sees {len(gpus)} GPUs: each engine needs {each}; "
                "lower it, or use device cpu"
            )
        shares = [gpus[number * each : (number + 1) * each] for number in range(count)]
        return [Place({"CUDA_VISIBLE_DEVICES": ",".join(share)}) for share in shares]
    cores = shares_of_cores(count)
    if len(cores) < count:
        raise ConfigError(
            f"data_parallel_size is {count}, and this process may use {len(cores)} processor cores: each engine "
            "needs one; lower it"
        )
    return [Place(processors=processors, threads=threads) for threads, processors in cores]


def _ray_places(config: EngineConfig) -> list[Place]:
    if config.device == "auto":
        raise ConfigError("device is auto and executor ray: Ray has to know what an engine takes; give cuda or cpu")
    place = RayPlace(cpus=config.threads or 1, gpus=int(config.device == "cuda"), ranks=config.tensor_parallel_size)
    join_cluster()
    processes = config.data_parallel_size * config.tensor_parallel_size
    check_room(processes * place.cpus, processes * place.gpus)
    return [place] * config.data_parallel_size


def gpu_count() -> int:
    """Of this machine, as the driver tells; 0: there is none."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except Exception:  # whatever the driver's library raises: there is no driver
        return 0


def visible_gpus(count: int, named: str | None) -> list[str]:
    """The GPUs of `count` that CUDA shows where CUDA_VISIBLE_DEVICES is `named`, by what they are called there."""
    if named is None:
        return [str(number) for number in range(count)]
    gpus: list[str] = []
    for gpu in named.split(",") if count else []:
        name = gpu.strip()
        if not name or name.startswith("-") or (name.isdecimal() and int(name) >= count):
            break  # CUDA shows those before the first that it does not know
        gpus.append(name)
    return gpus
