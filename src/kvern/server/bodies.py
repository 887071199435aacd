"""Bodies of requests: JSON objects within limits. Large bodies take turns in a `Lane`.

Decoding holds the interpreter's lock even in a thread, so a body that would take long is refused before decoding.
"""

import asyncio
import concurrent.futures
import contextlib
import ctypes
import logging
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request

from kvern.api.errors import HttpError
from kvern.api.other_names import sent_names
from kvern.errors import shown
from kvern.io.json_lines import is_too_much, json_line, read_json

logger = logging.getLogger("kvern.requests")

MAX_BODY_BYTES = 16 << 20
"""The limit of one body; a larger one is refused."""
DRAINED_BYTES = 8 * MAX_BODY_BYTES
"""The bytes that are read and dropped so that a client that is still sending gets the error; after that the connection
is closed."""
SMALL_BODY_BYTES = 1 << 18
"""The limit up to which a body does not enter the `Lane`."""
LARGE_BODIES_BYTES = 4 * MAX_BODY_BYTES
"""The limit of all large bodies that are being read, decoded or answered at the same time; others wait."""
QUIET_SECONDS = 1.0
"""The delay after the last large body until its memory is returned to the system."""
LONGEST_LISTS = {"messages": 8192, "input": 8192, "items": 8192, "tools": 512}
"""The most objects in each list."""
MOST_PARTS = 8192
"""The most content parts in all messages together."""


