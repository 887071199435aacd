"""Answers with many log-probabilities, encoded in parts by threads of their own so that other requests do not wait."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

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
