"""The memory that the shelf copies pages from and to: it keeps the KV cache, seen from the threads of the shelf."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvern.tiers.pages import HEADER_BYTES, payload_sum


class Piece(NamedTuple):
    """One page: its name, what a `PageMemory` knows it by, and the tokens that it counts for.

    `len(at)` is the bytes of the page with its header. A part of the KV cache may have several pages, such as one for
    each head: one of them counts the tokens.
    """

    name: bytes
    at: Any
    tokens: int = 0
    is_own: bool = True
    """False: another rank saves the same page to stores that ranks share."""


Parts = Sequence[memoryview]
"""The memory of a page on the host, in one piece or several, of which the first begins with the header."""


class Copies(Protocol):
    """Copies of payloads, on their way. Their places do not change before they are done."""

    def is_done(self) -> bool:
        """True if `sums` does not wait."""
        ...

    def sums(self) -> list[int]:
        """Waits for the copies, and returns the sums of what was copied. It is called once."""
        ...

    def seconds(self) -> float | None:
        """The seconds that the copies took, once `sums` has returned; None: as long as `sums`."""
        ...


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
        ...

    def read(self, pieces: Sequence[Piece], places: Sequence[Parts]) -> Copies:
        """Begins to copy packed payloads to places, behind space for headers."""
        ...

    def forget(self, pieces: Sequence[Piece]) -> None:
        """The payloads of packed pieces are needed no longer."""
        ...

    def write(self, pieces: Sequence[Piece], places: Sequence[Parts]) -> Copies:
        """Begins to copy payloads that were loaded. It is called while nobody ends the load; waiting is not."""
        ...


class HostPages:
    """Pages whose bytes are in the host's memory: `Piece.at` is a memoryview of header and payload."""

    batch_bytes = 8 << 20
    is_prompt = False

    def buffer(self, piece: Piece) -> memoryview:
        """See `PageMemory`."""
        page: memoryview = piece.at
        return page

    def read(self, pieces: Sequence[Piece], places: Sequence[Parts]) -> Copies:
        """See `PageMemory`."""
        return _HostCopies([[self.buffer(piece)] for piece in pieces], places)

    def forget(self, pieces: Sequence[Piece]) -> None:
        """See `PageMemory`."""

    def write(self, pieces: Sequence[Piece], places: Sequence[Parts]) -> Copies:
        """See `PageMemory`."""
        return _HostCopies(places, [[self.buffer(piece)] for piece in pieces])


class _HostCopies:
    """Copies within the host's memory, which begin when somebody waits for them."""

    def __init__(self, sources: Sequence[Parts], targets: Sequence[Parts]) -> None:
        self._sources = sources
        self._targets = targets

    def is_done(self) -> bool:
        return False

    def sums(self) -> list[int]:
        found = []
        for source, target in zip(self._sources, self._targets, strict=True):
            copy_page(source, target)
            whole = target if len(target) == 1 else source
            found.append(payload_sum(whole[0][HEADER_BYTES:]))
        return found

    def seconds(self) -> float | None:
        return None


def copy_page(parts: Parts, to: Parts) -> None:
    """Copies the bytes of a page, which is in one piece on one of the sides, unless they are there."""
    if parts[0].obj is to[0].obj:
        return
    first, start = (parts[0], 0) if len(parts) == 1 else (to[0], 0)
    for part in to if len(parts) == 1 else parts:
        other = first[start : start + len(part)]
        source, target = (other, part) if len(parts) == 1 else (part, other)
        np.copyto(np.frombuffer(target, np.uint8), source)
        start += len(part)


def in_one_piece(parts: Parts, is_lent: bool) -> memoryview:
    """A page in one piece; a copy if it is in several, or if its memory is lent."""
    return memoryview(b"".join(parts)) if is_lent or len(parts) > 1 else parts[0]
