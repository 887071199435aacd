"""The tier of a rank: which pages its stores have, what they cost, and the copies to and from the KV cache."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from kvern.cache.messages import PageLoad, PageSave, blocks_of_page
from kvern.request.store_figures import StoreFigures
from kvern.runner.page_mover import HeadGroup, PageMover
from kvern.tiers.pages import HEADER_BYTES, page_name
from kvern.tiers.shelf import Piece, Shelf

MOST_ASKED = 1024
"""Pages of a prompt about which distant stores are asked."""

Seconds = Callable[[int, int], float]


@dataclass(frozen=True)
class _Pages:
    """The pages of a group of heads that a page of the cache needs, and the blocks to which they are written."""

    group: HeadGroup
    blocks: Sequence[int]
    bytes: torch.Tensor


class Tier:
    """Implements `TierIndex` for the scheduler, by the pages of this rank, and moves them for `TieredSteps`.

    The thread that runs the steps calls all methods; none raises, and none waits but for copies of memory.
    """

    def __init__(self, mover: PageMover, shelf: Shelf, identity: bytes, block_size: int) -> None:
        """`identity`, 16 bytes, says which model's pages these are."""
        self.identity = identity
        self.shelf = shelf
        weakref.finalize(self, shelf.close)  # nobody tells of an engine's end
        self.computing: Seconds | None = None
        """The seconds in which the tokens of a prompt between two positions are computed; None: nobody knows."""
        self._mover = mover
        self._first = mover.groups[0].kinds[0]
        self._block_size = block_size
        self._page_blocks = blocks_of_page(block_size)
        payloads = [len(group.kinds) * (HEADER_BYTES + self._page_blocks * group.block_bytes) for group in mover.groups]
        self.page_bytes = sum(payloads)
        """The bytes of all pages of this rank for `page_blocks` blocks."""
        self._loads: dict[int, list[list[_Pages]]] = {}

    def _name(self, key: bytes) -> bytes:
        """The page that stands for all with this key."""
        return page_name(self.identity, self._first, key)

    def wants(self, key: bytes) -> bool:
        """See `TierIndex`."""
        return self.shelf.wants([self._name(key)])

    def source(self, key: bytes) -> str | None:
        """See `TierIndex`."""
        found = self.shelf.find(self._name(key))
        return None if found is None else found.name

    def pays(self, keys: Sequence[bytes], start: int, end: int) -> bool:
        """See `TierIndex`."""
        if self.computing is None:
            return True
        if self.shelf.seconds(map(self._name, keys), self.page_bytes) <= self.computing(start, end):
            return True
        self.shelf.refused(end - start)
        return False

    def ask(self, keys: Iterable[bytes]) -> int | None:
        """See `TierIndex`."""
        return self.shelf.ask([*map(self._name, islice(keys, MOST_ASKED))]) if self.shelf.has_distant else None

    def answered(self, question: int) -> bool:
        """See `TierIndex`."""
        return self.shelf.answered(question)

    def save(self, saves: Sequence[PageSave]) -> None:
        """Copies pages out, before the next step may change their blocks."""
        for save in saves:
            tokens = len(save.tables[0]) * self._block_size
            if not self.shelf.has_room(self.page_bytes):
                self.shelf.skipped(tokens)
                continue
            pieces: list[Piece] = []
            for group in self._mover.groups:
                if blocks := save.tables[group.table]:
                    pages = self._mover.pack(group, blocks)
                    pieces += self._pieces(group, save.key, pages, 0 if pieces else tokens)
            self.shelf.save(pieces)

    def _pieces(self, group: HeadGroup, key: bytes, pages: torch.Tensor, tokens: int) -> list[Piece]:
        """The pages of a group's heads, of which the first counts the tokens."""
        names = [page_name(self.identity, kind, key) for kind in group.kinds]
        return [
            Piece(name, memoryview(page.numpy()), 0 if place else tokens, group.is_own)
            for place, (name, page) in enumerate(zip(names, pages, strict=True))
        ]

    def load(self, loads: Sequence[PageLoad]) -> None:
        """Begins to bring pages, which `finished` writes to their blocks. Those of one load come together, in order."""
        wanted: dict[int, list[list[Piece]]] = {}
        for load in loads:
            pieces: list[Piece] = []
            pages: list[_Pages] = []
            for group in self._mover.groups:
                blocks = load.tables[group.table]
                if any(block >= 0 for block in blocks):
                    size = HEADER_BYTES + len(blocks) * group.block_bytes
                    place = torch.empty(len(group.kinds), size, dtype=torch.uint8)
                    place[:, :HEADER_BYTES] = 0  # memory that is used again may have a page that nobody has brought
                    pages.append(_Pages(group, blocks, place))
                    pieces += self._pieces(group, load.key, place, 0 if pieces else len(blocks) * self._block_size)
            wanted.setdefault(load.load, []).append(pieces)
            self._loads.setdefault(load.load, []).append(pages)
        for number, of_load in wanted.items():
            self.shelf.load(number, of_load)

    def finished(self) -> list[tuple[int, int]]:
        """Writes what has come to its blocks; returns loads that have ended: (number, leading pages that have come).

        It is asked after each step, or about every millisecond without steps, while loads are on their way. On a GPU
        the copies are on the current stream, behind the steps that may read what the blocks had before.
        """
        ended = [(number, count) for number, count in self.shelf.ended() if number in self._loads]
        for number, count in ended:
            for pages in self._loads.pop(number)[:count]:
                for one in pages:
                    self._mover.unpack(one.group, one.blocks, one.bytes)
        return ended

    def abandon(self) -> None:
        """Gives up all loads, since steps have failed: no block is written any more."""
        self.shelf.abandon()
        self._loads.clear()

    def figures(self) -> dict[str, StoreFigures]:
        """See `TierIndex`."""
        return self.shelf.figures()
