"""HTTP answers: JSON, errors, and event streams that end when the client leaves.

Answers with many log-probabilities are encoded in parts by threads of their own, so that other requests do not wait.
"""

import asyncio
import contextlib
import html
import http
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.types import Receive, Scope, Send

from kvern.api.errors import anthropic_error, body_of, ollama_error, status_of
from kvern.api.other_names import as_sent, ignored
from kvern.errors import EngineUnavailable, KvernError, ServerBusy
from kvern.io.json_lines import json_line

WRITERS = ThreadPoolExecutor(2, "answers")
DEPTH = 8
"""The depth to which objects and lists are split: event, response, items, item, its parts, part, tables, table."""
PIECE = 1 << 16
"""The bytes that are sent at once before other tasks have a turn; the last part may exceed it a little."""

T = TypeVar("T")
Encode = Callable[[object], bytes]


async def apart(work: Callable[[], T]) -> T:
    """Runs `work` in a writer thread. Other threads get a turn every few milliseconds, except during one encoder
    call."""
    return await asyncio.get_running_loop().run_in_executor(WRITERS, work)


async def write_large(answer: Callable[[], object], encode: Encode = msgspec.json.encode) -> msgspec.Raw:
    """Returns the JSON of what `answer` returns, both made in a writer thread."""
    return await apart(lambda: msgspec.Raw(b"".join(json_parts(answer(), encode))))


def in_pieces(parts: Iterable[bytes | memoryview]) -> Iterator[bytes]:
    """Joins small parts and cuts large ones into pieces of at most PIECE bytes."""
    some, size = list[bytes | memoryview](), 0
    for part in parts:
        some.append(part)
        size += len(part)
        if size >= PIECE:
            whole = memoryview(b"".join(some) if len(some) > 1 else part)
            yield from (bytes(whole[place : place + PIECE]) for place in range(0, size, PIECE))
            some, size = [], 0
    if some:
        yield b"".join(some)


def json_parts(value: object, encode: Encode = msgspec.json.encode, depth: int = DEPTH) -> Iterator[bytes]:
    """Yields the JSON of a value in parts, each encoded in one call. Objects are split if they hold lists; lists,
    unless they are of numbers."""
    if depth and isinstance(value, dict) and any(map(_holds_lists, value.values())):
        before = b"{"
        for name, item in value.items():
            yield before + encode(name) + b":"
            yield from json_parts(item, encode, depth - 1)
            before = b","
        yield b"}"
    elif depth and isinstance(value, list) and value and not isinstance(value[0], int | float):
        before = b"["
        for item in value:
            yield before
            yield from json_parts(item, encode, depth - 1)
            before = b","
        yield b"]"
    else:
        yield encode(value)


def _holds_lists(value: object) -> bool:
    return isinstance(value, list) or (isinstance(value, dict) and any(map(_holds_lists, value.values())))


CLIENT_GONE = 499
"""The status of a client that left, for the log."""
IGNORED_HEADER = "x-kvern-ignored-fields"
LACKS_HEADER = "x-kvern-template-lacks"
"""Names the features of the request that the model's chat template does not have."""
PAGE_HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
"""Headers of pages that load nothing."""

Lines = Callable[[object], Iterator[bytes]]
"""Writes a value as a line of JSON, in parts."""


def path_of(scope: Scope) -> str:
    """Returns the path without the prefix that a proxy removes."""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


def ignored_header(body: Mapping[str, Any], known: Collection[str]) -> dict[str, str]:
    """Returns a header that names the fields of a body that were ignored."""
    return header_of_names(IGNORED_HEADER, ignored(body, known))


def strangers_header(body: Mapping[str, Any], known: Collection[str]) -> dict[str, str]:
    """Returns a header that names the fields of a body that are not in `known`."""
    return header_of_names(IGNORED_HEADER, sorted(name for name in body if name not in known))


def header_of_names(header: str, names: Iterable[str]) -> dict[str, str]:
    """Returns a header with as many of the names as it can hold; no header if there are none."""
    shown = [name for name in names if name.isascii() and name.isprintable()]
    return {header: ", ".join(shown)[:1000]} if shown else {}


def is_anthropic(scope: Scope) -> bool:
    """True if the client speaks Anthropic's API."""
    return path_of(scope).startswith("/v1/messages") or b"anthropic-version" in dict(scope["headers"])


def json_response(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Answers with a value as JSON; encoded JSON is not copied."""
    encoded = memoryview(content) if isinstance(content, msgspec.Raw) else msgspec.json.encode(content)
    return SentInPieces(encoded, status, headers, media_type="application/json")


def error_response(error: Exception, scope: Scope) -> Response:
    """Answers with an error: as a page for a browser, else as JSON in the format of the client's API."""
    error = as_sent(error, scope["state"].get("sent_names", {}))
    headers = getattr(error, "headers", None)
    if isinstance(error, EngineUnavailable | ServerBusy):
        headers = {"retry-after": str(math.ceil(error.seconds))}
    status, path = status_of(error), path_of(scope)
    if _is_looked_at(scope):
        content = error_page(status, str(error), scope.get("root_path", ""))
        return HTMLResponse(content, status, {**(headers or {}), **PAGE_HEADERS})
    if path.startswith("/api/"):
        return json_response(ollama_error(error), status, headers)
    request_id = scope["state"]["request_id"]
    body = anthropic_error(error, request_id) if is_anthropic(scope) else body_of(error)
    return json_response(body, status, headers)


def _is_looked_at(scope: Scope) -> bool:
    """True if a browser navigates to the route. Some client libraries accept text/html always, but then JSON as
    well."""
    accepted = b",".join(value for name, value in scope["headers"] if name == b"accept")
    return scope["method"] in ("GET", "HEAD") and b"text/html" in accepted and b"application/json" not in accepted


def error_page(status: int, message: str, root_path: str) -> str:
    """Returns the HTML page of an error."""
    phrase, base = http.HTTPStatus(status).phrase, html.escape(root_path)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{status} {phrase}</title><style>:root{{color-scheme:light dark}}body{{font:16px/1.5 system-ui;"
        "max-width:40rem;margin:4rem auto;padding:0 1rem;overflow-wrap:anywhere}</style>"
        f"<h1>{status} {phrase}</h1><p>{html.escape(message)}</p>"
        f'<p><a href="{base}/">Chat</a> · <a href="{base}/docs">All routes</a></html>'
    )


async def gone(receive: Receive) -> None:
    """Returns when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_gone(work: Awaitable[T], receive: Receive) -> T | None:
    """Returns the result of `work`, or None after cancelling it if the client leaves first."""
    working, leaving = asyncio.ensure_future(work), asyncio.create_task(gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await leaving
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await working


async def whole_answer(request: Request, work: Awaitable[object], headers: Mapping[str, str] | None = None) -> Response:
    """Answers with the result of `work` as JSON. If the client leaves first, `work` is cancelled."""
    whole = await until_gone(work, request.receive)
    return Response(status_code=CLIENT_GONE) if whole is None else json_response(whole, headers=headers)


class SentInPieces(Response):
    """A whole answer that is sent in pieces, so that only one piece is copied at a time."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if len(self.body) <= PIECE:
            await super().__call__(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for piece in in_pieces([self.body]):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


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


def _whole_line(content: object) -> Iterator[bytes]:
    yield json_line(content)


def _line_parts(content: object) -> Iterator[bytes]:
    return json_parts(content, json_line)
