"""A client's connection: limits on the time and bytes that it may take without a complete request.

  connected, or idle  --head begins-->  head  --complete-->  body  --complete-->  the answer  -->  idle
  `seconds` or keep-alive               `seconds`            the handler's limits  `seconds` without reading any

A connection over a limit is closed. A body that arrives after its answer has `seconds` as well.
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

import httptools
from starlette.types import Message as ASGIMessage
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from kvern.server.keys import client_of

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

    def __init__(self, seconds: float, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._seconds = seconds
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
