"""Transfers of a shelf on their way: loads, what each store has to bring of them, and pages that are being saved."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvern.tiers.page_memory import Copies, Parts, Piece
from kvern.tiers.shelved import Shelved
from kvern.tiers.store import DirectStore


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
    """Pieces of a load that one store is asked for, of `size` bytes, each with the number of its page."""

    one: Shelved
    load: Load
    batch: Sequence[tuple[int, Piece]]
    size: int
    began: float = 0.0
    lent: list[Any] = field(default_factory=list)
    """Each piece's place in a direct store, or None."""
    places: list[Parts | None] = field(default_factory=list)
    got: float = 0.0
    """When the store had answered, and copies could begin."""
    copied: float | None = None
    """The seconds of these, if the device has measured them."""
    expected: dict[int, int] = field(default_factory=dict)
    """The sums in the headers that are right, by the number of the piece."""
    copies: Copies | None = None


Reserved = tuple[Shelved, DirectStore, Any]
"""A place that is reserved in a store's memory."""


@dataclass(frozen=True, eq=False)
class Sealing:
    """Packed pages that are copied to `places` on the host, by their numbers; some of these are reserved in stores."""

    pieces: Mapping[int, Piece]
    places: Sequence[Parts]
    reserved: Mapping[int, Reserved]
    copies: Copies
    began: float
