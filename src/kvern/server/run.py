"""Runs the server until a signal: the engine's process, uvicorn, and connections with limits.

  connected, or idle  --head begins-->  head  --complete-->  body  --complete-->  the answer  -->  idle
  `seconds` or keep-alive               `seconds`            the handler's limits  `seconds` without reading any

A connection over a limit on time or bytes without a complete request is closed. A body that arrives after its answer
has `seconds` as well.
"""

import asyncio
import contextlib
import errno
import functools
import gc
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httptools
import uvicorn
from starlette.types import ASGIApp
from starlette.types import Message as ASGIMessage
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from kvern.config import EngineConfig
from kvern.cpu.cores import available_memory
from kvern.errors import ConfigError
from kvern.plugins import imported
from kvern.server.app import Server
from kvern.server.config import ServerConfig
from kvern.server.gate import is_loopback
from kvern.server.keys import KeyRing, client_of
from kvern.server.signals import Signals
from kvern.server.startup import OpenFiles, check_data_folder, check_tls, tell_systemd
from kvern.serving.child import EngineProcess
from kvern.serving.client import EngineClient
from kvern.tiers.store import read_bytes

if TYPE_CHECKING:
    from kvern.residency.keeper import Keeper
    from kvern.residency.options import ServedModel

HEADER_BYTES = 1 << 16
"""The limit of a request's head, and of what comes after the end of a body."""
MOST_HEADERS = 256
MOST_PIPELINED = 16
"""The limit of requests that are sent before earlier ones are answered."""
SLICE_BYTES = 1 << 14
"""The bytes that the parser gets at once, so that it never holds much more than the limits."""


