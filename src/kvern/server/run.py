"""Runs the server: the engine's process, then uvicorn, until a signal."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator, Sequence

import uvicorn

from kvern.config import EngineConfig
from kvern.engine.client import EngineClient
from kvern.errors import ConfigError
from kvern.server.app import Server

GRACE_SECONDS = 5
"""How long running requests may go on after a signal."""


async def serve(
    config: EngineConfig,
    models: Sequence[str],
    host: str,
    port: int,
    api_keys: Sequence[str],
    silence: float,
    say: Callable[[str], None],
) -> None:
    """Serve until SIGINT or SIGTERM.

    Raises ConfigError if the address is taken or the engine cannot start, EngineDied if it keeps crashing.
    """
    listener = listen(host, port)
    loop, loading = asyncio.get_running_loop(), asyncio.current_task()
    assert loading is not None
    http: HttpServer | None = None

    def end() -> None:
        """At a signal: running requests have some seconds; a model that loads has none."""
        if http is None:
            loading.cancel()
        else:
            http.handle_exit(signal.SIGTERM, None)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)
    with contextlib.suppress(asyncio.CancelledError):
        async with EngineClient(config, silence) as client:
            app = Server(client, models).app(api_keys)
            http = HttpServer(
                uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=GRACE_SECONDS)
            )
            say(f"started in {client.report}")
            listener.listen(http.config.backlog)  # who reads the next line may connect
            shown, taken = listener.getsockname()[:2]
            say(f"serving {models[0]} on http://{shown}:{taken}")
            watch = asyncio.create_task(_end_with_engine(client, http))
            await http.serve(sockets=[listener])
            watch.cancel()
            if client.failure is not None:
                raise client.failure


async def _end_with_engine(client: EngineClient, http: uvicorn.Server) -> None:
    await client.failed.wait()
    http.should_exit = True


class HttpServer(uvicorn.Server):
    """Leaves signals to `serve`, which ends the engine's process as well."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """A socket with the address, taken before the model loads. Raises ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return listener
