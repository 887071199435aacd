"""The tier of a rank: which pages its stores have, what they cost, and the copies to and from the KV cache."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

from kvern.cache.messages import PageLoad, PageSave, blocks_of_page
from kvern.request.store_figures import StoreFigures
from kvern.runner.page_mover import HeadGroup, PageMover
from kvern.tiers.page_memory import Piece
from kvern.tiers.pages import HEADER_BYTES, page_name
from kvern.tiers.shelf import Shelf

MOST_ASKED = 1024
"""Pages of a prompt about which distant stores are asked."""

Seconds = Callable[[int, int], float]


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
        self._loads: dict[int, list[list[Piece]]] = {}

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
        """Packs pages, before the next step may change their blocks, and has the shelf put them into the stores."""
        size = self._block_size
        tokens = [len(save.tables[0]) * size for save in saves]
        room = self._mover.room
        fitting = next((n for n in range(len(saves)) if not self.shelf.has_room((n + 1) * self.page_bytes, room)), None)
        for skipped in () if fitting is None else tokens[fitting:]:
            self.shelf.skipped(skipped)
        kept = saves[:fitting]
        counted: set[int] = set()
        pieces: list[Piece] = []
        for group in self._mover.groups:
            wanted = [place for place, save in enumerate(kept) if save.tables[group.table]]
            pages = self._mover.pack(group, [kept[place].tables[group.table] for place in wanted])
            for place, heads in zip(wanted, pages, strict=False):
                pieces += self._pieces(group, kept[place].key, heads, 0 if place in counted else tokens[place])
                counted.add(place)
            for place in wanted[len(pages) :]:
                self.shelf.skipped(tokens[place])
        if pieces:
            self.shelf.save(pieces)

    def _pieces(self, group: HeadGroup, key: bytes, heads: Sequence[Any], tokens: int) -> list[Piece]:
        """The pages of a group's heads, of which the first counts the tokens."""
        return [
            Piece(page_name(self.identity, kind, key), head, 0 if place else tokens, group.is_own)
            for place, (kind, head) in enumerate(zip(group.kinds, heads, strict=True))
        ]

    def load(self, loads: Sequence[PageLoad]) -> None:
        """Begins to bring pages to their blocks. Those of one load come together, in order."""
        wanted: dict[int, list[list[Piece]]] = {}
        pieces: list[list[Piece]] = [[] for _ in loads]
        for group in self._mover.groups:
            chosen = [at for at, load in enumerate(loads) if any(block >= 0 for block in load.tables[group.table])]
            pages = self._mover.places(group, [loads[at].tables[group.table] for at in chosen])
            for at, heads in zip(chosen, pages, strict=True):
                tokens = 0 if pieces[at] else len(loads[at].tables[group.table]) * self._block_size
                pieces[at] += self._pieces(group, loads[at].key, heads, tokens)
        for load, of_page in zip(loads, pieces, strict=True):
            wanted.setdefault(load.load, []).append(of_page)
        for number, of_load in wanted.items():
            self._loads[number] = of_load
            self.shelf.load(number, of_load)

    def finished(self) -> list[tuple[int, int]]:
        """Returns loads that have ended, whose pages are in their blocks: (number, leading pages that have come).

        It is asked after each step, or about every millisecond without steps, while loads are on their way. What steps
        after it read and write is ordered behind what the loads wrote.
        """
        ended = [(number, count) for number, count in self.shelf.ended() if number in self._loads]
        for number, count in ended:
            pages = self._loads.pop(number)
            self._mover.settle([piece.at for of_page in pages[:count] for piece in of_page], count < len(pages))
        return ended

    def abandon(self) -> None:
        """Gives up all loads, since steps have failed: later steps do not find that blocks are written behind them."""
        self.shelf.abandon()
        self._loads.clear()
        self._mover.settle([], has_others=True)

    def figures(self) -> dict[str, StoreFigures]:
        """See `TierIndex`."""
        return self.shelf.figures()
