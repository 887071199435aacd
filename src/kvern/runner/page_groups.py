"""The protocol of movers of pages: the heads whose bytes they move, and their methods.

`page_mover.py` and `device_page_mover.py` implement it, and a simulation, which moves nothing.
"""

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol

from kvern.cache.messages import Part
from kvern.tiers.page_memory import PageMemory

if TYPE_CHECKING:
    import torch

    from kvern.device.pinned import Pinnable

STATES, DRAFTS = -1, -2
"""Numbers in place of a block table's: states of layers, and a draft model's cache over the first's blocks."""


@dataclass(frozen=True)
class HeadGroup:
    """Layers of one block table that have as many KV heads, and of these the heads of one rank.

    table        its number, or STATES or DRAFTS
    caches       of each layer [stored, blocks, block_size, heads, head_dim], of any dtype; the blocks may stand apart,
                 as strides say
    kinds        for each head what a page of it is, as bytes for its name
    is_own       False: a rank before this one has the same heads, and saves their pages for all
    block_bytes  the bytes of a head in a block
    is_draft     they are layers of a draft model or head
    """

    table: int
    caches: "Sequence[torch.Tensor]"
    kinds: Sequence[bytes]
    is_own: bool
    block_bytes: int
    is_draft: bool = False

    @cached_property
    def kind(self) -> bytes:
        """The kind of a piece of all heads."""
        return self.kinds[0] if len(self.kinds) == 1 else blake2b(b"".join(self.kinds), digest_size=32).digest()

    @property
    def part(self) -> Part:
        """The part of a page that its pages are."""
        others = {0: Part.BLOCKS, STATES: Part.STATE, DRAFTS: Part.DRAFT}
        return others.get(self.table, Part.WINDOWS)


class Place(Protocol):
    """The place by which a mover knows a piece: `Piece.at`."""

    def __len__(self) -> int:
        """The bytes of the piece, with its header."""

    def head(self, number: int) -> Sized:
        """One of its heads, whose length is that of its page in stores that ranks share."""


class PageMover(PageMemory, Protocol):
    """Packs and unpacks pages, in the order of the steps that its thread starts; its other methods are the shelf's."""

    groups: Sequence[HeadGroup]
    room: int
    """The bytes of pages that may be packed at once and wait for the shelf."""
    sums: str
    """The name of the sum of payloads: a part of the pages' identity."""
    cell: int | None
    """The bytes of the cells from which it copies best, for `HostStore`; None: any."""

    def pin(self, store: "Pinnable") -> Callable[[], None]:
        """Pages are copied from and to the memory of this store, until what is returned is called."""

    def pack(self, group: HeadGroup, tables: Sequence[Sequence[int]]) -> Sequence[Place]:
        """Returns for each list of blocks the piece of all heads, or nothing if there is no room.

        The blocks may change afterwards.
        """

    def places(self, group: HeadGroup, tables: Sequence[Sequence[int]]) -> Sequence[Place]:
        """Returns likewise what pieces to be loaded are written to; blocks below 0 are left out."""

    def settle(self, places: Sequence[Any], has_others: bool) -> None:
        """Pages have come, for `places`: later steps read them there.

        With `has_others` pages of loads that have ended may be on their way: they are written before later steps write
        to those blocks, or never.
        """
