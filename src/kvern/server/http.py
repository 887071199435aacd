"""HTTP answers: JSON, errors, and event streams that end when the client leaves.

Answers with many log-probabilities are encoded in parts by threads of their own, so that other requests do not wait.
"""

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvern.api.other_names import ignored
from kvern.plugins import imported

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


async def loaded(*modules: str) -> None:
    """Imports modules that are not there yet in a thread: an import takes too long for the event loop."""
    missing = [module for module in modules if module not in sys.modules]
    if missing:
        await asyncio.to_thread(lambda: [import_module(module) for module in missing])


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
    """Answers with an error in the format of the client's API, or as a page."""
    answer: Response = imported("kvern.server.error_answers:answer_of")(error, scope)
    return answer


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