class Lane:
    """A limit on the bytes of large bodies that are in memory at the same time, granted in the order of arrival.

    Each of `users` keys may have its share of `most` bytes, or one body of the `largest` size. A key over its share
    waits, and later bodies of others pass it.
    """

    def __init__(self, users: int, most: int = LARGE_BODIES_BYTES, largest: int = MAX_BODY_BYTES) -> None:
        self.threads = concurrent.futures.ThreadPoolExecutor(2, thread_name_prefix="large-body")
        self._most = max(largest, most // users)
        self._free = most
        self._taken: Counter[str] = Counter()
        self._trimming: asyncio.TimerHandle | None = None
        self._waiting: dict[asyncio.Future[None], tuple[str, int]] = {}

    @contextlib.asynccontextmanager
    async def room(self, owner: str, size: int) -> AsyncIterator[None]:
        """Holds `size` bytes until the block ends."""
        await self.take(owner, size)
        try:
            yield
        finally:
            self.give(owner, size)

    async def take(self, owner: str, size: int) -> None:
        """Waits until `size` bytes are free and within the owner's share."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[turn] = owner, size
        self._next()
        try:
            await turn
        except asyncio.CancelledError:
            if self._waiting.pop(turn, None) is None:
                self._free += size
                self._taken[owner] -= size
            self._next()
            raise

    def give(self, owner: str, size: int) -> None:
        """Releases the bytes."""
        self._free += size
        self._taken[owner] -= size
        self._next()
        if self._trimming is not None:
            self._trimming.cancel()
        loop = asyncio.get_running_loop()
        self._trimming = loop.call_later(QUIET_SECONDS, self.threads.submit, trim_memory)

    def _next(self) -> None:
        for turn, (owner, size) in list(self._waiting.items()):
            if turn.cancelled() or self._taken[owner] + size > self._most:
                continue
            if size > self._free:
                return
            del self._waiting[turn]
            self._free -= size
            self._taken[owner] += size
            turn.set_result(None)


MALLOC_TRIM: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""glibc's function; None with another C library."""


def trim_memory() -> None:
    """Returns the memory of large bodies to the system. Takes milliseconds, without the interpreter's lock."""
    if MALLOC_TRIM is not None:
        MALLOC_TRIM(0)


async def read_object(request: Request) -> dict[str, Any]:
    """Reads the body as a JSON object within `body_seconds` of the request's state. Raises HttpError.

    A large body holds the state's `lane` until its answer begins or `let_go` is called. The body is logged if the
    state's `logs_bodies` is set.
    """
    seconds, lane = request.state.body_seconds, request.state.lane
    stream = request.stream()
    parts: list[bytes] = []
    size, is_large = 0, False
    try:
        async with asyncio.timeout(seconds) as patience:
            async for part in stream:
                size += len(part)
                if size > DRAINED_BYTES:
                    break
                if size > MAX_BODY_BYTES:
                    parts.clear()
                    continue
                parts.append(part)
                if size > SMALL_BODY_BYTES and not is_large:
                    is_large = True
                    await _take(request, patience, seconds)
    except TimeoutError as error:
        slow = f"the body did not arrive within {seconds:g} s: send it faster"
        raise HttpError(408, slow, headers={"connection": "close"}) from error
    if size > MAX_BODY_BYTES:
        raise HttpError(413, f"the body has more than {MAX_BODY_BYTES} bytes: send less at once, or files to /v1/files")
    if (encoding := request.headers.get("content-encoding", "identity")).lower() != "identity":
        raise HttpError(415, f"content-encoding is {shown(encoding)}: this server reads bodies that are not compressed")
    if is_large:
        body = await asyncio.get_running_loop().run_in_executor(lane.threads, _decode_parts, parts)
    else:
        body = decode_object(b"".join(parts))
    request.state.sent_names = sent_names(body)
    if request.state.logs_bodies:
        logger.info("%s asks %s", request.state.request_id, json_line(body).decode())
    return body


def let_go(request: Request, body: dict[str, Any]) -> None:
    """Frees a body that has been read, before its answer is generated."""
    body.clear()
    request.state.held.close()


async def _take(request: Request, patience: asyncio.Timeout, seconds: float) -> None:
    """Takes the body's bytes from the lane, for `seconds` at most; the wait does not count as the body's time."""
    length = request.headers.get("content-length", "")
    size = min(int(length), MAX_BODY_BYTES) if len(length) < 20 and length.isdecimal() else MAX_BODY_BYTES
    patience.reschedule(None)
    lane: Lane = request.state.lane
    owner: str = request.state.key.name
    try:
        async with asyncio.timeout(seconds):
            await lane.take(owner, size)
    except TimeoutError as error:
        message = "the server is busy with other large bodies: try again, or send less than 256 KiB"
        raise HttpError(503, message, headers={"retry-after": "1", "connection": "close"}) from error
    request.state.held.callback(lane.give, owner, size)
    patience.reschedule(asyncio.get_running_loop().time() + seconds)


def _decode_parts(parts: list[bytes]) -> dict[str, Any]:
    data = b"".join(parts)
    parts.clear()
    return decode_object(data)


def decode_object(data: bytes) -> dict[str, Any]:
    """Decodes a JSON object within the limits. Raises HttpError."""
    if len(data) > SMALL_BODY_BYTES and is_too_much(data):
        raise HttpError(400, "the body holds more values than fit in one request, about a million: send fewer at once")
    if not data:
        raise HttpError(400, "the body is empty: send a JSON object, whose fields /docs tells")
    try:
        body = read_json(data)
    except ValueError as error:
        raise HttpError(400, f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise HttpError(400, f"the body is a JSON {type(body).__name__}: it must be an object")
    check_counts(body)
    check_counts(body.get("extra_body"))
    return body


def check_counts(body: object) -> None:
    """Refuses an object with too many messages, tools or content parts. Raises HttpError."""
    if not isinstance(body, dict):
        return
    for name, most in LONGEST_LISTS.items():
        value = body.get(name)
        if isinstance(value, list) and len(value) > most and isinstance(value[0], dict):
            raise HttpError(400, f"{name} holds {len(value)}: this server takes {most} at most", param=name)
    for name in ("messages", "input", "items"):
        value = body.get(name)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            contents = (item.get("content") for item in value if isinstance(item, dict))
            parts = sum(len(content) for content in contents if isinstance(content, list))
            if parts > MOST_PARTS:
                message = f"{name} has contents of {parts} parts in all: this server takes {MOST_PARTS} at most"
                raise HttpError(400, message, param=name)
