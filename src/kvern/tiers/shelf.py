"""The shelf: an engine's stores in their order, each with a price, a breaker and threads of its own.

    save --> sealed in a thread, in the memory of a store of this process if there is one --> put into each other store
    load --> each page from the first store that has it, checked in its thread --> `ended`: the leading pages that came
             from a lower store --> put into those above it

What moves the pages (`PageMemory`) copies between the bytes of a store and the KV cache. A store may lie, raise, hang
and be late. A page counts if its header and its sum are right. A load has a deadline, after which what has come counts.
Memory that a store was given to write to is never used again unless the call has returned. The engine's thread calls
the methods of `Shelf`, none of which waits for a store that is not local.
"""

import logging
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain

from kvern.request.store_figures import StoreFigures
from kvern.tiers.page_memory import HostPages, PageMemory, PageName, Parts, Piece
from kvern.tiers.pages import HEADER_BYTES, header, sum_of, total_of
from kvern.tiers.price import GAIN, Price
from kvern.tiers.shelved import FIRST_PATIENCE, PATIENCE, Lane, MakeLane, Shelved
from kvern.tiers.store import Store
from kvern.tiers.transfers import Arrival, Brought, Load, Reserved, Sealing, cut_batches, size_in, size_of

logger = logging.getLogger("kvern")

MOST_WRITING = 256 << 20
"""Bytes on their way to a store; pages beyond are not saved."""
PROMPT_BATCHES = 4
"""Batches that the engine's thread has copied at once."""
PROMPT_BYTES = 512 << 20
"""Bytes that the engine's thread has on their way at most, about as many as come during a step. Beginning copies takes
its time, so those of many loads are begun in turn, and the first requests run while pages of others come."""
ENDING_SECONDS = 2.0
PINNED = (0.001, 25e9)
"""Seconds and bytes a second that are expected of pinned memory before it was used."""
LEAST_PATIENCE = 0.02
"""Seconds: a thread may have to wait for a processor."""


