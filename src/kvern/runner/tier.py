"""The tier of a rank: which pages its stores have, what they cost, and the copies to and from the KV cache."""

import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, islice, takewhile

from kvern.cache.messages import ALL_STEPS, NO_STATE, PageLoad, PageSave, Part, blocks_of_page
from kvern.request.store_figures import StoreFigures, StorePrice
from kvern.runner.page_groups import DRAFTS, STATES, HeadGroup, PageMover, Place
from kvern.tiers.host import HostStore
from kvern.tiers.page_memory import PageName, Piece
from kvern.tiers.pages import HEADER_BYTES, page_names
from kvern.tiers.shelf import Shelf

MOST_ASKED = 1024
"""Parts of pages of a prompt about which distant stores are asked."""

PATIENCE = 0.25
"""The share of what computing takes that a load may take in any case: a thread may have to wait for a processor."""

NAMES_KEPT = 1024
"""Pages of a kind whose names are remembered: a page that is loaded is asked for several times."""

PRICED_TOKENS = 512
"""Tokens of a prompt by whose time the price of a load is told."""

Seconds = Callable[[int, int], float]


def blocks_of(group: HeadGroup, page: PageSave | PageLoad) -> Sequence[int]:
    """The blocks of a page, or the state, that a group of heads moves; none, or only -1: it moves nothing."""
    if group.table == DRAFTS:
        return page.draft
    return [page.state] if group.table == STATES else page.tables[group.table]


