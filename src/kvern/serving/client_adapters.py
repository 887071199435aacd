"""The server's side of adapters: loaded and unloaded while engines come and go."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

from kvern.adapters.names import MOST_SECONDS, AdapterNames, NamedAdapter
from kvern.errors import EngineDied, InvalidAdapter
from kvern.serving.link import EngineLink
from kvern.serving.supervisor import Supervisor
from kvern.serving.wire import AdapterRead, LoadAdapter, UnloadAdapter, encode

logger = logging.getLogger("kvern")

READING_SECONDS = MOST_SECONDS + 5.0
"""For one adapter, when a new engine reads all."""
MOST_DEATHS = 2
"""The limit of engines that die while they read one adapter: the first may have died of something else."""


class EngineAdapters:
    """The adapters that one engine has read or is reading."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        self.known: set[int | None] = {None}
        """The keys that requests for this engine may name."""
        self.digests: dict[int, bytes] = {}
        """The digests of those that it has read, by their keys."""
        self._reading: dict[int, asyncio.Future[None]] = {}

    async def read(self, adapter: NamedAdapter) -> None:
        """Let the engine load an adapter, and wait for it. Raises InvalidAdapter or EngineDied."""
        self._reading[adapter.key] = asyncio.get_running_loop().create_future()
        try:
            self.supervisor.send(LoadAdapter(adapter.key, adapter.path))
            await self._reading[adapter.key]
        except asyncio.CancelledError:
            self.forget(adapter.key)
            raise
        finally:
            self._reading.pop(adapter.key, None)

    def forget(self, key: int) -> None:
        """No new request uses it. An engine that sleeps is told when it wakes, see `ClientAdapters.resume`."""
        if self.supervisor.is_ready:
            self.known.discard(key)
            self.digests.pop(key, None)
        self.supervisor.send(UnloadAdapter(key))

    def hear(self, message: AdapterRead) -> None:
        """The engine has read one, or cannot."""
        waiting = self._reading.get(message.key)
        if waiting is not None and not waiting.done():
            if message.error is None:
                self.known.add(message.key)
                self.digests[message.key] = message.digest
                waiting.set_result(None)
            else:
                waiting.set_exception(InvalidAdapter(message.error))

    def interrupt(self, error: EngineDied) -> None:
        """The engine has died: what it was reading is not read, and what it had read is gone."""
        self.known = {None}
        self.digests.clear()
        self.interrupt_reading(error)

    def interrupt_reading(self, error: EngineDied) -> None:
        """The adapters that the engine was reading are not read."""
        for reading in self._reading.values():
            if not reading.done():
                reading.set_exception(error)

    async def read_all(self, link: EngineLink, adapters: Mapping[int, NamedAdapter]) -> Mapping[int, InvalidAdapter]:
        """Have a new engine read these; those that cannot be read, by key. Raises EngineDied."""
        for adapter in adapters.values():
            link.socket.send(encode(LoadAdapter(adapter.key, adapter.path)))
        reading, lost = set(adapters), dict[int, InvalidAdapter]()
        if reading:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(READING_SECONDS * len(adapters)):
                    async for message in link.messages():
                        if isinstance(message, AdapterRead):
                            reading.discard(message.key)
                            self.digests[message.key] = message.digest
                            if message.error is not None:
                                lost[message.key] = InvalidAdapter(message.error)
                        if not reading:
                            break
        for key in reading:
            link.socket.send(encode(UnloadAdapter(key)))
            lost[key] = InvalidAdapter(f"{adapters[key].path} is not read in {READING_SECONDS * len(adapters):g} s")
        self.known |= set(adapters) - set(lost)
        return lost


