"""Event streams that end when the client leaves."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from kvern.api.error_bodies import body_of
from kvern.errors import KvernError
from kvern.io.json_lines import json_line
from kvern.server.http import PIECE, in_pieces, json_parts, until_gone

SHORT = 4
"""The items of a list that are encoded with all around them in one call; parts cost more than they spare."""
Lines = Callable[[object], Iterator[bytes]]
"""Writes a value as a line of JSON, in parts."""


def event_parts(content: object, lines: Lines) -> Iterator[bytes]:
    """Yields the parts of one server-sent event."""
    if isinstance(content, tuple):
        name, content = content
        yield f"event: {name}\n".encode()
    yield b"data: "
    yield from lines(content)
    yield b"\n\n"


@dataclass(frozen=True)
class StreamFormat:
    """The format of an API's streams. `frame` encodes one value; `last` is sent at the end."""

    last: bytes = b""
    failed: Callable[[Exception], object] = body_of
    """The value that is sent in place of the rest after an error."""
    kind: str = "text/event-stream; charset=utf-8"
    frame: Callable[[object, Lines], Iterator[bytes]] = event_parts


EVENTS = StreamFormat()
"""Server-sent events: each a JSON value, or (name, JSON value) for a named event."""
CHUNKS = StreamFormat(last=b"data: [DONE]\n\n")


class EventStream:
    """A streamed ASGI answer. `close` is called at its end in any case.

    A `large` stream has events with many log-probabilities, which are written in parts.
    """

    def __init__(
        self,
        events: AsyncIterator[object],
        close: Callable[[], None],
        headers: Mapping[str, str] | None = None,
        form: StreamFormat = EVENTS,
        large: bool = False,
    ) -> None:
        self._events = events
        self._close = close
        self._headers = headers or {}
        self._form = form
        self._lines: Lines = _line_parts if large else _whole_line

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            headers = {"content-type": self._form.kind, "cache-control": "no-cache", **self._headers}
            raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
            await send({"type": "http.response.start", "status": 200, "headers": raw})
            await until_gone(self._write(send), receive)
        finally:
            self._close()

    async def _write(self, send: Send) -> None:
        events = self._events
        try:
            async for content in events:
                await self._tell(content, send)
        except KvernError as error:
            await self._tell(self._form.failed(error), send)
        finally:
            await events.aclose()  # type: ignore[attr-defined]
        await send({"type": "http.response.body", "body": self._form.last, "more_body": False})

    async def _tell(self, content: object, send: Send) -> None:
        for piece in in_pieces(self._form.frame(content, self._lines)):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            if len(piece) >= PIECE:
                await asyncio.sleep(0)


def chunk_stream(chunks: AsyncIterator[object], close: Callable[[], None], headers: Mapping[str, str]) -> EventStream:
    """Returns a stream of OpenAI's chunks, whose log-probabilities are encoded already."""
    return EventStream(chunks, close, headers, CHUNKS)


def _whole_line(content: object) -> Iterator[bytes]:
    yield json_line(content)


def _line_parts(content: object) -> Iterator[bytes]:
    return _whole_line(content) if _is_short(content) else json_parts(content, json_line)


def _is_short(value: object) -> bool:
    """True if no list in it has more than SHORT items."""
    if isinstance(value, tuple | list):
        return len(value) <= SHORT and all(map(_is_short, value))
    return not isinstance(value, dict) or all(map(_is_short, value.values()))