def parts_of(save: PageSave) -> list[Part]:
    """The parts of a page that are saved."""
    is_saved = {
        Part.BLOCKS: bool(save.tables[0]),
        Part.WINDOWS: any(save.tables[1:]),
        Part.STATE: save.state != NO_STATE,
        Part.DRAFT: bool(save.draft),
    }
    return [part for part, is_there in is_saved.items() if is_there]


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
        self.others: Callable[[], int] | None = None
        """Returns what `others_saved` does; None: this rank is alone."""
        self._awaited: deque[tuple[int, deque[PageName]]] = deque()
        """Steps, and the pieces that they save, as far as no store was found to have them."""
        self._mover = mover
        kinds = (kind for group in mover.groups for kind in (group.kind, *group.kinds))
        self._makers = {kind: lru_cache(NAMES_KEPT)(page_names(identity, kind)) for kind in kinds}
        page_blocks = blocks_of_page(block_size)
        self._page_tokens = page_blocks * block_size
        self._counted = mover.groups[0].part
        """The part whose pages count tokens."""
        self._first: defaultdict[Part, list[HeadGroup]] = defaultdict(list)
        """Whose pieces stand for all of a part that this rank has: a group's, and a draft head's."""
        self._bytes: defaultdict[Part, int] = defaultdict(int)
        for group in mover.groups:
            if group.is_draft or group.part not in self._first:
                self._first[group.part].append(group)
            payload = group.block_bytes * (1 if group.table == STATES else page_blocks)
            self._bytes[group.part] += len(group.kinds) * (HEADER_BYTES + payload)
        self.keeps_drafts = Part.DRAFT in self._first
        self._loads: dict[int, list[list[Piece]]] = {}
        self._packed: list[Piece] = []

    def _names(self, key: bytes, part: Part) -> list[PageName]:
        """The pieces that stand for all of a part; none: other ranks have it."""
        return [self._name(group, key) for group in self._first.get(part, ())]

    def _name(self, group: HeadGroup, key: bytes) -> PageName:
        whole = self._makers[group.kind](key)
        return PageName(whole, self._makers[group.kinds[0]](key) if self.shelf.has_shared else whole)

    def wants(self, key: bytes, part: Part) -> bool:
        """See `TierIndex`."""
        names = self._names(key, part)
        return not names or self.shelf.wants(names)

    def source(self, key: bytes, part: Part) -> str | None:
        """See `TierIndex`."""
        found = [self.shelf.find(name) for name in self._names(key, part)] or self.shelf.stores[:1]
        return None if found[0] is None or None in found else found[0].name

    def is_saving(self, key: bytes, part: Part) -> bool:
        """See `TierIndex`."""
        return any(self.shelf.is_saving(names) for names in self._names(key, part))

    def others_saved(self) -> int:
        """See `TierIndex`."""
        return ALL_STEPS if self.others is None else self.others()

    def await_saves(self, step: int, saves: Iterable[PageSave]) -> None:
        """`saved` is to tell when the pages of a step, which has begun, are in stores."""
        groups = self._mover.groups
        names = (
            self._name(of, save.key) for save in saves for of in groups if max(blocks_of(of, save), default=-1) >= 0
        )
        self._awaited.append((step, deque(names)))

    @property
    def is_awaited(self) -> bool:
        """True if `saved` has something left to tell."""
        return bool(self._awaited)

    def saved(self) -> int | None:
        """Returns the last of the awaited steps whose pages are in a store each, or not on their way any more."""
        last = None
        while self._awaited:
            step, names = self._awaited[0]
            while names and (self.shelf.find(names[0]) is not None or not self.shelf.is_saving(names[0])):
                names.popleft()
            if names:
                break
            last = step
            self._awaited.popleft()
        return last

    def pays(
        self,
        pages: Sequence[tuple[str, Part]],
        start: int,
        end: int,
        ahead: Sequence[tuple[int, int]] = (),
        is_next: bool = True,
    ) -> bool:
        """See `TierIndex`."""
        if self.computing is None:
            return True
        waits = sum(self.computing(*span) for span in ahead)
        counts = self.shelf.counts((store, self._bytes[part]) for store, part in pages if part in self._first)
        if self.shelf.seconds(counts) <= self.computing(start, end) + waits:
            self.shelf.promise(counts)
            return True
        if is_next:
            self.shelf.refused(end - start)
        return False

    def prices(self) -> dict[str, StorePrice] | None:
        """Returns the prices of loads from the stores that are on; None if nobody knows what computing takes."""
        if self.computing is None:
            return None
        second = PRICED_TOKENS / self.computing(0, PRICED_TOKENS)
        size, state = self._bytes[self._counted] / self._page_tokens, self._bytes[Part.STATE]
        return {
            name: StorePrice(
                second * (one.latency_seconds + state / one.bandwidth),
                second * size / one.bandwidth,
                int(self.shelf.size_of(name) / size),
            )
            for name, one in self.shelf.figures().items()
            if one.is_on
        }

    def patience(self, start: int, end: int) -> float:
        """See `TierIndex`."""
        return 0.0 if self.computing is None else PATIENCE * self.computing(start, end)

    def ask(self, pages: Iterable[tuple[bytes, Part]]) -> int | None:
        """See `TierIndex`."""
        if not self.shelf.has_distant:
            return None
        names = (name for key, part in pages for name in self._names(key, part))
        return self.shelf.ask(islice(names, MOST_ASKED))

    def answered(self, question: int) -> bool:
        """See `TierIndex`."""
        return self.shelf.answered(question)

    def save(self, saves: Sequence[PageSave]) -> None:
        """Packs pages, before the next step may change their blocks; `put` has the shelf put them into the stores.

        A GPU has the step to compute by then, beside which the host makes these copies.
        """
        sizes = accumulate(sum(self._bytes[part] for part in parts_of(save)) for save in saves)
        room = self._mover.room
        kept = saves[: sum(1 for _ in takewhile(lambda size: self.shelf.has_room(size, room), sizes))]
        for save in saves[len(kept) :]:
            self._skip(save)
        counted: set[int] = set()
        pieces: list[Piece] = []
        for group in self._mover.groups:
            wanted = [at for at, save in enumerate(kept) if any(block >= 0 for block in blocks_of(group, save))]
            pages = self._mover.pack(group, [blocks_of(group, kept[at]) for at in wanted])
            for at, page in zip(wanted, pages, strict=False):
                pieces.append(self._piece(group, kept[at].key, page, counts=at not in counted))
                counted.add(at)
            for at in wanted[len(pages) :]:
                self._skip(kept[at])
        self._packed += pieces
        if not self._mover.is_prompt:
            self.put()

    def put(self) -> None:
        """Has the shelf put what was packed into the stores."""
        packed, self._packed = self._packed, []
        if packed:
            self.shelf.save(packed)

    def _skip(self, save: PageSave) -> None:
        self.shelf.skipped(self._page_tokens if self._counted in parts_of(save) else 0)

    def _piece(self, group: HeadGroup, key: bytes, at: Place, *, counts: bool) -> Piece:
        """The piece of a group's heads, of which the first of all may count the tokens."""
        tokens = self._page_tokens if counts and group.part is self._counted else 0
        kinds = group.kinds
        heads: Sequence[Piece] = ()
        if self.shelf.has_shared and len(kinds) > 1:
            heads = [
                Piece(self._makers[kind](key), at.head(number), 0 if number else tokens, group.is_own)
                for number, kind in enumerate(kinds)
            ]
        return Piece(self._makers[group.kind](key), at, tokens, group.is_own, len(kinds), heads)

    def load(self, loads: Sequence[PageLoad]) -> None:
        """Begins to bring pages to their blocks. Those of one load come together, in order."""
        wanted: dict[int, list[list[Piece]]] = {}
        stores: dict[int, list[str]] = {}
        patience = {load.load: load.patience for load in loads}
        pieces: list[list[Piece]] = [[] for _ in loads]
        for group in self._mover.groups:
            chosen = [at for at, load in enumerate(loads) if any(block >= 0 for block in blocks_of(group, load))]
            pages = self._mover.places(group, [blocks_of(group, loads[at]) for at in chosen])
            for at, page in zip(chosen, pages, strict=True):
                pieces[at].append(self._piece(group, loads[at].key, page, counts=not pieces[at]))
        for load, of_page in zip(loads, pieces, strict=True):
            wanted.setdefault(load.load, []).append(of_page)
            stores.setdefault(load.load, []).append(load.store)
        for number, of_load in wanted.items():
            self._loads[number] = of_load
            self.shelf.load(number, of_load, patience[number], stores[number])

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

    def release(self, size: int) -> None:
        """Has the host's store give memory of so many bytes back, and take no more until that is 0."""
        for shelved in self.shelf.stores:
            if isinstance(shelved.store, HostStore):
                shelved.store.release(size)

    def abandon(self) -> None:
        """Gives up all loads, since steps have failed: later steps do not find that blocks are written behind them."""
        self.shelf.abandon()
        self._loads.clear()
        self._mover.settle([], has_others=True)

    def figures(self) -> dict[str, StoreFigures]:
        """See `TierIndex`."""
        return self.shelf.figures()
