"""The server's side of weights that change: all engines read them, then all take them, and later engines do so, too.

update --ReadWeights--> every engine --WeightsRead--> all could? --TakeWeights--> every engine --WeightsTaken--> answer
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence

from kvern.errors import ConfigError, EngineDied, EngineUnavailable, InvalidWeights
from kvern.request.weights import WeightGroup, WeightsFound, WeightSource
from kvern.serving.link import EngineLink
from kvern.serving.supervisor import Supervisor
from kvern.serving.weight_files import WeightFiles
from kvern.serving.wire import DropWeights, ReadWeights, TakeWeights, WeightsRead, WeightsTaken, encode

FIRST = "0"
"""The version of the weights in the model's folder, for users."""


class EngineWeights:
    """The weights of one engine: `version` is what its steps use, `read` what it has loaded beside them."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        self.version = self.read = ""
        self._asked = ""
        """The version that `_reading` is about."""
        self._reading: asyncio.Future[WeightsFound] | None = None
        self._taking: asyncio.Future[None] | None = None

    async def load(self, version: str, sources: Sequence[WeightSource]) -> WeightsFound:
        """Have the engine read weights beside its own. Raises InvalidWeights, ConfigError or EngineDied."""
        self._reading, self._asked = asyncio.get_running_loop().create_future(), version
        self.supervisor.send(ReadWeights(version, list(sources)))
        found = _checked(await self._reading)
        self.read = version
        return found

    def take(self, version: str, keep: bool) -> "asyncio.Future[None]":
        """Have the engine use what it has read; returns what is done when it does, or has ended."""
        self._taking = asyncio.get_running_loop().create_future()
        self.supervisor.send(TakeWeights(version, keep))
        self.version = version
        return self._taking

    def drop(self) -> None:
        """Let the engine forget what it reads, or has read."""
        self.read = ""
        self.supervisor.send(DropWeights())

    def hear(self, message: WeightsRead | WeightsTaken) -> None:
        """The engine has read weights, or cannot, or uses them. What is said of an update that was given up is late."""
        if isinstance(message, WeightsRead):
            if message.version == self._asked and self._reading is not None and not self._reading.done():
                self._reading.set_result(message.found)
        elif isinstance(message, WeightsTaken) and self._taking is not None and not self._taking.done():
            self._taking.set_result(None)

    def interrupt(self, error: EngineDied) -> None:
        """The engine has ended; the next one has the weights of the model's folder, until it has caught up."""
        self.version = self.read = ""
        if self._reading is not None and not self._reading.done():
            self._reading.set_exception(error)
        if self._taking is not None and not self._taking.done():
            self._taking.set_result(None)

    async def catch_up(self, link: EngineLink, version: str, sources: Sequence[WeightSource]) -> None:
        """Have a new engine use these weights before it takes requests. Raises ConfigError or EngineDied."""
        link.socket.send(encode(ReadWeights(version, list(sources))))
        async for message in link.messages():
            if isinstance(message, WeightsRead):
                try:
                    _checked(message.found)
                except InvalidWeights as error:
                    raise ConfigError(
                        f"an engine cannot start with the weights of version {version}: {error}"
                    ) from None
                link.socket.send(encode(TakeWeights(version, keep=False)))
            elif isinstance(message, WeightsTaken):
                break
        self.version = version


class ClientWeights:
    """The weights of a model, which all of its engines use, those of the moment.

    `until_available` waits for an engine; it raises EngineUnavailable.
    """

    def __init__(
        self,
        engines: Callable[[], Sequence[EngineWeights]],
        until_available: Callable[[], Awaitable[None]],
        files: WeightFiles,
    ) -> None:
        """`files`: those that come from process groups."""
        self._engines = engines
        self._files = files
        self._until_available = until_available
        self._updates = 0
        self.version = ""
        self.is_changing = False
        """An update has begun that has not ended."""
        self._sources: list[WeightSource] = []
        self._read: list[set[str]] = []
        """The paths that each new engine reads now."""

    @property
    def shown(self) -> str:
        """The version, for users."""
        return self.version or FIRST

    async def update(self, source: str | WeightGroup, keep: bool) -> str:
        """Let all requests use the weights at a path, or of a process group, from now on; running ones `keep` what they
        have computed.

        Returns the new version. Until then, and if this raises, the old ones are used.
        Raises InvalidWeights, ConfigError if they cannot change or are being changed, or EngineUnavailable.
        """
        if self.is_changing:
            raise ConfigError("the weights of this model are being replaced already: wait until that update has ended")
        self.is_changing = True
        version = f"{self._updates + 1}-{secrets.token_hex(8)}"
        try:
            await self._until_available()
            path = source if isinstance(source, str) else await self._received(source)
            found = await self._load(version, [*self._sources, WeightSource(path)])
            earlier = [] if found.is_whole else [one for one in self._sources if one.names != found.names]
            self._sources = [*earlier, WeightSource(path, found.stamp, found.names)]
            self.version = version
            self._updates += 1
            await asyncio.gather(*(engine.take(version, keep) for engine in self._engines() if engine.read == version))
        finally:
            self.is_changing = False
            self._forget_files()
            if self.version != version:
                for engine in self._engines():
                    engine.drop()
        return version

    async def catch_up(self, engine: EngineWeights, link: EngineLink) -> bool:
        """Have a new engine use the present weights; returns whether it did not before. Raises ConfigError or
        EngineDied."""
        if engine.version == self.version:
            return False
        while engine.version != self.version:
            paths = {one.path for one in self._sources}
            self._read.append(paths)
            try:
                await engine.catch_up(link, self.version, self._sources)
            finally:
                self._read.remove(paths)
                self._forget_files()
        return True

    def _forget_files(self) -> None:
        """Removes the files of groups that no engine will read again."""
        if not self.is_changing:  # else one has been received that is not among the sources yet
            self._files.keep({one.path for one in self._sources}.union(*self._read))

    async def _received(self, group: WeightGroup) -> str:
        """The path of what a group brought. Raises InvalidWeights, or EngineUnavailable."""
        gpu = next((gpu for engine in self._engines() if (gpu := engine.supervisor.link.ready.gpu) is not None), None)
        path = str(await self._files.receive(group, gpu))
        await self._until_available()
        return path

    async def _load(self, version: str, sources: Sequence[WeightSource]) -> WeightsFound:
        """Until all engines that take requests have read them, of which others may come meanwhile."""
        found = None
        while missing := [
            engine for engine in self._engines() if engine.supervisor.is_ready and engine.read != version
        ]:
            results = await asyncio.gather(
                *(engine.load(version, sources) for engine in missing), return_exceptions=True
            )
            for result in results:
                if isinstance(result, EngineDied):
                    raise EngineUnavailable(f"an engine ended while it read weights: {result}; try again", 1.0)
                if isinstance(result, BaseException):
                    raise result
                if found is not None and result != found:
                    raise InvalidWeights(
                        "the files were changed while they were read: write them before, then try again"
                    )
                found = result
        if found is None:
            raise EngineUnavailable("all engines ended while they read weights: try again", 1.0)
        return found


def _checked(found: WeightsFound) -> WeightsFound:
    """The result, if it can be taken. Raises InvalidWeights, or ConfigError if the engine cannot change its own."""
    if found.error is not None:
        raise (ConfigError if found.is_refused else InvalidWeights)(found.error)
    return found
