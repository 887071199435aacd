"""HTTP answers: JSON, OpenAI's error shape, and event streams that end when their client goes."""

import asyncio
import contextlib
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvern.batch.chat_body import CHAT_FIELDS
from kvern.errors import (
    DeadlineExceeded,
    EngineDied,
    EngineUnavailable,
    InvalidParameter,
    InvalidRequest,
    KvernError,
    RequestFailed,
    ServerBusy,
)
from kvern.sampling_params import SamplingParams

IGNORED_HEADER = "x-kvern-ignored-fields"

NAMED_FIELDS = frozenset({*SamplingParams.__struct_fields__, *CHAT_FIELDS, "dimensions", "input"})

T = TypeVar("T")


class HttpError(Exception):
    """An answer that is an error. `param` names the field that is wrong."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's shape of an error."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def path_of(scope: Scope) -> str:
    """The path as routes have it, without what a proxy in front takes away."""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


def ignored_header(body: Mapping[str, Any], known: Collection[str]) -> dict[str, str]:
    """A header with the names of a body's fields that mean nothing, as far as a header can hold them."""
    names = sorted(name for name in body if name not in known and name.isascii() and name.isprintable())
    return {IGNORED_HEADER: ", ".join(names)[:1000]} if names else {}


def json_response(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Any value as JSON."""
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


def error_response(error: Exception) -> Response:
    """The answer to what went wrong: 4xx for the request, 5xx for the server."""
    if isinstance(error, HttpError):
        body = error_body(error.status, error.message, error.param, error.code)
        return json_response(body, error.status, error.headers)
    param = None
    if isinstance(error, InvalidParameter | InvalidRequest):  # its message begins with the field's name
        first = re.match(r"\w+", str(error))
        param = first[0] if first is not None and first[0] in NAMED_FIELDS else None
    headers = None
    if isinstance(error, EngineUnavailable | ServerBusy):
        headers = {"retry-after": str(math.ceil(error.seconds))}
    return json_response(error_body(status_of(error), str(error), param), status_of(error), headers)


def status_of(error: Exception) -> int:
    """The HTTP status of what went wrong."""
    if isinstance(error, HttpError):
        return error.status
    statuses = {EngineUnavailable: 503, EngineDied | RequestFailed: 500, DeadlineExceeded: 408, ServerBusy: 429}
    return next((status for kind, status in statuses.items() if isinstance(error, kind)), 400)


async def gone(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_gone(work: Awaitable[T], receive: Receive) -> T | None:
    """The result of `work`, which is cancelled, with None, if the client goes first."""
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


class EventStream:
    """An ASGI answer of server-sent events, each a JSON value, or (name, JSON value) for a named event.

    `close` is called at its end, whatever that is; `last` is sent after the last event; `failed` shapes an error.
    """

    def __init__(
        self,
        events: AsyncIterator[object],
        close: Callable[[], None],
        headers: Mapping[str, str] | None = None,
        last: bytes = b"data: [DONE]\n\n",
        failed: Callable[[Exception], object] | None = None,
    ) -> None:
        self._events = events
        self._close = close
        self._headers = headers or {}
        self._last = last
        self._failed = failed or (lambda error: error_body(status_of(error), str(error)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", **self._headers}
            raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
            await send({"type": "http.response.start", "status": 200, "headers": raw})
            await until_gone(self._write(send), receive)
        finally:
            self._close()

    async def _write(self, send: Send) -> None:
        events = self._events
        try:
            async for content in events:
                await send({"type": "http.response.body", "body": event_bytes(content), "more_body": True})
        except KvernError as error:
            await send({"type": "http.response.body", "body": event_bytes(self._failed(error)), "more_body": True})
        finally:
            await events.aclose()  # type: ignore[attr-defined]
        await send({"type": "http.response.body", "body": self._last, "more_body": False})


def event_bytes(content: object) -> bytes:
    """One server-sent event."""
    if isinstance(content, tuple):
        name, content = content
        return f"event: {name}\n".encode() + event_bytes(content)
    return b"data: " + msgspec.json.encode(content) + b"\n\n"
