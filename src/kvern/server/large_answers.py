"""Answers with many log-probabilities: written by threads of their own, in parts, so that others do not wait."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec

WRITERS = ThreadPoolExecutor(2, "answers")
DEPTH = 5
"""To which objects and lists are parted: an answer, its choices, a choice, its log-probabilities, a token."""


async def write_large(answer: Callable[[], object]) -> msgspec.Raw:
    """What `answer` returns, as JSON. Threads take turns every few milliseconds, but for what one call encodes."""
    return await asyncio.get_running_loop().run_in_executor(
        WRITERS, lambda: msgspec.Raw(b"".join(json_parts(answer())))
    )


def json_parts(value: object, depth: int = DEPTH) -> Iterator[bytes]:
    """The JSON of a value, in parts of which each is encoded in one call."""
    if depth and isinstance(value, dict) and any(map(_holds_lists, value.values())):
        before = b"{"
        for name, item in value.items():
            yield before + msgspec.json.encode(name) + b":"
            yield from json_parts(item, depth - 1)
            before = b","
        yield b"}"
    elif depth and isinstance(value, list) and value:
        before = b"["
        for item in value:
            yield before
            yield from json_parts(item, depth - 1)
            before = b","
        yield b"]"
    else:
        yield msgspec.json.encode(value)


def _holds_lists(value: object) -> bool:
    if isinstance(value, dict):
        return any(isinstance(item, list) for item in value.values())
    return isinstance(value, list)
