"""An HTTP client for measurements: one connection for each request, and a time for each event of a stream.

HttpClient.send(method, path, body, reply)
 `-- Reply              collects a body
      `-- StreamReply   reads completion chunks and notes their times
"""

import time
from collections.abc import Mapping
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp
import msgspec

from kvern.errors import ConfigError


class CachedTokens(msgspec.Struct, gc=False):
    """The tokens of a prompt that the server had cached."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct, gc=False):
    """The tokens that the server read and generated."""

    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: CachedTokens | None = None


class Delta(msgspec.Struct, gc=False):
    """The part of a chat answer in a chunk."""

    role: str | None = None
    content: str | None = None


class Choice(msgspec.Struct, gc=False):
    """The part of one answer in a chunk."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    @property
    def carries_tokens(self) -> bool:
        """False for chunks that only announce a role or an end. The text may be empty: half a character has none."""
        if self.delta is None:
            return bool(self.text) or self.finish_reason is None
        return bool(self.delta.content) or (self.finish_reason is None and self.delta.role is None)


class Chunk(msgspec.Struct, gc=False):
    """The fields of an event of either completion route that are used."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(Chunk)


class BrokenReply(Exception):
    """The connection or the stream ended too early, or the answer is not HTTP."""


class Reply:
    """An answer whose body is collected."""

    def __init__(self) -> None:
        self.status = 0
        self.content = bytearray()

    @property
    def finished(self) -> bool:
        """True if nothing is missing, even if the connection ends before HTTP says so."""
        return False

    def feed(self, data: bytes) -> None:
        """Adds a part of the body."""
        self.content += data


class StreamReply(Reply):
    """A streamed completion. Times are time.perf_counter() in seconds; `gaps` are the times between tokens."""

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
        """The number of chunks with tokens."""
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
    """Returns the text of an error in any of the formats that servers use."""
    found = content
    for name in ("error", "message", "detail"):
        if isinstance(found, dict) and found.get(name):
            found = found[name]
    return str(found)


class HttpClient:
    """Connections to one server, one for each concurrent request, for `async with`.

    Raises ConfigError if `url` is not http://host[:port][/prefix] or the same with https.
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        try:
            parts = urlsplit(url)
            _ = parts.port
        except ValueError as error:
            raise ConfigError(f"base_url is {url!r}: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
            raise ConfigError("base_url must look like http://host:port or https://host/prefix, without a user")
        self.url = url
        self._origin, self._prefix = f"{parts.scheme}://{parts.netloc}", parts.path.rstrip("/")
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", **(headers or {})}
        for name, value in self._headers.items():
            if not f"{name}{value}".isprintable() or not value.isascii() or not name or set(name) & set(" :"):
                raise ConfigError(f"header {name!r} is {value!r:.40}: a header is one line of ASCII, NAME=VALUE")

    def path(self, endpoint: str) -> str:
        """Returns the path of an endpoint: after the prefix, with a single /v1 if both have it."""
        prefix = self._prefix.removesuffix("/v1") if endpoint.startswith("/v1/") else self._prefix
        return prefix + endpoint

    async def send(self, method: str, endpoint: str, body: bytes, reply: Reply) -> None:
        """Fills `reply` with the answer. Raises OSError if there is no connection, BrokenReply if it ends too early."""
        url = self._origin + self.path(endpoint)
        try:
            async with self._session.request(method, url, data=body or None, allow_redirects=False) as answer:
                reply.status = answer.status
                async for data in answer.content.iter_any():
                    reply.feed(data)
        except aiohttp.ClientConnectorError:
            raise
        except (aiohttp.ClientError, OSError) as error:
            if not reply.finished:
                raise BrokenReply(f"the server's answer ended: {error or type(error).__name__}") from error

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        """Closes all connections."""
        await self._session.close()
