"""Stores for tests of the shelf: in memory, with answers that lie, calls that raise, and calls that wait for a word."""

import threading
from collections.abc import Sequence

from kvern.tiers.page_memory import Copies, HostPages, PageName, Parts, Piece
from kvern.tiers.pages import HEADER_BYTES, seal
from kvern.tiers.shelf import Shelf
from tests.support.served import eventually


class MemoryStore:
    """Keeps pages in a dictionary, as long as nothing else is asked of it.

    `raises`: the calls that fail, by name. `lies`: how `get` and `has` answer wrongly. Calls of a name in `waits` wait
    until `go` is set.
    """

    def __init__(self, is_local: bool = True) -> None:
        self.is_local = is_local
        self.pages: dict[bytes, bytes] = {}
        self.raises: set[str] = set()
        self.lies = ""
        self.waits: set[str] = set()
        self.go = threading.Event()
        self.calls: list[str] = []

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.waits:
            self.go.wait()
        if name in self.raises:
            raise OSError("as planned")

    def has(self, names: Sequence[bytes]) -> list[bool]:
        self._called("has")
        return [name in self.pages or self.lies == "has" for name in names]

    def get(self, names: Sequence[bytes], places: Sequence[memoryview]) -> list[bool]:
        self._called("get")
        found = []
        for name, place in zip(names, places, strict=True):
            page = self.pages.get(name)
            if page is not None and self.lies != "empty":
                place[:] = page if self.lies != "zeros" else bytes(len(page))
            found.append(page is not None or self.lies == "has")
        return found[:-1] if self.lies == "short" else found

    def put(self, names: Sequence[bytes], places: Sequence[memoryview]) -> list[bool]:
        self._called("put")
        if self.lies == "kept":
            return [True] * len(names)
        self.pages |= {name: bytes(place) for name, place in zip(names, places, strict=True)}
        return [True] * len(names)

    def drop(self, names: Sequence[bytes]) -> None:
        self._called("drop")
        for name in names:
            self.pages.pop(name, None)

    def close(self) -> None:
        self._called("close")


class PromptPages(HostPages):
    """Memory whose copies are begun at once, as a GPU's, and are done when a test says so."""

    is_prompt = True
    is_done = False

    def write(self, pieces: Sequence[Piece], places: Sequence[Parts]) -> Copies:
        return _PromptCopies(super().write(pieces, places), self)


class _PromptCopies:
    def __init__(self, copies: Copies, memory: PromptPages) -> None:
        self._copies = copies
        self._memory = memory

    def is_done(self) -> bool:
        return self._memory.is_done

    def sums(self) -> list[list[int]]:
        assert self._memory.is_done, "somebody waits"
        return self._copies.sums()

    def seconds(self) -> float | None:
        return 0.001


class Clock:
    """Seconds that tests let pass."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


SIZE = 512


def name_of(number: int) -> bytes:
    return number.to_bytes(32, "little")


def known(number: int) -> PageName:
    """The names of a page of one head."""
    return PageName(name_of(number), name_of(number))


def pieces(*numbers: int) -> list[Piece]:
    """Places for pages of 64 tokens."""
    return [Piece(name_of(number), memoryview(bytearray(HEADER_BYTES + SIZE)), 64) for number in numbers]


def fill(shelf: Shelf, *numbers: int) -> None:
    """Save pages, each of its own bytes, and wait until the stores have them."""
    for piece in pieces(*numbers):
        piece.at[HEADER_BYTES:] = bytes([piece.name[0]]) * SIZE
        shelf.save([piece])
    eventually(lambda: shelf.is_quiet)


def keep(store: MemoryStore, *numbers: int) -> None:
    """Let a store have pages that it was not given."""
    for piece in pieces(*numbers):
        piece.at[HEADER_BYTES:] = bytes([piece.name[0]]) * SIZE
        seal(piece.at, piece.name)
        store.pages[piece.name] = bytes(piece.at)


def load(shelf: Shelf, *numbers: int, number: int = 1) -> int:
    """Load pages of one piece each; returns how many of the leading ones have come, with the right bytes."""
    wanted = pieces(*numbers)
    shelf.load(number, [[piece] for piece in wanted])
    found: list[tuple[int, int]] = []
    eventually(lambda: bool(found.extend(shelf.ended()) or found))
    assert [ended for ended, _ in found] == [number]
    for piece in wanted[: found[0][1]]:
        assert piece.at[HEADER_BYTES:] == bytes([piece.name[0]]) * SIZE
    return found[0][1]
