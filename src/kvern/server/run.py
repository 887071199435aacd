"""Runs the server: the engine's process, then uvicorn, until a signal."""

import socket
from collections.abc import Callable, Sequence

import uvicorn

from kvern.config import EngineConfig
from kvern.engine.client import EngineClient
from kvern.errors import ConfigError
from kvern.server.app import Server


async def serve(
    config: EngineConfig,
    models: Sequence[str],
    host: str,
    port: int,
    api_keys: Sequence[str],
    say: Callable[[str], None],
) -> None:
    """Serve until SIGINT or SIGTERM. Raises ConfigError if the address is taken or the engine cannot start."""
    listener = listen(host, port)
    async with EngineClient(config) as client:
        app = Server(client, models).app(api_keys)
        options = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=5)
        say(f"started in {client.report}")
        shown, taken = listener.getsockname()[:2]
        say(f"serving {models[0]} on http://{shown}:{taken}")
        await uvicorn.Server(options).serve(sockets=[listener])


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, taken before the model loads. Raises ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return listener
