"""Transfers of a shelf on their way: loads, what each store has to bring of them, and pages that are being saved."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

from kvern.tiers.page_memory import Copies, Parts, Piece, cut_out
from kvern.tiers.pages import HEADER_BYTES, header, total_of
from kvern.tiers.shelved import Shelved
from kvern.tiers.store import DirectStore

Value = TypeVar("Value")
Entry = TypeVar("Entry")


@dataclass(eq=False)
class Load:
    """Pages on their way: how many pieces of each have not come, and which will not come."""

    pages: Sequence[Sequence[Piece]]
    missing: list[int]
    deadline: float
    counts: dict[Shelved, int] = field(default_factory=dict)
    """The bytes that each store has not answered for."""
    unanswered: int = 0
    """The calls of stores that have not returned: a load waits for the device's copies, but not for a store."""
    failed: int = 0
    """The first page that will not come, or the number of pages."""
    has_ended: bool = False
    gate: threading.Lock = field(default_factory=threading.Lock)
    """Held while copies to the KV cache are begun, so that none is for a load that has ended."""

    def end(self) -> None:
        """No more copies to the KV cache are begun."""
        with self.gate:
            self.has_ended = True

    @property
    def came(self) -> int:
        """The number of leading pages that have come."""
        return next((place for place, count in enumerate(self.missing) if count), len(self.missing))


@dataclass(eq=False)
class Arrival:
    """Pieces of a load that one store is asked for, of `size` bytes, each with the number of its page.

    `pieces` are the store's pages that have them.
    """

    one: Shelved
    load: Load
    batch: Sequence[tuple[int, Piece]]
    pieces: Sequence[Piece] = field(init=False)
    size: int = field(init=False)
    began: float = 0.0
    lent: list[Any] = field(default_factory=list)
    """Each page's place in a direct store, or None."""
    places: list[Parts | None] = field(default_factory=list)
    got: float = 0.0
    """When the store had answered, and copies could begin."""
    copied: float | None = None
    """The seconds of these, if the device has measured them."""
    expected: dict[int, int] = field(default_factory=dict)
    """The sums in the headers that are right, by the number of the page."""
    copies: Copies | None = None

    def __post_init__(self) -> None:
        self.pieces = [page for _, piece in self.batch for page in self.one.pieces_of(piece)]
        self.size = sum(len(page.at) for page in self.pieces)

    def by_piece(self, values: Sequence[Value]) -> list[Sequence[Value]]:
        """Returns the values of each page of the store, for each piece of the batch."""
        counts = [len(self.one.pieces_of(piece)) for _, piece in self.batch]
        ends = [*accumulate(counts)]
        return [values[end - count : end] for end, count in zip(ends, counts, strict=True)]


class Brought(NamedTuple):
    """A piece in the host's memory: in one page with the payloads of all heads, or in a page for each.

    `sums`: of the heads' payloads. `is_lent`: the memory may change after the call that has this.
    """

    piece: Piece
    pages: Sequence[Parts]
    sums: Sequence[int]
    is_lent: bool

    def page(self, wanted: Piece, number: int) -> memoryview:
        """The bytes of a store's page: of the whole piece, or of its head `number`."""
        is_whole = wanted is self.piece
        size = len(wanted.at) - HEADER_BYTES
        if is_whole == (len(self.pages) == 1):
            parts = self.pages[number]
            return memoryview(b"".join(parts)) if self.is_lent or len(parts) > 1 else parts[0]
        if is_whole:
            stride = size // self.piece.head_count
            payloads = [b"".join(cut_out(parts, HEADER_BYTES, stride)).ljust(stride, b"\0") for parts in self.pages]
            return memoryview(b"".join((header(wanted.name, size, total_of(self.sums)), *payloads)))
        stride = (len(self.piece.at) - HEADER_BYTES) // self.piece.head_count
        payload = cut_out(self.pages[0], HEADER_BYTES + number * stride, size)
        return memoryview(b"".join((header(wanted.name, size, self.sums[number]), *payload)))


Reserved = tuple[Shelved, DirectStore, Any]
"""A place that is reserved in a store's memory."""


@dataclass(frozen=True, eq=False)
class Sealing:
    """Packed pieces that are copied to `places` on the host, by their numbers; some of these are reserved in stores."""

    pieces: Mapping[int, Piece]
    places: Sequence[Parts]
    reserved: Mapping[int, Reserved]
    copies: Copies
    began: float


def cut_batches(entries: Sequence[Entry], most: int, size_of: Callable[[Entry], int]) -> list[list[Entry]]:
    """Cuts entries of pages into batches of at most `most` bytes, or one page."""
    batches: list[list[Entry]] = []
    size = most + 1
    for entry in entries:
        size += size_of(entry)
        if size > most:
            batches.append([])
            size = size_of(entry)
        batches[-1].append(entry)
    return batches


def size_of(entry: tuple[int, Piece]) -> int:
    """Returns the bytes of a piece that stands behind the number of its page."""
    return len(entry[1].at)


def size_in(one: Shelved, piece: Piece) -> int:
    """Returns the bytes of a piece in a store."""
    return sum(len(page.at) for page in one.pieces_of(piece))
