"""One engine process and the socket to it."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator

import zmq
import zmq.asyncio

from kvern.config import EngineConfig
from kvern.errors import ConfigError, EngineDied
from kvern.serving import wire
from kvern.serving.child import EngineProcess
from kvern.tiers.arena import OwnedArena

SHUTDOWN_SECONDS = 10


class EngineLink:
    """Start with `start`, end with `stop`. After some seconds without a sign of life the process is killed.

    longest     so many at most; the engine says before a step how long that may take
    """

    def __init__(self, process: EngineProcess, socket: zmq.asyncio.Socket, longest: float) -> None:
        self.process = process
        self._longest = longest
        self._silence = longest
        self.ready = wire.Ready(0, 0, "")
        self.socket = socket
        """For messages to the engine, which are sent at once. What is sent to a process that is gone is dropped."""
        self.gpu_bytes = 0
        """The bytes that the engine takes of each GPU while it is asleep; 0: it runs on the CPU."""
        self.silent = False
        """It was killed because it gave no sign of life."""

    @classmethod
    async def start(cls, config: EngineConfig, process: EngineProcess, arena: OwnedArena | None = None) -> "EngineLink":
        """Have the process load `config.model`, a folder, and wait for it. Raises ConfigError with its reason.

        `arena`: host memory for its pages, which outlives it.
        """
        socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.SNDHWM, 0)  # what is sent is bounded by what is asked
        link = cls(process, socket, config.longest_silence)
        try:
            process.listen(socket)
        except BaseException:
            process.kill()
            link.close()
            process.forget()
            raise
        paths = None if arena is None else (arena.path, arena.list_path)
        sent = asyncio.ensure_future(socket.send(wire.encode(wire.Start(dataclasses.asdict(config), paths))))
        try:
            async for message in link.messages():
                if isinstance(message, wire.Ready):
                    link.ready = message
                    break
        except BaseException as error:
            sent.cancel()
            process.kill()  # a model that loads hears nothing
            try:
                await process.wait()
            finally:  # also if others that start beside it end this
                link.close()
                process.forget()
            if isinstance(error, EngineDied):
                raise ConfigError(str(error)) from error
            raise
        return link

    async def messages(self) -> AsyncIterator[wire.Ready | wire.Slept | wire.Woken | wire.Heard]:
        """Yields the engine's messages. Raises EngineDied if it fails, ends, or is silent for too long and is
        killed."""
        ended = asyncio.create_task(self.process.wait())
        try:
            while True:
                received = asyncio.ensure_future(self.socket.recv())
                try:
                    await asyncio.wait({received, ended}, timeout=self._silence, return_when=asyncio.FIRST_COMPLETED)
                    if not received.done():
                        if ended.done():
                            raise EngineDied(f"the engine process ended with exit code {ended.result()}")
                        self.silent = True
                        self.process.kill()
                        raise EngineDied(f"the engine gave no sign of life for {self._silence:g} seconds")
                    message = wire.decode_for_server(received.result())
                finally:
                    received.cancel()
                if isinstance(message, wire.Failed):
                    raise EngineDied(message.reason)
                if isinstance(message, wire.Busy | wire.Events):
                    self._silence = min(self._longest, message.silence or self._longest)
                if not isinstance(message, wire.Busy):
                    yield message
        finally:
            ended.cancel()

    async def stop(self) -> None:
        """End the process, by force if it does not end by itself."""
        if self.process.returncode is None:
            self.socket.send(wire.encode(wire.Shutdown()))
            try:
                await asyncio.wait_for(self.process.wait(), SHUTDOWN_SECONDS)
            except TimeoutError:
                self.process.kill()
                await self.process.wait()
        self.close()

    def close(self) -> None:
        """Say and hear nothing more."""
        self.socket.close()
