"""Stores of KV pages for tests, pages that are known by their names, and processes that write them until killed."""

import contextlib
import hashlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvern.tiers.store import Identity, Store, make_store

IDENTITY = Identity(bytes(range(16)), {"model": "tiny", "dtype": "bfloat16"})
PAGE = 16 << 10


def name_of(number: int) -> bytes:
    """The name of a page."""
    return hashlib.blake2b(b"%d" % number, digest_size=32).digest()


def page_of(name: bytes, size: int = PAGE) -> bytes:
    """The page of a name, so that a reader knows whether bytes are right."""
    return hashlib.shake_128(name).digest(size)


def put(store: Store, numbers: Sequence[int], size: int = PAGE) -> list[bool]:
    """Puts the pages of numbers."""
    names = [name_of(number) for number in numbers]
    return store.put(names, [memoryview(page_of(name, size)) for name in names])


def get(store: Store, numbers: Sequence[int], size: int = PAGE) -> list[bool]:
    """Gets the pages of numbers, and asserts that those which were filled are right."""
    names = [name_of(number) for number in numbers]
    places = [memoryview(bytearray(size)) for _ in names]
    filled = store.get(names, places)
    for name, place, has_come in zip(names, places, filled, strict=True):
        assert not has_come or place == page_of(name, size)
    return filled


def has(store: Store, numbers: Sequence[int]) -> list[bool]:
    """Asks for the pages of numbers."""
    return store.has([name_of(number) for number in numbers])


@contextlib.contextmanager
def opened(option: str, identity: Identity = IDENTITY) -> Iterator[Store]:
    """The store of an option."""
    store = make_store(option, identity)
    try:
        yield store
    finally:
        store.close()


@contextlib.contextmanager
def writer(option: str, first: int, count: int, size: int) -> Iterator[subprocess.Popen[str]]:
    """A process that puts `count` pages one by one, and writes a line after each: 1 if it is kept. It is killed at the
    end."""
    code = f"import sys; from {__name__} import write; write({option!r}, {first}, {count}, {size})"
    folder = Path(__file__).parents[2]
    process = subprocess.Popen([sys.executable, "-c", code], cwd=folder, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def write(option: str, first: int, count: int, size: int) -> None:
    """What the process of `writer` does."""
    with opened(option) as store:
        for number in range(first, first + count):
            print(int(put(store, [number], size)[0]), flush=True)
