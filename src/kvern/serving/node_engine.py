"""An engine's process on a node of a Ray cluster, from the outside."""

import asyncio
import threading
from collections.abc import Set
from concurrent.futures import Future
from typing import Any

import zmq

from kvern.engine.running_file import read_running
from kvern.io.ray_nodes import NodeProcess


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

    def _watch(self) -> None:
        self._ended.set_result(self._process.wait())
