"""Answers with many log-probabilities: written by threads of their own, in parts, so that others do not wait."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

WRITERS = ThreadPoolExecutor(2, "answers")
DEPTH = 8
"""To which objects and lists are parted: an event, its response, the items, one, its parts, one, the tables, one."""
PIECE = 1 << 16
"""Bytes that are sent before others have their turn, and a little more."""

T = TypeVar("T")
Encode = Callable[[object], bytes]


async def apart(work: Callable[[], T]) -> T:
    """Do some work in a writer thread. Threads take turns every few milliseconds, but for calls that encode."""
    return await asyncio.get_running_loop().run_in_executor(WRITERS, work)


async def write_large(answer: Callable[[], object], encode: Encode = msgspec.json.encode) -> msgspec.Raw:
    """Return the JSON of what `answer` returns. A writer thread makes both."""
    return await apart(lambda: msgspec.Raw(b"".join(json_parts(answer(), encode))))


def in_pieces(parts: Iterable[bytes | memoryview]) -> Iterator[bytes]:
    """Join small parts and cut large ones, so that no piece has more than PIECE bytes."""
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
    """The JSON of a value, in parts of which each is encoded in one call: those of lists, if they are no numbers."""
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