class Shelf:
    """The stores of an engine, or of one of its ranks, by names for people: the nearest first."""

    def __init__(
        self,
        stores: Mapping[str, Store],
        clock: Callable[[], float] = time.monotonic,
        memory: PageMemory | None = None,
        lane: MakeLane = Lane,
        *,
        by_heads: bool = False,
    ) -> None:
        """`memory`: of the pages; None: the host's. `lane` makes threads. `by_heads`: see `Shelved`."""
        self._memory: PageMemory = HostPages() if memory is None else memory
        self._batch = self._memory.batch_bytes
        self.stores = [Shelved(name, store, lane, by_heads=by_heads) for name, store in stores.items()]
        for one in self.stores:
            if self._is_prompt(one):
                one.price = Price(*PINNED)
        self._keepers = [one for one in self.stores if one.keeps]
        self._is_direct = any(one.direct is not None for one in self._keepers)
        """Pages are saved to memory that a store has already."""
        self.has_shared = any(not one.is_whole for one in self.stores)
        """There are stores that have a page for each head."""
        self._clock = clock
        self._sealing = lane("pages", 1)
        self._sealing_bytes = 0
        self._saving: Counter[bytes] = Counter()
        """Names of pages on their way to stores."""
        self._loads: dict[int, Load] = {}
        self._arrivals: deque[Arrival] = deque()
        """Pieces that the engine's thread has begun to copy itself."""
        self._queued: deque[Arrival] = deque()
        """Pieces in the memory of stores that it has not begun to copy."""
        self._promised: deque[Mapping[Shelved, int]] = deque()
        """The bytes of loads that were decided on and have not begun, the first first."""
        self._lock = threading.Lock()
        self._questions: dict[int, tuple[set[Shelved], float]] = {}
        self._numbers = 0

    @property
    def has_distant(self) -> bool:
        """True if there are stores that have to be asked."""
        return any(not shelved.store.is_local for shelved in self.stores)

    def find(self, names: PageName) -> Shelved | None:
        """The first store that probably has a piece and may be asked for it."""
        now = self._clock()
        for one in self.stores:
            if one.breaker.is_on(now) and one.has(one.name_of(names), now):
                return one
        return None

    def _distant(self, name: str) -> Shelved | None:
        """The distant store of this name, if it may be asked."""
        now = self._clock()
        on = (one for one in self.stores if not one.store.is_local and one.breaker.is_on(now))
        return next((one for one in on if one.name == name), None)

    def wants(self, wanted: Sequence[PageName]) -> bool:
        """True if a store that may be asked, and keeps pages, lacks one of these pieces."""
        now = self._clock()
        on = (one for one in self._keepers if one.breaker.is_on(now))
        return any(not all(one.has(one.name_of(names), now) for names in wanted) for one in on)

    def has_room(self, count: int, most: int | None = None) -> bool:
        """True if so many more bytes may be saved, of `most` that are packed at once; None: MOST_WRITING."""
        now = self._clock()
        least = min((one.writing_bytes for one in self._keepers if one.breaker.is_on(now)), default=MOST_WRITING)
        return least < MOST_WRITING and least + self._sealing_bytes + count <= (MOST_WRITING if most is None else most)

    def skipped(self, tokens: int) -> None:
        """Counts tokens that are not saved."""
        self.stores[0].count(skipped_tokens=tokens)

    def refused(self, tokens: int) -> None:
        """Counts tokens that are computed because that is faster."""
        self.stores[0].count(refused_tokens=tokens)

    def counts(self, pages: Iterable[tuple[str, int]]) -> Mapping[Shelved, int]:
        """Returns the bytes that each store has of pages: the names of their stores, and their sizes in bytes."""
        counts: defaultdict[str, int] = defaultdict(int)
        for name, size in pages:
            counts[name] += size
        return {one: counts[one.name] for one in self.stores if one.name in counts}

    def seconds(self, counts: Mapping[Shelved, int]) -> float:
        """Returns the predicted seconds of a load of so many bytes, behind all that were decided on before."""
        return self._seconds(counts, self._promised)

    def _seconds(self, counts: Mapping[Shelved, int], before: Iterable[Mapping[Shelved, int]] = ()) -> float:
        now, queued = self._clock(), Counter({one: one.reading_bytes for one in counts})
        for load in before:
            queued.update(load)
        return sum(one.price.seconds(count, queued[one], now) for one, count in counts.items())

    def promise(self, counts: Mapping[Shelved, int]) -> None:
        """Counts a load that was decided on: the next calls of `load` are for those that were promised, in order."""
        self._promised.append(counts)

    # Distant stores

    def ask(self, wanted: Iterable[PageName]) -> int | None:
        """Ask the distant stores for pages; see `TierIndex.ask`."""
        names = [*wanted]
        now = self._clock()
        asked = {one for one in self.stores if not one.store.is_local and one.breaker.is_on(now)}
        if not asked or not names:
            return None
        self._numbers += 1
        number = self._numbers
        patience = min(max(PATIENCE * max(one.answer_seconds for one in asked), LEAST_PATIENCE), FIRST_PATIENCE)
        with self._lock:
            self._questions[number] = asked, now + patience
        for one in [*asked]:
            one.reading.submit(partial(self._ask, one, number, [one.name_of(each) for each in names]))
        return number

    def _ask(self, one: Shelved, number: int, names: Sequence[bytes]) -> None:
        began = self._clock()
        try:
            for name, is_there in zip(names, one.store.has(names), strict=True):
                (one.known.add if is_there else one.known.discard)(name)
            took = self._clock() - began
            one.answer_seconds = max(took, one.answer_seconds + GAIN * (took - one.answer_seconds))
        except Exception as error:  # a store may raise anything
            one.failed(error, self._clock())
        with self._lock:
            if number in self._questions:
                self._questions[number][0].discard(one)
                if not self._questions[number][0]:  # nobody may ask: requests end
                    del self._questions[number]

    def answered(self, number: int) -> bool:
        """See `TierIndex.answered`."""
        with self._lock:
            waiting, deadline = self._questions.get(number, (set[Shelved](), 0.0))
            if waiting and (now := self._clock()) < deadline:
                return False
            self._questions.pop(number, None)
        for one in waiting:
            one.failed("it does not answer", now)
        return True

    # Loads

    def load(
        self, number: int, pages: Sequence[Sequence[Piece]], patience: float = 0.0, stores: Sequence[str] = ()
    ) -> None:
        """Begin to fill the pieces of pages, the first pages first; `ended` names the load when that has ended.

        It is late after 1.5 times its price, but not before `patience` seconds. `stores`: of each page, where another
        shelf has found it, which has asked the distant ones.
        """
        if self._promised:
            self._promised.popleft()
        batches: dict[Shelved, list[tuple[int, Piece]]] = {}
        load = Load(pages, [len(pieces) for pieces in pages], 0.0, failed=len(pages))
        for place, pieces in enumerate(pages):
            if not pieces:  # other ranks have some
                continue
            one = self.find(pieces[0].names) or (self._distant(stores[place]) if stores else None)
            if one is None:
                load.failed = place
                self.stores[0].count(missed_tokens=sum(piece.tokens for piece in pieces))
                break
            batches.setdefault(one, []).extend((place, piece) for piece in pieces)
        counts = {one: sum(size_in(one, piece) for _, piece in wanted) for one, wanted in batches.items()}
        least = LEAST_PATIENCE if all(one.price.is_known for one in counts) else FIRST_PATIENCE
        load.deadline = self._clock() + max(PATIENCE * self._seconds(counts), least, patience)
        load.counts = counts
        with self._lock:
            self._loads[number] = load
        for one, count in counts.items():
            with one.lock:
                one.reading_bytes += count
        cut = {
            one: cut_batches(entries, PROMPT_BATCHES * self._batch if self._is_prompt(one) else self._batch, size_of)
            for one, entries in batches.items()
        }
        load.unanswered = sum(len(found) for one, found in cut.items() if not self._is_prompt(one))
        for one, found in cut.items():
            for batch in found:
                arrival = Arrival(one, load, batch)
                if self._is_prompt(one):
                    self._lend(arrival)
                    self._queued.append(arrival)
                    self._copy_queued()  # the first are copied while the others are looked for
                else:
                    one.reading.submit(partial(self._read, arrival), arrival.size)

    def _read(self, arrival: Arrival) -> None:
        """Get pages from a store, check them, and have them copied to where they belong. Called by its thread."""
        if not arrival.load.has_ended:
            (self._get if arrival.one.direct is None else self._lend)(arrival)
            self._copy(arrival)
        if self._memory.is_prompt:  # the engine's thread sees when the copies are done: they wait for its steps
            self._answered(arrival)
            self._arrivals.append(arrival)
        else:
            self._arrived(arrival)
            self._answered(arrival)

    def _answered(self, arrival: Arrival) -> None:
        """A store has done what it was asked for a load, which is not late any more if all have."""
        with self._lock:
            arrival.load.unanswered -= 1

    def _get(self, arrival: Arrival) -> None:
        arrival.began = self._clock()
        pieces = arrival.pieces
        try:
            buffers = [self._memory.buffer(piece) for piece in pieces]
            came = arrival.one.store.get([piece.name for piece in pieces], buffers)
            if len(came) != len(pieces):
                raise ValueError(f"it was asked for {len(pieces)} pages and answers for {len(came)}")
            arrival.places = [[buffer] if is_there else None for buffer, is_there in zip(buffers, came, strict=True)]
            arrival.one.breaker.worked(arrival.began)
        except Exception as error:  # a store may raise anything
            arrival.one.failed(error, arrival.began)

    def _is_prompt(self, one: Shelved) -> bool:
        """True if the engine's thread itself has pages copied from a store."""
        return self._memory.is_prompt and one.direct is not None

    def _lend(self, arrival: Arrival) -> None:
        """Finds pages in this process's memory, which stay there until they are given back."""
        assert arrival.one.direct is not None
        arrival.began = self._clock()
        names = [piece.name for piece in arrival.pieces]
        arrival.lent = arrival.one.direct.lend(names, [len(piece.at) for piece in arrival.pieces])
        arrival.places = [None if place is None else place.parts for place in arrival.lent]

    def _copy_queued(self) -> None:
        """Begins copies, unless enough are on their way. Pieces of loads that have ended are given back."""
        while self._queued:
            is_over = self._queued[0].load.has_ended
            if not is_over and sum(arrival.size for arrival in [*self._arrivals]) >= PROMPT_BYTES:
                break
            arrival = self._queued.popleft()
            arrival.began = self._clock()
            self._copy(arrival)
            (self._arrived if is_over else self._arrivals.append)(arrival)

    def _copy(self, arrival: Arrival) -> None:
        """Begin to copy the pages whose headers are right."""
        arrival.got = self._clock()
        pieces = arrival.pieces
        for at, (piece, place) in enumerate(zip(pieces, arrival.places, strict=False)):
            total = None if place is None else sum_of(place[0], piece.name, len(piece.at) - HEADER_BYTES)
            if total is not None:
                arrival.expected[at] = total
        wanted = [*arrival.expected]
        try:
            with arrival.load.gate:
                if wanted and not arrival.load.has_ended:
                    places = [arrival.places[at] or [] for at in wanted]
                    arrival.copies = self._memory.write([pieces[at] for at in wanted], places)
        except Exception as error:  # the device may raise anything
            logger.warning("pages of the KV cache cannot be copied to the device: %s", error)

    def _arrived(self, arrival: Arrival) -> None:
        """Check pages that were copied, and count them."""
        one, load = arrival.one, arrival.load
        came = [False] * len(arrival.pieces)
        if arrival.places or arrival.began:
            came = self._sorted_out(arrival)
            now = self._clock()
            took = now - arrival.began if arrival.copied is None else arrival.got - arrival.began + arrival.copied
            size = sum(len(piece.at) for piece, is_good in zip(arrival.pieces, came, strict=True) if is_good)
            if size:
                one.price.learn(size, took, now)
            one.count(read_seconds=took, read_bytes=size)
        with one.lock:
            one.reading_bytes -= arrival.size
        with self._lock:
            load.counts[one] -= arrival.size
            for (place, _), good in zip(arrival.batch, arrival.by_piece(came), strict=True):
                if all(good):
                    load.missing[place] -= 1
                else:
                    load.failed = min(load.failed, place)

    def _sorted_out(self, arrival: Arrival) -> list[bool]:
        """Returns which pages have come whole and right; those of a lower store are put into the others."""
        one, pieces = arrival.one, arrival.pieces
        places = [*arrival.places, *[None] * (len(pieces) - len(arrival.places))]
        right: list[bool | None] = [None if at in arrival.expected else False for at in range(len(pieces))]
        sums: list[list[int]] = [[] for _ in pieces]
        try:
            if arrival.copies is not None:
                for (at, total), found in zip(arrival.expected.items(), arrival.copies.sums(), strict=True):
                    right[at], sums[at] = total == total_of(found), found
                arrival.copied = arrival.copies.seconds()
        except Exception as error:  # the device may raise anything
            logger.warning("pages of the KV cache cannot be copied to the device: %s", error)
        lower = self._keepers[: self._keepers.index(one)] if one.keeps else []
        if lower and not arrival.load.has_ended:  # what was used from afar is kept nearby
            by_piece = zip(arrival.by_piece(places), arrival.by_piece(sums), arrival.by_piece(right), strict=True)
            brought = [
                Brought(piece, [parts or [] for parts in own], [*chain.from_iterable(found)], bool(arrival.lent))
                for (_, piece), (own, found, good) in zip(arrival.batch, by_piece, strict=True)
                if all(good)
            ]
            for above in lower:
                self._put(above, brought)
        if one.direct is not None:
            one.direct.give_back([place for place in arrival.lent if place is not None])
        for piece, parts, is_right in zip(pieces, places, right, strict=True):
            if not one.store.is_local:
                (one.known.discard if parts is None else one.known.add)(piece.name)
            if is_right is False and parts is not None:
                one.spoil(piece.name, self._clock())
        if arrival.places and not arrival.load.has_ended:
            self._forget_parts(arrival, places)
        hits = sum(piece.tokens for piece, is_right in zip(pieces, right, strict=True) if is_right)
        one.count(hit_tokens=hits, missed_tokens=sum(piece.tokens for piece in pieces) - hits)
        return [bool(is_right) for is_right in right]

    def _end_arrivals(self) -> None:
        """Check what the engine's thread has had copied, as far as the copies are done."""
        while self._arrivals and (self._arrivals[0].copies is None or self._arrivals[0].copies.is_done()):
            self._arrived(self._arrivals.popleft())
        self._copy_queued()

    def _forget_parts(self, arrival: Arrival, places: Sequence[Parts | None]) -> None:
        """Let pages of which a store lacks pieces be saved again: it forgets the piece by which they are found."""
        one = arrival.one
        parted = zip(arrival.batch, arrival.by_piece(places), strict=True)
        lacking = {place for (place, _), parts in parted if None in parts}
        for place in lacking:
            first = one.name_of(arrival.load.pages[place][0].names)
            one.known.discard(first)
            try:
                one.store.drop([first])
            except Exception as error:  # a store may raise anything
                one.failed(error, self._clock())

    def ended(self) -> list[tuple[int, int]]:
        """The loads that have ended since the last call: (number, how many of its leading pages have come)."""
        self._end_arrivals()
        now, found = self._clock(), []
        with self._lock:
            for number, load in [*self._loads.items()]:
                came = load.came
                is_late = now >= load.deadline and load.unanswered > 0
                if came < load.failed and not is_late:
                    continue
                load.end()
                del self._loads[number]
                found.append((number, came))
                if came < load.failed:
                    self._late(load, came, now)
        self._copy_queued()
        return found

    def _late(self, load: Load, came: int, now: float) -> None:
        """A load has missed its deadline: the price rises, and a store of which nothing came has failed."""
        tokens = sum(piece.tokens for pieces in load.pages[came : load.failed] for piece in pieces)
        for one, count in load.counts.items():
            if not count or self._is_prompt(one):  # it has answered, or has what the engine's thread has not copied
                continue
            one.price.learn(count, 2 * one.price.seconds(count, 0, now), now)
            one.count(late_tokens=tokens)
            if not came:
                one.failed("it is late", now)

    def abandon(self) -> None:
        """Give up all loads: nobody uses what arrives."""
        with self._lock:
            for load in self._loads.values():
                load.end()
            self._loads.clear()
        self._promised.clear()
        self._copy_queued()

    # Saves

    def save(self, pieces: Sequence[Piece]) -> None:
        """Put packed pages into each store that lacks them."""
        self._end_arrivals()
        is_prompt = self._memory.is_prompt
        most = PROMPT_BATCHES * self._batch if is_prompt else self._batch
        for batch in cut_batches(pieces, most, lambda piece: len(piece.at)):
            size = sum(len(piece.at) for piece in batch)
            with self._lock:
                self._sealing_bytes += size
                self._saving.update(piece.name for piece in batch)
            begun = [self._begin(batch)] if is_prompt and self._is_direct else []
            self._sealing.submit(partial(self._seal, batch, begun), size)

    def _seal(self, pieces: Sequence[Piece], begun: Sequence[Sealing | None]) -> None:
        """Have packed pages in the host's memory, with their headers, and in the stores.

        `begun`: the one thing that the engine's thread has begun for that, if it did.
        """
        [sealing] = begun or [self._begin(pieces)]
        if sealing is not None:
            try:
                self._end(sealing, sealing.copies.sums())
            except Exception as error:  # the device may raise anything
                self._give_up(sealing.reserved, error)
        self._memory.forget(pieces)
        with self._lock:
            self._sealing_bytes -= sum(len(piece.at) for piece in pieces)
            self._saving -= Counter(piece.name for piece in pieces)

    def _give_up(self, reserved: Mapping[int, Reserved], error: Exception) -> None:
        logger.warning("pages of the KV cache are not saved: %s", error)
        for _, store, place in reserved.values():
            store.withdraw(place)

    def _lacks(self, one: Shelved, piece: Piece) -> bool:
        """True if a page should be put into a store."""
        now = self._clock()
        is_ours = piece.is_own or one.is_private
        return is_ours and one.breaker.is_on(now) and not one.has(piece.name, now)

    def _begin(self, pieces: Sequence[Piece]) -> Sealing | None:
        """Begin to copy packed pages that a store lacks: to the memory of a direct store, or to buffers."""
        reserved: dict[int, Reserved] = {}
        others = [one for one in self._keepers if one.direct is None]
        wanted = {
            at
            for at, piece in enumerate(pieces)
            if any(self._lacks(one, page) for one in others for page in one.pieces_of(piece))
        }
        for one in self._keepers:
            if (store := one.direct) is not None:
                for at, piece in enumerate(pieces):
                    if at not in reserved and self._lacks(one, piece):
                        place = store.reserve(piece.name, len(piece.at))
                        if place is None:
                            one.count(skipped_tokens=piece.tokens)
                        else:
                            reserved[at] = one, store, place
        chosen = sorted(wanted | reserved.keys())
        if not chosen:
            return None
        try:
            places = [reserved[at][2].parts if at in reserved else [self._memory.buffer(pieces[at])] for at in chosen]
            copies = self._memory.read([pieces[at] for at in chosen], places)
        except Exception as error:  # the device may raise anything
            self._give_up(reserved, error)
            return None
        return Sealing({at: pieces[at] for at in chosen}, places, reserved, copies, self._clock())

    def _end(self, sealing: Sealing, sums: Sequence[Sequence[int]]) -> None:
        """Pages are in the host's memory: write their headers, publish them, and put them into the other stores."""
        pieces, reserved = sealing.pieces, sealing.reserved
        for piece, place, found in zip(pieces.values(), sealing.places, sums, strict=True):
            place[0][:HEADER_BYTES] = header(piece.name, len(piece.at) - HEADER_BYTES, total_of(found))
        brought = [
            Brought(piece, [place], found, bool(reserved))
            for piece, place, found in zip(pieces.values(), sealing.places, sums, strict=True)
        ]
        for one in self._keepers:
            if one.direct is None:
                self._put(one, brought)
        took = sealing.copies.seconds()
        took = self._clock() - sealing.began if took is None else took
        counts: defaultdict[Shelved, list[int]] = defaultdict(lambda: [0, 0])
        for at, (one, store, place) in reserved.items():
            store.publish(place)
            counts[one][0] += pieces[at].tokens
            counts[one][1] += len(pieces[at].at)
        for one, (tokens, size) in counts.items():
            one.count(stored_tokens=tokens, written_bytes=size, written_seconds=took)

    def _put(self, one: Shelved, brought: Sequence[Brought]) -> None:
        """Queue pages for a store, as far as it lacks them and there is room."""
        lacking = [
            (of, page, number)
            for of in brought
            for number, page in enumerate(one.pieces_of(of.piece))
            if self._lacks(one, page)
        ]
        for batch in cut_batches(lacking, self._batch, lambda entry: len(entry[1].at)):
            size = sum(len(page.at) for _, page, _ in batch)
            with one.lock:
                is_full = one.writing_bytes + size > MOST_WRITING
                one.writing_bytes += 0 if is_full else size
            if is_full:
                one.count(skipped_tokens=sum(page.tokens for _, page, _ in batch))
            else:
                whole = [(page, of.page(page, number)) for of, page, number in batch]
                with self._lock:
                    self._saving.update(page.name for page, _ in whole)
                one.writing.submit(partial(self._write, one, whole, size), size)

    def _write(self, one: Shelved, batch: Sequence[tuple[Piece, memoryview]], size: int) -> None:
        began = self._clock()
        kept = [False] * len(batch)
        if one.breaker.is_on(began):
            try:
                kept = one.store.put([piece.name for piece, _ in batch], [page for _, page in batch])
                if len(kept) != len(batch):
                    raise ValueError(f"it was given {len(batch)} pages and answers for {len(kept)}")
                one.breaker.worked(began)
            except Exception as error:  # a store may raise anything
                one.failed(error, began)
                kept = [False] * len(batch)
        for (piece, page), is_kept in zip(batch, kept, strict=True):
            if is_kept:
                one.known.add(piece.name)
                one.spoiled.discard(piece.name)
                one.count(stored_tokens=piece.tokens)
                one.count(written_bytes=len(page))
            else:
                one.count(skipped_tokens=piece.tokens)
        one.count(written_seconds=self._clock() - began)
        with self._lock:
            self._saving -= Counter(piece.name for piece, _ in batch)
        with one.lock:
            one.writing_bytes -= size

    def is_saving(self, names: PageName) -> bool:
        """True if a piece is on its way to a store."""
        with self._lock:
            return names.whole in self._saving or names.head in self._saving

    @property
    def is_quiet(self) -> bool:
        """True if nothing is on its way to a store."""
        return not self._sealing_bytes and not any(one.writing_bytes for one in self.stores)

    def size_of(self, name: str) -> int:
        """Returns the bytes that a store holds at most; 0: it does not say."""
        return next((getattr(one.store, "size", 0) for one in self.stores if one.name == name), 0)

    def figures(self) -> dict[str, StoreFigures]:
        """The figures of each store."""
        now = self._clock()
        return {one.name: one.figures_at(now) for one in self.stores}

    def close(self) -> None:
        """End all threads, when they have done what is queued, and then the stores.

        The main thread, which may be about to end the process, waits a while for those that a device may hold: the
        interpreter must not end within a call of CUDA.
        """
        self._sealing.end_with(self._close)
        if self._memory.is_prompt and threading.current_thread() is threading.main_thread():
            for lane in (self._sealing, *(one.reading for one in self.stores)):
                lane.join(ENDING_SECONDS)

    def _close(self) -> None:
        for one in self.stores:
            one.reading.end_with(None)
            one.writing.end_with(one.close)
