"""Runs the server until a signal: the engine's process, and uvicorn."""

import asyncio
import contextlib
import faulthandler
import functools
import gc
import signal
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from kvern.config import EngineConfig
from kvern.errors import ConfigError
from kvern.server.app import Server
from kvern.server.config import ServerConfig
from kvern.server.connection import Connection
from kvern.server.gate import is_loopback
from kvern.server.keys import read_keys
from kvern.serving.child import EngineProcess
from kvern.serving.client import EngineClient

LAST_SECONDS = 5
"""The seconds after a second signal until the process ends in any case and prints the stacks of its threads."""
KEEP_ALIVE_SECONDS = 75
"""The time that an idle connection stays open: longer than proxies keep theirs."""


async def serve(
    config: EngineConfig,
    server: ServerConfig,
    process: EngineProcess | None,
    say: Callable[[str], None],
    signals: Sequence[int],
) -> None:
    """Serves until SIGINT or SIGTERM. `process`, if it runs already, becomes the first engine.

    `signals` arrived before this function could handle them: with any, it ends as at a signal while a model loads.

    Raises ConfigError if the address is taken or the engine cannot start.
    """
    keys = read_keys(server)
    check_tls(server)
    listener = listen_unix(server.uds) if server.uds is not None else listen(server.host, server.port)
    loop, loading = asyncio.get_running_loop(), asyncio.current_task()
    assert loading is not None
    http: HttpServer | None = None

    ended: list[int] = []

    def note(number: int, _: object) -> None:
        """Handles a signal without the event loop: a second one ends the process even if the loop or a thread hangs."""
        if len(ended) == 1:  # a third signal must not restart the countdown
            faulthandler.dump_traceback_later(LAST_SECONDS, exit=True, file=2)
        ended.append(number)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(end)

    def end() -> None:
        """Ends the server: running requests have `grace_seconds`; a model that is loading is given up at once."""
        if http is None:
            loading.cancel()
        else:
            http.force_exit = http.should_exit  # the second signal
            http.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, note)
    if signals:
        ended.extend(signals)
        end()
    with contextlib.suppress(asyncio.CancelledError), _removed(server.uds):
        async with EngineClient(config, process) as client:
            application = Server([client], server, keys)
            await application.apis.resume()
            http = HttpServer(http_config(application.app(), server))
            application.apis.tasks = http.server_state.tasks  # the shutdown waits for these
            gc.freeze()  # objects of the start live on: the collector need not visit them
            engines = f"{len(client.replicas)} engines, " if len(client.replicas) > 1 else ""
            say(f"started {engines}in {client.ready.report}")
            listener.listen(http.config.backlog)  # readers of the next line may connect
            if not keys and server.uds is None and not is_loopback(server.host):
                say(f"warning: whoever reaches {server.host} may use this server: give it an api_key")
            say(f"serving {client.names[0]} on {shown_address(listener, server)}")
            await http.serve(sockets=[listener])
            await application.stop()


def http_config(application: ASGIApp, server: ServerConfig) -> uvicorn.Config:
    """Returns uvicorn's settings for the application."""
    return uvicorn.Config(
        application,
        log_config=None,
        access_log=False,
        http=functools.partial(Connection, server.request_timeout),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        root_path=server.root_path,
        server_header=False,
        backlog=2048,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(server.grace_seconds),
        ssl_certfile=server.tls_cert,
        ssl_keyfile=server.tls_key,
    )


class HttpServer(uvicorn.Server):
    """uvicorn's server without its signal handlers: `serve` has them, as it ends the engine's process too."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """Returns a bound socket, so that the address is taken before the model loads. Raises ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return listener


def listen_unix(path: Path) -> socket.socket:
    """Returns a socket bound to the path; an old socket that no server answers is replaced. Raises ConfigError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket() and not _is_answered(path):
            path.unlink()
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {path}: {error.strerror or error}") from error
    return listener


def _is_answered(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        return True


@contextlib.contextmanager
def _removed(path: Path | None) -> Iterator[None]:
    try:
        yield
    finally:
        if path is not None:
            path.unlink(missing_ok=True)


def shown_address(listener: socket.socket, server: ServerConfig) -> str:
    """Returns the server's URL."""
    if server.uds is not None:
        return f"unix:{server.uds}"
    host, port = listener.getsockname()[:2]
    scheme = "https" if server.tls_cert is not None else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{server.root_path}"


def check_tls(server: ServerConfig) -> None:
    """Checks that certificate and key can be used. Raises ConfigError."""
    if server.tls_cert is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(server.tls_cert, server.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"tls_cert {server.tls_cert} and tls_key cannot be used: {error}") from error