class Connection(HttpToolsProtocol):
    """Closes connections of clients that take more than `seconds`, or too many bytes or requests.

    The state of each request has the address of the `client`, whatever the headers say; a Unix socket has none.
    """

    def __init__(self, seconds: float, files: OpenFiles, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._seconds = seconds
        self._files = files
        self._patience: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._bytes = 0
        """The bytes that arrived since the parser last reported a part of a message."""
        self._in_message = False
        self._offered = False
        """The last head offers another protocol; it is parsed again without the offer."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.client is not None:
            self.app_state = {**self.app_state, "client": client_of(self.client[0])}
        self._files.note(transport.get_extra_info("socket").fileno())
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_no_more()
        self._unset_keepalive_if_required()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Reads data; unlike uvicorn's method, bytes alone do not end the time limit of an idle connection."""
        try:
            for start in range(0, len(data), SLICE_BYTES):
                part = data[start : start + SLICE_BYTES]
                self._bytes += len(part)
                self._parse(part)
                if self._bytes > HEADER_BYTES or len(self.pipeline) > MOST_PIPELINED:
                    self._close()
                if self.transport.is_closing():
                    return
        except httptools.HttpParserUpgrade:
            pass  # of CONNECT, which is answered; what follows it is not read
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
            self._close()

    def _parse(self, data: bytes) -> None:
        """Parses bytes. Offers of other protocols, such as HTTP/2 by Java clients, are ignored: the request is parsed
        as if there were no offer."""
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if not self._offered or self.transport.is_closing():
                    raise
                self._offered, data = False, data[upgrade.args[0] :]
                version, method = self.parser.get_http_version(), self.parser.get_method()
                self.parser = httptools.HttpRequestParser(self)
                self.parser.feed_data(head_without_offer(method, self.url, version, self.headers))

    def on_message_begin(self) -> None:
        self._unset_keepalive_if_required()
        self._in_message, self._bytes = True, 0
        self._wait()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > MOST_HEADERS:
            self._close()

    def on_headers_complete(self) -> None:
        if self.transport.is_closing():  # in what the parser was given at once with it
            return
        self._offered = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        if self._offered:
            return
        self._wait_no_more()
        self._bytes = 0
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            cycle = self.cycle
            cycle.send = functools.partial(send_until_closed, cycle, cycle.send)  # type: ignore[method-assign]

    def on_body(self, body: bytes) -> None:
        if self.transport.is_closing():
            return
        self._bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._offered or self.transport.is_closing():
            return
        self._in_message, self._bytes = False, 0
        self._wait_no_more()
        super().on_message_complete()
        if self.cycle.response_complete:
            self._idle()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._close()
        elif self._in_message and not self.pipeline:
            self._unset_keepalive_if_required()
            self._wait()

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(self._seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _idle(self) -> None:
        if not self.pipeline and self.timeout_keep_alive_task is None and not self.transport.is_closing():
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _wait(self) -> None:
        if self._patience is None:
            self._patience = self.loop.call_later(self._seconds, self._close)

    def _wait_no_more(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _close(self) -> None:
        """Closes the connection; the client has `seconds` to read what was sent."""
        self._wait_no_more()
        self.transport.close()
        self._patience = self.loop.call_later(self._seconds, self.transport.abort)


def head_without_offer(method: bytes, url: bytes, version: str, headers: list[tuple[bytes, bytes]]) -> bytes:
    """Returns a request's head without the headers that offer another protocol."""
    kept = [(name, value) for name, value in headers if name not in (b"upgrade", b"connection")]
    connection = b",".join(value for name, value in headers if name == b"connection").split(b",")
    options = [option.strip() for option in connection if option.strip().lower() not in (b"upgrade", b"http2-settings")]
    lines = [name + b": " + value for name, value in (*kept, (b"connection", b", ".join(options)))]
    return b"\r\n".join((method + b" " + url + b" HTTP/" + version.encode(), *lines, b"", b""))


async def send_until_closed(
    cycle: RequestResponseCycle, send: Callable[[Any], Awaitable[None]], message: ASGIMessage
) -> None:
    """Lets an answer without a length end with its connection, because HTTP/1.0 has no chunks."""
    if message["type"] == "http.response.start":
        if not any(name.lower() == b"content-length" for name, _ in message.get("headers", ())):
            cycle.chunked_encoding = False
    elif cycle.chunked_encoding is False and not cycle.expected_content_length:
        cycle.expected_content_length = len(message.get("body", b""))
    await send(message)


MODELS_SHARE = 0.8
"""The share of the free memory that several models may take, where the user says nothing."""
SHOWN_NAMES = 5
CLOSING_SECONDS = 5
"""The seconds for requests that were cut off to tell their clients so."""
KEEP_ALIVE_SECONDS = 75
"""The time that an idle connection stays open: longer than proxies keep theirs."""


async def serve(
    config: EngineConfig,
    server: ServerConfig,
    process: EngineProcess | None,
    say: Callable[[str], None],
    signals: Sequence[int],
    models: "Sequence[ServedModel]" = (),
) -> None:
    """Serves until SIGINT or SIGTERM. `process`, if it runs already, becomes the first engine.

    Several `models` are served in place of that of `config`.
    `signals` arrived before this function could handle them: with any, it ends as at a signal while a model loads.

    Raises ConfigError if the address is taken or the engine cannot start.
    """
    keys = KeyRing(server)
    check_tls(server)
    check_data_folder(server, say)
    tracing = imported("kvern.server.tracing:start")(server, say) if server.may_trace else None
    if server.record is not None:
        imported("kvern.server.load_recorder:read_target")(server.record)
    listener = listen_unix(server.uds) if server.uds is not None else listen(server.host, server.port)
    reread = asyncio.Event()
    ends = Signals(server.grace_seconds, say, reread)
    ends.listen(signals)
    with contextlib.suppress(asyncio.CancelledError), _removed(server.uds), contextlib.ExitStack() as ending:
        if tracing is not None:
            ending.callback(tracing.traces.close)
        async with _loaded(config, models, server, process) as (clients, keeper):
            application = Server(clients, server, keys, keeper=keeper)
            application.service.tracing = tracing
            await application.apis.resume()
            http = HttpServer(http_config(application.app(), server, OpenFiles(say)))
            http.config.load()
            application.apis.tasks = http.server_state.tasks  # the shutdown waits for these
            ends.begin(http, application)
            if server.record is not None:  # not before: a start that fails leaves an earlier record alone
                recorder = imported("kvern.server.load_recorder:start")(server.record, say)
                application.service.recorder = recorder
                ending.callback(recorder.close)
            gc.freeze()  # objects of the start live on: the collector need not visit them
            for client in clients:
                engines = f"{len(client.replicas)} engines, " if len(client.replicas) > 1 else ""
                say(f"started {engines}in {client.replicas.ready.report}")
            listener.listen(http.config.backlog)  # readers of the next line may connect
            if not keys.known and server.uds is None and not is_loopback(server.host):
                say(f"warning: whoever reaches {server.host} may use this server: give it an api_key")
            page = "" if server.uds is not None else " (in a browser: a chat page)"
            say(f"serving {_shown(application.service.names)} on {shown_address(listener, server)}{page}")
            tell_systemd("READY=1")
            watching = None
            if server.reread_files:
                read_again = imported("kvern.server.rereading:read_again")
                read = read_again(server, application.read_keys, http.config.ssl, say, reread)
                watching = asyncio.create_task(read)
            await http.serve(sockets=[listener])
            if watching is not None:
                watching.cancel()
            await application.stop()


@contextlib.asynccontextmanager
async def _loaded(
    config: EngineConfig, models: "Sequence[ServedModel]", server: ServerConfig, process: EngineProcess | None
) -> "AsyncIterator[tuple[list[EngineClient], Keeper | None]]":
    """Yields the client of one model, or the keeper of several. Raises ConfigError."""
    if not models:
        async with EngineClient(config, process) as client:
            yield [client], None
        return
    gpu = models[0].gpu
    memory = int(MODELS_SHARE * available_memory()) if gpu is None else gpu.usable
    if server.models_memory is not None:
        try:
            memory = read_bytes(server.models_memory)
        except ValueError as error:
            raise ConfigError(f"models_memory: {error}") from error
        if gpu is not None and memory > gpu.usable:
            raise ConfigError(
                f"models_memory is {server.models_memory}, and models may take {gpu.usable / 1e9:.1f} GB of a GPU: "
                "lower it, or leave it out"
            )
    watches = (imported(f"kvern.residency.keeper:{name}")(models) for name in ("watch_for", "watch_around"))
    async with imported("kvern.residency.keeper:Keeper")(models, memory, process, *watches) as keeper:
        yield [], keeper


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN_NAMES]) + (f" and {len(names) - SHOWN_NAMES} more" if names[SHOWN_NAMES:] else "")


def http_config(application: ASGIApp, server: ServerConfig, files: OpenFiles) -> uvicorn.Config:
    """Returns uvicorn's settings for the application."""
    return uvicorn.Config(
        application,
        log_config=None,
        access_log=False,
        http=functools.partial(Connection, server.request_timeout, files),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        root_path=server.root_path,
        server_header=False,
        backlog=2048,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(server.grace_seconds) + CLOSING_SECONDS,
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
        other = "; end the program that has it, or choose another --port" if error.errno == errno.EADDRINUSE else ""
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}{other}") from error
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
