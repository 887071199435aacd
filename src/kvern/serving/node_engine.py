"""Engines on nodes of a Ray cluster: their places, and their processes from the outside."""

import asyncio
import threading
from collections.abc import Set
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ClassVar

import zmq

from kvern.config import EngineConfig
from kvern.engine.step_watch import read_running
from kvern.errors import ConfigError
from kvern.io.ray_nodes import NodeProcess, check_room, join_cluster
from kvern.serving.child import EngineProcess
from kvern.serving.places import Place


class EngineOnNode:
    """`EngineProcess` of another machine."""

    def __init__(self, process: NodeProcess) -> None:
        self._process = process
        self._ended: Future[int] = Future()

    @property
    def returncode(self) -> int | None:
        return self._ended.result() if self._ended.done() else None

    def listen(self, socket: "zmq.Socket[Any]") -> None:
        self._process.start(socket, "kvern.serving.process", notes=True)
        threading.Thread(target=self._watch, name="engine-on-node", daemon=True).start()

    def bind(self, processors: Set[int]) -> None:
        """Ray has chosen them."""

    async def wait(self) -> int:
        return await asyncio.shield(asyncio.wrap_future(self._ended))

    def kill(self) -> None:
        self._process.kill()

    def last_requests(self) -> list[str]:
        return read_running(self._process.notes)

    def forget(self) -> None:
        self._process.kill()

    def memory(self) -> int:
        return 0  # of this machine

    def processor_seconds(self) -> float | None:
        return None

    def _watch(self) -> None:
        self._ended.set_result(self._process.wait())


@dataclass(frozen=True)
class RayPlace(Place):
    """A place on some node of a Ray cluster with so many processors and GPUs for each of the engine's `ranks`."""

    rank_cpus: int = 1
    rank_gpus: int = 0
    ranks: int = 1
    shares_memory: ClassVar[bool] = False

    def launch(self) -> EngineProcess:
        return EngineOnNode(NodeProcess(self.rank_cpus, self.rank_gpus, self.ranks))


def ray_place(config: EngineConfig, count: int) -> RayPlace:
    """Returns the place of each of `count` engines: Ray chooses the node. Raises ConfigError."""
    if config.device == "auto":
        raise ConfigError("device is auto and executor ray: Ray has to know what an engine takes; give cuda or cpu")
    cpus = config.threads or 1
    gpus = int(config.device == "cuda")
    ranks = config.ranks
    join_cluster()
    check_room(count * ranks * cpus, count * ranks * gpus)
    return RayPlace(rank_cpus=cpus, rank_gpus=gpus, ranks=ranks)
