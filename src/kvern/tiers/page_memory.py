"""The memory that the shelf copies pages from and to: it keeps the KV cache, seen from the threads of the shelf."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvern.tiers.pages import HEADER_BYTES, payload_sum


class Piece(NamedTuple):
    """A piece of a page: its name, what a `PageMemory` knows it by, and the tokens that it counts for.

    It has the payloads of `head_count` heads, which take as many bytes each. `len(at)` is its bytes with the header.
    """

    name: bytes
    at: Any
    tokens: int = 0
    is_own: bool = True
    """False: another rank saves the same page to stores that ranks share."""
    head_count: int = 1
    heads: "Sequence[Piece]" = ()
    """Each head by itself, for stores that ranks share, since these may have other heads; none: there is one."""

    @property
    def names(self) -> "PageName":
        """The names by which stores know it."""
        return PageName(self.name, self.heads[0].name if self.heads else self.name)


class PageName(NamedTuple):
    """The names of a piece: in stores of this process alone, and that of its first head in stores that ranks share."""

    whole: bytes
    head: bytes


Parts = Sequence[memoryview]
"""The memory of a page on the host, in one piece or several, of which the first begins with the header."""


class Copies(Protocol):
    """Copies of payloads, on their way. Their places do not change before they are done."""

    def is_done(self) -> bool:
        """True if `sums` does not wait."""

    def sums(self) -> list[list[int]]:
        """Waits for the copies, and returns the sums of each piece's heads as copied. It is called once."""

    def seconds(self) -> float | None:
        """The seconds that the copies took, once `sums` has returned; None: as long as `sums`."""


class PageMemory(Protocol):
    """Copies payloads between what pieces stand for and the host's memory.

    Several threads of the shelf call it at once. Methods may raise what a device raises: the pages are then not saved,
    or have not come.
    """

    batch_bytes: int
    """The bytes of pages that are read or written at once, if that is more than one page."""
    is_prompt: bool
    """True if `read` and `write` take microseconds a page: the engine's thread may call them."""

    def buffer(self, piece: Piece) -> memoryview:
        """Memory for a page with its header, for a store that copies it."""

    def read(self, pieces: Sequence[Piece], places: Sequence[Parts]) -> Copies:
        """Begins to copy packed payloads to places, behind space for headers."""

    def forget(self, pieces: Sequence[Piece]) -> None:
        """The payloads of packed pieces are needed no longer."""

    def write(self, pieces: Sequence[Piece], places: Sequence[Parts]) -> Copies:
        """Begins to copy payloads that were loaded. It is called while nobody ends the load; waiting is not."""


class HostPages:
    """Pages whose bytes are in the host's memory: `Piece.at` is a memoryview of header and payload."""

    batch_bytes = 8 << 20
    is_prompt = False

    def buffer(self, piece: Piece) -> memoryview:
        """See `PageMemory`."""
        page: memoryview = piece.at
        return page

    def payload(self, piece: Piece) -> memoryview:
        """The memory of a piece's payload."""
        return self.buffer(piece)[HEADER_BYTES:]

    def read(self, pieces: Sequence[Piece], places: Sequence[Parts]) -> Copies:
        """See `PageMemory`."""
        return _HostCopies(self, pieces, places, packs=True)

    def forget(self, pieces: Sequence[Piece]) -> None:
        """See `PageMemory`."""

    def write(self, pieces: Sequence[Piece], places: Sequence[Parts]) -> Copies:
        """See `PageMemory`."""
        return _HostCopies(self, pieces, places, packs=False)


class _HostCopies:
    """Copies within the host's memory, to `places` or from there, which begin when somebody waits for them."""

    def __init__(self, memory: HostPages, pieces: Sequence[Piece], places: Sequence[Parts], *, packs: bool) -> None:
        self._memory = memory
        self._pieces = pieces
        self._places = places
        self._packs = packs

    def is_done(self) -> bool:
        return False

    def sums(self) -> list[list[int]]:
        found = []
        for piece, parts in zip(self._pieces, self._places, strict=True):
            payload = self._memory.payload(piece)
            start = -HEADER_BYTES
            for part in () if parts[0].obj is payload.obj else parts:
                begin = max(0, -start)
                inside, outside = payload[start + begin : start + len(part)], part[begin:]
                source, target = (inside, outside) if self._packs else (outside, inside)
                np.copyto(np.frombuffer(target, np.uint8), source)
                start += len(part)
            size = len(payload) // piece.head_count
            found.append([payload_sum(payload[head * size :][:size]) for head in range(piece.head_count)])
        return found

    def seconds(self) -> float | None:
        return None


def cut_out(parts: Parts, start: int, size: int) -> list[memoryview]:
    """The memory of `size` bytes of a page from `start`."""
    found = []
    for part in parts:
        if size > 0 and start < len(part):
            found.append(part[start : start + size])
            size -= len(found[-1])
        start = max(0, start - len(part))
    return found
