"""The server's side of traces: asks an engine for one of its next steps, one at a time."""

import asyncio

from kvern.errors import ConfigError, EngineDied
from kvern.serving.supervisor import Supervisor
from kvern.serving.wire import TakeTrace, TraceTaken

MOST_STEPS = 100
MOST_SECONDS = 120.0


class EngineTraces:
    """The traces of one engine."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._taking: asyncio.Future[bytes] | None = None

    async def take(self, steps: int, seconds: float) -> bytes:
        """Returns a Chrome trace of the next steps, of those that run within so many seconds, as compressed JSON.

        Raises ConfigError if there is none or another is being taken, or EngineDied.
        """
        if self._taking is not None:
            raise ConfigError("a profile of this engine is being taken already: wait until it has ended")
        if not self._supervisor.is_ready:
            raise ConfigError("this engine takes no requests now, and runs no steps: try again when it is ready")
        self._taking = asyncio.get_running_loop().create_future()
        self._supervisor.send(TakeTrace(steps, seconds))
        # also if the client leaves the engine has to end it before another begins
        return await asyncio.shield(self._taking)

    def hear(self, message: TraceTaken) -> None:
        """The engine has taken a trace, or cannot."""
        self._settle(message.trace, None if message.error is None else ConfigError(message.error))

    def interrupt(self, error: EngineDied) -> None:
        """The engine has ended."""
        self._settle(b"", error)

    def _settle(self, trace: bytes, error: Exception | None) -> None:
        taking, self._taking = self._taking, None
        if taking is None:
            return
        if error is None:
            taking.set_result(trace)
        else:
            taking.set_exception(error)
            taking.exception()  # nobody may wait for it any more
