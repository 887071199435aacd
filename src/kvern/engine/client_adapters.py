"""The server's side of adapters: loaded and unloaded while engines come and go."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping

from kvern.adapters.check import MOST_SECONDS
from kvern.adapters.names import AdapterNames, NamedAdapter
from kvern.engine.link import EngineLink
from kvern.engine.supervisor import Supervisor
from kvern.engine.wire import AdapterRead, LoadAdapter, UnloadAdapter
from kvern.errors import EngineDied, InvalidAdapter

logger = logging.getLogger("kvern")

READING_SECONDS = MOST_SECONDS + 5.0
"""For one adapter, when a new engine reads all."""


class ClientAdapters:
    """Adapters of the present engine and the next. `used`: the keys that requests use."""

    def __init__(self, names: AdapterNames, supervisor: Supervisor, used: Callable[[], set[int | None]]) -> None:
        self.names = names
        self._supervisor = supervisor
        self._used = used
        self._reading: dict[int, asyncio.Future[None]] = {}
        self._unloaded: list[NamedAdapter] = []
        """What no new request may use, but some that run do."""

    async def load(self, name: str, path: str) -> None:
        """Have the engine read the adapter in a folder, for requests to use. Raises InvalidAdapter or EngineDied."""
        await self._supervisor.until_available()
        adapter = self.names.reserve(name, path)
        try:
            self._reading[adapter.key] = asyncio.get_running_loop().create_future()
            self._supervisor.send(LoadAdapter(adapter.key, path))
            await self._reading[adapter.key]
            self.names.add(adapter)
        except asyncio.CancelledError:
            self._supervisor.send(UnloadAdapter(adapter.key))
            raise
        finally:
            self._reading.pop(adapter.key, None)
            self.names.release(adapter)

    def unload(self, name: str) -> None:
        """Let no new request use an adapter; those that do go on to their end. Raises InvalidRequest."""
        adapter = self.names.remove(name)
        self._unloaded = [*self._still_used(), adapter]
        self._supervisor.send(UnloadAdapter(adapter.key))

    def hear(self, message: AdapterRead) -> None:
        """The engine has read one, or cannot."""
        waiting = self._reading.get(message.key)
        if waiting is not None and not waiting.done():
            if message.error is None:
                waiting.set_result(None)
            else:
                waiting.set_exception(InvalidAdapter(message.error))

    def interrupt(self, error: EngineDied) -> None:
        """The engine has died: what it was reading is not read."""
        for reading in self._reading.values():
            if not reading.done():
                reading.set_exception(error)

    async def read_all(self, link: EngineLink) -> Mapping[int, InvalidAdapter]:
        """Have a new engine read all that are in use; those that cannot be read, by key. Raises EngineDied."""
        adapters = {adapter.key: adapter for adapter in (*self.names.all(), *self._still_used())}
        for adapter in adapters.values():
            link.send(LoadAdapter(adapter.key, adapter.path))
        reading, lost = set(adapters), dict[int, InvalidAdapter]()
        if reading:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(READING_SECONDS * len(adapters)):
                    async for message in link.messages():
                        if isinstance(message, AdapterRead):
                            reading.discard(message.key)
                            if message.error is not None:
                                lost[message.key] = InvalidAdapter(message.error)
                        if not reading:
                            break
        for key in reading:
            link.send(UnloadAdapter(key))
            lost[key] = InvalidAdapter(f"{adapters[key].path} is not read in {READING_SECONDS * len(adapters):g} s")
        return lost

    def lose(self, lost: Mapping[int, InvalidAdapter]) -> None:
        """Do without adapters that cannot be read any more."""
        for adapter in self.names.all():
            if adapter.key in lost:
                logger.warning("adapter %s is unloaded: %s", adapter.name, lost[adapter.key])
                self.names.remove(adapter.name)

    def resume(self) -> None:
        """Requests of a new engine that use what was unloaded have begun: forget it with their end."""
        for adapter in self._still_used():
            self._supervisor.send(UnloadAdapter(adapter.key))

    def _still_used(self) -> list[NamedAdapter]:
        used = self._used()
        return [adapter for adapter in self._unloaded if adapter.key in used]
