"""An HTTP/1.1 client that is cheap enough to measure with: many connections, each event of a stream timed on arrival.

HttpClient ----- idle LoadConnections, used again, the last one first
   `-- send(method, path, body, reply)
          LoadConnection   sends one request at a time, parses what comes back
             `-- Reply              collects a body
                  `-- StreamReply   reads completion chunks and notes their times
"""

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Self, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from kvern.errors import ConfigError


class CachedTokens(msgspec.Struct, gc=False):
    """Of a prompt: tokens that the server had not to compute."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct, gc=False):
    """What the server says that it read and generated."""

    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: CachedTokens | None = None


class Delta(msgspec.Struct, gc=False):
    """What a chunk adds to a chat answer."""

    role: str | None = None
    content: str | None = None


class Choice(msgspec.Struct, gc=False):
    """One answer's part of a chunk."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    @property
    def carries_tokens(self) -> bool:
        """Not only the announcement of a role or of an end. Text may be empty: half of a character has none yet."""
        if self.delta is None:
            return bool(self.text) or self.finish_reason is None
        return bool(self.delta.content) or (self.finish_reason is None and self.delta.role is None)


class Chunk(msgspec.Struct, gc=False):
    """The fields that matter of an event of either completion route."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(Chunk)


class BrokenReply(Exception):
    """The connection or the stream ended too early, or is no HTTP."""


class Reply:
    """An answer whose body is collected."""

    def __init__(self) -> None:
        self.status = 0
        self.content = bytearray()

    @property
    def finished(self) -> bool:
        """All that matters is there, even if the connection ends before HTTP says so."""
        return False

    def feed(self, data: bytes) -> None:
        """Take a part of the body."""
        self.content += data


class StreamReply(Reply):
    """A streamed completion. Times are those of time.perf_counter(), in seconds; `gaps` lie between tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.last = 0.0
        self.gaps: list[float] = []
        self.usage: Usage | None = None
        self.error: str | None = None
        self._last_tokens = 0.0
        self._ended = False
        self._rest = b""

    @property
    def finished(self) -> bool:
        return self._ended

    @property
    def token_chunks(self) -> int:
        """How many chunks carried tokens."""
        return len(self.gaps) + 1 if self.first else 0

    def feed(self, data: bytes) -> None:
        if self.status != 200:
            super().feed(data)
            return
        now = time.perf_counter()
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._ended = True
            return
        try:
            chunk = _decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.error = f"a chunk cannot be read: {error}: {data[:100]!r}"
            return
        if chunk.error is not None:
            self.error = message_of({"error": chunk.error})
        self.usage = chunk.usage or self.usage
        if not chunk.choices:
            return
        self.last = now
        if any(choice.carries_tokens for choice in chunk.choices):
            if self.first:
                self.gaps.append(now - self._last_tokens)
            else:
                self.first = now
            self._last_tokens = now


def message_of(content: Any) -> str:
    """The text of an error in any of the shapes that servers use."""
    found = content
    for name in ("error", "message", "detail"):
        if isinstance(found, dict) and found.get(name):
            found = found[name]
    return str(found)


class LoadConnection(asyncio.Protocol):
    """One connection to the server; takes one request at a time."""

    def __init__(self, client: "HttpClient") -> None:
        self._client = client
        self._reply: Reply | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._parser: Any = None

    @property
    def is_open(self) -> bool:
        """Its end has not been seen."""
        return self._transport is not None

    async def send(self, request: bytes, reply: Reply) -> None:
        """Return when the answer is complete. Raises BrokenReply."""
        if self._transport is None or self._transport.is_closing():
            raise BrokenReply("the connection is closed")
        self._parser = httptools.HttpResponseParser(self)
        self._reply, self._waiter = reply, asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._waiter
        except asyncio.CancelledError:
            self.close()
            raise

    def close(self) -> None:
        """Leave, whatever is under way."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)  # of uvloop, which has no common base

    def data_received(self, data: bytes) -> None:
        if self._waiter is None:  # nothing was asked: there is no use for this connection
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(BrokenReply(f"the answer is no HTTP: {error}"))
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._client.forget(self)
        complete = self._reply is not None and self._reply.finished
        self._end(None if complete else BrokenReply(f"the server closed the connection{f': {error}' if error else ''}"))

    def on_headers_complete(self) -> None:
        if self._reply is not None:
            self._reply.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        if self._reply is not None:
            self._reply.feed(data)

    def on_message_complete(self) -> None:
        if self._parser.should_keep_alive():
            self._client.keep(self)
        elif self._transport is not None:
            self._transport.close()
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        """Wake who waits. The next request may come before that one runs, so nothing of this one may be left."""
        waiter, self._waiter, self._reply = self._waiter, None, None
        if waiter is None or waiter.done():
            return
        if error is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(error)


class HttpClient:
    """Connections to one server, as many as there are requests at the same time, until the end of `async with`.

    Raises ConfigError if `url` is not http://host[:port][/prefix].
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port or 80
        except ValueError as error:
            raise ConfigError(f"base_url is {url!r}: {error}") from None
        if parts.scheme != "http" or not parts.hostname or "@" in parts.netloc:
            raise ConfigError("base_url must look like http://host:port or http://host:port/prefix: no TLS, no user")
        self.url = url
        self.connections: set[LoadConnection] = set()
        self.idle: list[LoadConnection] = []
        self._host, self._port, self._prefix = parts.hostname, port, parts.path.rstrip("/")
        lines = {"Host": parts.netloc.rpartition("@")[2], "Content-Type": "application/json", **(headers or {})}
        for name, value in lines.items():
            if not f"{name}{value}".isprintable() or not value.isascii() or not name or set(name) & set(" :"):
                raise ConfigError(f"header {name!r} is {value!r:.40}: a header is one line of ASCII, NAME=VALUE")
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())

    def path(self, endpoint: str) -> str:
        """The path of an endpoint: behind the prefix, with /v1 once if both have it."""
        prefix = self._prefix.removesuffix("/v1") if endpoint.startswith("/v1/") else self._prefix
        return prefix + endpoint

    async def send(self, method: str, endpoint: str, body: bytes, reply: Reply) -> None:
        """Fill `reply` with the answer. Raises OSError if there is no connection, BrokenReply if it ends too early."""
        head = f"{method} {self.path(endpoint)} HTTP/1.1\r\n{self._head}Content-Length: {len(body)}\r\n\r\n"
        request = head.encode("ascii") + body
        while self.idle:  # one that the server has just closed is no failure of the server: try the next
            connection = self.idle.pop()
            try:
                await connection.send(request, reply)
            except BrokenReply:
                if reply.status:
                    raise
            else:
                return
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: LoadConnection(self), self._host, self._port)
        if connection.is_open:  # else it has been forgotten already
            self.connections.add(connection)
        await connection.send(request, reply)

    def keep(self, connection: LoadConnection) -> None:
        """Use it again."""
        self.idle.append(connection)

    def forget(self, connection: LoadConnection) -> None:
        """It has ended."""
        self.connections.discard(connection)
        if connection in self.idle:
            self.idle.remove(connection)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        """End all connections."""
        for connection in self.connections:
            connection.close()
        while self.connections:
            await asyncio.sleep(0)