class ClientAdapters:
    """Adapters of a model, which all of its engines, those of the moment, read.

    `used`: the keys that requests use; `handed`: those of requests that are going from one engine to another.
    `until_available` waits for an engine; it raises EngineUnavailable.
    """

    def __init__(
        self,
        names: AdapterNames,
        engines: Callable[[], Sequence[EngineAdapters]],
        used: Callable[[], set[int | None]],
        until_available: Callable[[], Awaitable[None]],
        handed: Callable[[], set[int | None]] = set,
    ) -> None:
        self.names = names
        self.lost: dict[int, InvalidAdapter] = {}
        """Adapters by key that were unloaded because an engine could not read them again."""
        self._engines = engines
        self._used = used
        self._until_available = until_available
        self._handed = handed
        self._unloaded: list[NamedAdapter] = []
        """Adapters that no new request may use, but running ones do."""

    @property
    def named(self) -> dict[bytes, str]:
        """The names of the adapters that engines have read, by their digests."""
        digests = [engine.digests for engine in self._engines()]
        return {of[one.key]: one.name for one in self.names.all() for of in digests if one.key in of}

    async def load(self, name: str, path: str) -> None:
        """Have the engines read the adapter in a folder, for requests to use.

        Raises InvalidAdapter or EngineUnavailable.
        """
        await self._until_available()
        adapter = self.names.reserve(name, path)
        try:
            await self._read(adapter)
            self.names.add(adapter)
        finally:
            self.names.release(adapter)

    def unload(self, name: str) -> None:
        """Let no new request use an adapter; those that do go on to their end. Raises InvalidRequest."""
        adapter = self.names.remove(name)
        self._unloaded = [*self._still_used(), adapter]
        self.forget_unloaded()

    def forget_unloaded(self) -> None:
        """Let engines drop unloaded adapters when their requests have ended; not those of prompts to be handed over."""
        handed = self._handed()
        for adapter in self._unloaded:
            for engine in self._engines():
                if adapter.key in engine.known and adapter.key not in handed:
                    engine.forget(adapter.key)

    async def read_all(self, engine: EngineAdapters, link: EngineLink) -> Mapping[int, InvalidAdapter]:
        """Let a new engine load all adapters in use; returns those that cannot be read, by key. Raises EngineDied."""
        lost: dict[int, InvalidAdapter] = {}
        while True:  # others may be loaded meanwhile
            in_use = {adapter.key: adapter for adapter in (*self.names.all(), *self._still_used())}
            missing = {key: adapter for key, adapter in in_use.items() if key not in engine.known | lost.keys()}
            if not missing:
                return lost
            lost |= await engine.read_all(link, missing)

    def lose(self, lost: Mapping[int, InvalidAdapter]) -> None:
        """Do without adapters that cannot be read any more."""
        for adapter in self.names.all():
            if adapter.key in lost:
                logger.warning("adapter %s is unloaded: %s", adapter.name, lost[adapter.key])
                self.unload(adapter.name)
                self.lost[adapter.key] = lost[adapter.key]

    def resume(self, engine: EngineAdapters) -> None:
        """Requests of a new engine that use what was unloaded, also meanwhile, have begun: forget it with their end."""
        named = {adapter.key for adapter in self.names.all()}
        for key in engine.known - named:
            if key is not None:
                engine.forget(key)

    async def _read(self, adapter: NamedAdapter) -> None:
        """Until all engines that take requests know it, of which some may die and others come."""
        deaths = 0
        try:
            while missing := [
                engine for engine in self._engines() if engine.supervisor.is_ready and adapter.key not in engine.known
            ]:
                results = await asyncio.gather(*(engine.read(adapter) for engine in missing), return_exceptions=True)
                for error in results:
                    if error is not None and not isinstance(error, EngineDied):
                        raise error
                if not any(adapter.key in engine.known for engine in self._engines()):
                    deaths += 1
                    if deaths == MOST_DEATHS:
                        raise InvalidAdapter(f"{adapter.path}: {deaths} engines in a row ended while they read it")
                    await self._until_available()
        except (InvalidAdapter, asyncio.CancelledError):
            for engine in self._engines():
                if adapter.key in engine.known:
                    engine.forget(adapter.key)
            raise

    def _still_used(self) -> list[NamedAdapter]:
        used = self._used()
        return [adapter for adapter in self._unloaded if adapter.key in used]
