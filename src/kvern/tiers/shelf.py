"""The shelf: an engine's stores in their order, each with a price, a breaker and threads of its own.

    save --> sealed in a thread --> put into each store that lacks it
    load --> each page from the first store that has it, checked in its thread --> `ended`: the leading pages that came
             from a lower store --> put into those above it

A store may lie, raise, hang and be late. A page counts if its header and its sum are right. A load has a deadline,
after which what has come counts. Memory that a store was given to write to is never used again unless the call has
returned. The engine's thread calls the methods of `Shelf`, none of which waits for a store that is not local.
"""

import logging
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import NamedTuple

from msgspec.structs import replace

from kvern.request.store_figures import StoreFigures
from kvern.tiers.pages import is_right, seal
from kvern.tiers.price import GAIN, Breaker, Price
from kvern.tiers.store import Store

logger = logging.getLogger("kvern")

LOCAL, DISTANT = (0.0005, 4e9), (0.005, 1e9)
"""Seconds and bytes a second that are expected of stores before they were used."""
READERS, WRITERS = 2, 1
"""Threads of a store."""
BATCH_BYTES = 8 << 20
"""Bytes of a call of a store, or one page."""
MOST_WRITING = 256 << 20
"""Bytes on their way to a store; pages beyond are not saved."""
PATIENCE = 1.5
"""A load that takes longer than its price by this factor is late."""
LEAST_PATIENCE, FIRST_PATIENCE = 0.02, 0.5
"""Seconds: a thread may have to wait for a processor, and nobody knows how long the first transfer of a store takes."""
MOST_KNOWN = 1 << 20
"""Names that are remembered of a store which is not local."""


class Piece(NamedTuple):
    """One page as a store keeps it: its name, its bytes with space for a header, and the tokens that it counts for.

    A part of the KV cache may have several pages, such as one for each head: one of them counts the tokens.
    """

    name: bytes
    place: memoryview
    tokens: int = 0
    is_own: bool = True
    """False: another rank saves the same page to stores that ranks share."""


class Names:
    """The names used last, as many as `most`. Any thread may call its methods."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._names: OrderedDict[bytes, None] = OrderedDict()
        self._lock = threading.Lock()

    def __contains__(self, name: bytes) -> bool:
        return name in self._names

    def add(self, name: bytes) -> None:
        with self._lock:
            self._names[name] = None
            self._names.move_to_end(name)
            if len(self._names) > self._most:
                self._names.popitem(last=False)

    def discard(self, name: bytes) -> None:
        with self._lock:
            self._names.pop(name, None)


class Lane:
    """Daemon threads that carry out calls in order; they start with the first call."""

    def __init__(self, name: str, threads: int) -> None:
        self._name, self._threads = name, threads
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._started = False

    def submit(self, call: Callable[[], None]) -> None:
        """Queues a call, which must not raise."""
        if not self._started:
            self._started = True
            for _ in range(self._threads):
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
        self._calls.put(call)

    def close(self) -> None:
        """Ends the threads when they have done what is queued."""
        for _ in range(self._threads):
            self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # or it would hold its pages until the next


class Shelved:
    """A store with what is known of it."""

    def __init__(self, name: str, store: Store) -> None:
        self.name, self.store = name, store
        self.price = Price(*(LOCAL if store.is_local else DISTANT))
        self.breaker = Breaker()
        self.figures = StoreFigures()
        self.known = Names(MOST_KNOWN)
        """What a distant store has, as far as it was asked or given."""
        self.spoiled = Names(MOST_KNOWN)
        """Pages that were not right; the store is not asked for them again."""
        self.reading, self.writing = Lane(f"{name}-get", READERS), Lane(f"{name}-put", WRITERS)
        self.reading_bytes = self.writing_bytes = 0
        self.answer_seconds = FIRST_PATIENCE / PATIENCE
        """How long the store takes at most, of late, to say what it has."""
        self.lock = threading.Lock()

    def close(self) -> None:
        """Ends the store."""
        try:
            self.store.close()
        except Exception as error:  # a store may raise anything
            logger.warning("the store %s of the KV cache does not end well: %s", self.name, error)

    def count(self, **more: float) -> None:
        """Adds to figures, by name."""
        with self.lock:
            for name, number in more.items():
                setattr(self.figures, name, getattr(self.figures, name) + number)

    def has(self, name: bytes, now: float) -> bool:
        """Whether the store probably has a page; in microseconds."""
        if name in self.spoiled:
            return False
        if not self.store.is_local:
            return name in self.known
        try:
            return self.store.has([name]) == [True]
        except Exception as error:  # a store may raise anything
            self.failed(error, now)
            return False

    def failed(self, error: object, now: float) -> None:
        """Notes a call that raised, or that lied."""
        self.count(failures=1)
        if seconds := self.breaker.failed(now):
            logger.warning("the store %s of the KV cache is off for %g s: %s", self.name, seconds, error)

    def spoil(self, name: bytes, now: float) -> None:
        """A page was not right."""
        self.count(corrupt_pages=1)
        self.known.discard(name)
        self.spoiled.add(name)
        try:
            self.store.drop([name])
            self.spoiled.discard(name)
        except Exception as error:  # a store may raise anything
            self.failed(error, now)


@dataclass(eq=False)
class _Load:
    """Pages on their way: how many pieces of each have not come, and which will not come."""

    pages: Sequence[Sequence[Piece]]
    missing: list[int]
    deadline: float
    counts: dict[Shelved, int] = field(default_factory=dict)
    """The bytes that are asked of each store."""
    failed: int = 0
    """The first page that will not come, or the number of pages."""
    has_ended: bool = False

    @property
    def came(self) -> int:
        """The number of leading pages that have come."""
        return next((place for place, count in enumerate(self.missing) if count), len(self.missing))


class Shelf:
    """The stores of an engine, or of one of its ranks, by names for people: the nearest first."""

    def __init__(self, stores: Mapping[str, Store], clock: Callable[[], float] = time.monotonic) -> None:
        self.stores = [Shelved(name, store) for name, store in stores.items()]
        self._clock = clock
        self._sealing = Lane("pages", 1)
        self._sealing_bytes = 0
        self._loads: dict[int, _Load] = {}
        self._lock = threading.Lock()
        self._questions: dict[int, tuple[set[Shelved], float]] = {}
        self._numbers = 0

    @property
    def has_distant(self) -> bool:
        """True if there are stores that have to be asked."""
        return any(not shelved.store.is_local for shelved in self.stores)

    def find(self, name: bytes) -> Shelved | None:
        """The first store that probably has a page and may be asked for it."""
        now = self._clock()
        return next((one for one in self.stores if one.breaker.is_on(now) and one.has(name, now)), None)

    def wants(self, names: Iterable[bytes]) -> bool:
        """True if a store that may be asked lacks one of these pages."""
        now, wanted = self._clock(), [*names]
        return any(one.breaker.is_on(now) and not all(one.has(name, now) for name in wanted) for one in self.stores)

    def has_room(self, count: int) -> bool:
        """True if so many more bytes may be saved."""
        now = self._clock()
        least = min((one.writing_bytes for one in self.stores if one.breaker.is_on(now)), default=MOST_WRITING)
        return least + self._sealing_bytes + count <= MOST_WRITING

    def skipped(self, tokens: int) -> None:
        """Counts tokens that are not saved."""
        self.stores[0].count(skipped_tokens=tokens)

    def refused(self, tokens: int) -> None:
        """Counts tokens that are computed because that is faster."""
        self.stores[0].count(refused_tokens=tokens)

    def seconds(self, names: Iterable[bytes], size: int) -> float:
        """Returns the predicted seconds of a load of these pages, of `size` bytes each."""
        counts: defaultdict[Shelved, int] = defaultdict(int)
        for name in names:
            found = self.find(name)
            if found is not None:
                counts[found] += size
        return self._seconds(counts)

    def _seconds(self, counts: Mapping[Shelved, int]) -> float:
        now = self._clock()
        return sum(one.price.seconds(count, one.reading_bytes, now) for one, count in counts.items())

    # Distant stores

    def ask(self, names: Sequence[bytes]) -> int | None:
        """Ask the distant stores for pages; see `TierIndex.ask`."""
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
            one.reading.submit(lambda one=one: self._ask(one, number, names))  # type: ignore[misc]
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

    def load(self, number: int, pages: Sequence[Sequence[Piece]]) -> None:
        """Begin to fill the pieces of pages, the first pages first; `ended` names the load when that has ended."""
        batches: dict[Shelved, list[tuple[int, Piece]]] = {}
        load = _Load(pages, [len(pieces) for pieces in pages], 0.0, failed=len(pages))
        for place, pieces in enumerate(pages):
            one = self.find(pieces[0].name)
            if one is None:
                load.failed = place
                self.stores[0].count(missed_tokens=sum(piece.tokens for piece in pieces))
                break
            batches.setdefault(one, []).extend((place, piece) for piece in pieces)
        counts = {one: sum(len(piece.place) for _, piece in wanted) for one, wanted in batches.items()}
        least = LEAST_PATIENCE if all(one.price.is_known for one in counts) else FIRST_PATIENCE
        load.deadline = self._clock() + max(PATIENCE * self._seconds(counts), least)
        load.counts = counts
        with self._lock:
            self._loads[number] = load
        for one, wanted in batches.items():
            with one.lock:
                one.reading_bytes += counts[one]
            for batch in _cut(wanted):
                one.reading.submit(lambda one=one, batch=batch: self._read(one, load, batch))  # type: ignore[misc]

    def _read(self, one: Shelved, load: _Load, batch: Sequence[tuple[int, Piece]]) -> None:
        """Get pieces from a store, and check them."""
        size = sum(len(piece.place) for _, piece in batch)
        came = [False] * len(batch)
        if not load.has_ended:
            began = self._clock()
            try:
                came = one.store.get([piece.name for _, piece in batch], [piece.place for _, piece in batch])
                if len(came) != len(batch):
                    raise ValueError(f"it was asked for {len(batch)} pages and answers for {len(came)}")
                one.breaker.worked(began)
            except Exception as error:  # a store may raise anything
                one.failed(error, began)
                came = [False] * len(batch)
            came = [self._check(one, piece, is_there) for (_, piece), is_there in zip(batch, came, strict=True)]
            now = self._clock()
            one.price.learn(size, now - began, now)
            one.count(read_seconds=now - began)
            one.count(read_bytes=sum(len(piece.place) for (_, piece), good in zip(batch, came, strict=True) if good))
        with one.lock:
            one.reading_bytes -= size
        with self._lock:
            for (place, _), good in zip(batch, came, strict=True):
                if good:
                    load.missing[place] -= 1
                else:
                    load.failed = min(load.failed, place)
        lower = self.stores[: self.stores.index(one)]
        if lower and not load.has_ended:  # what was used from afar is kept nearby
            right = [piece for (_, piece), good in zip(batch, came, strict=True) if good]
            for above in lower:
                self._put(above, right)

    def _check(self, one: Shelved, piece: Piece, is_there: bool) -> bool:
        if is_there and is_right(piece.place, piece.name):
            one.known.add(piece.name)
            one.count(hit_tokens=piece.tokens)
            return True
        one.count(missed_tokens=piece.tokens)
        if is_there:
            one.spoil(piece.name, self._clock())
        else:
            one.known.discard(piece.name)
        return False

    def ended(self) -> list[tuple[int, int]]:
        """The loads that have ended since the last call: (number, how many of its leading pages have come)."""
        now, found = self._clock(), []
        with self._lock:
            for number, load in [*self._loads.items()]:
                came = load.came
                is_late = now >= load.deadline
                if came < load.failed and not is_late:
                    continue
                load.has_ended = True
                del self._loads[number]
                found.append((number, came))
                if came < load.failed:
                    self._late(load, came, now)
        return found

    def _late(self, load: _Load, came: int, now: float) -> None:
        """A load has missed its deadline: the price rises, and a store of which nothing came has failed."""
        tokens = sum(piece.tokens for pieces in load.pages[came : load.failed] for piece in pieces)
        for one, count in load.counts.items():
            one.price.learn(count, 2 * one.price.seconds(count, 0, now), now)
            one.count(late_tokens=tokens)
            if not came:
                one.failed("it is late", now)

    def abandon(self) -> None:
        """Give up all loads: nobody uses what arrives."""
        with self._lock:
            for load in self._loads.values():
                load.has_ended = True
            self._loads.clear()

    # Saves

    def save(self, pieces: Sequence[Piece]) -> None:
        """Put pages into each store that lacks them; their payloads are in their places, and are never changed."""
        size = sum(len(piece.place) for piece in pieces)
        with self._lock:
            self._sealing_bytes += size

        def seal_all() -> None:
            for piece in pieces:
                seal(piece.place, piece.name)
            for one in self.stores:
                self._put(one, pieces)
            with self._lock:
                self._sealing_bytes -= size

        self._sealing.submit(seal_all)

    def _put(self, one: Shelved, pieces: Sequence[Piece]) -> None:
        """Queue pages for a store, as far as it lacks them and there is room."""
        now = self._clock()
        if not one.breaker.is_on(now):
            return
        is_shared = not getattr(one.store, "is_private", False)
        lacking = [piece for piece in pieces if not ((is_shared and not piece.is_own) or one.has(piece.name, now))]
        for batch in _cut([(0, piece) for piece in lacking]):
            size = sum(len(piece.place) for _, piece in batch)
            with one.lock:
                is_full = one.writing_bytes + size > MOST_WRITING
                one.writing_bytes += 0 if is_full else size
            if is_full:
                one.count(skipped_tokens=sum(piece.tokens for _, piece in batch))
            else:
                one.writing.submit(lambda batch=batch, size=size: self._write(one, batch, size))  # type: ignore[misc]

    def _write(self, one: Shelved, batch: Sequence[tuple[int, Piece]], size: int) -> None:
        began = self._clock()
        kept = [False] * len(batch)
        if one.breaker.is_on(began):
            try:
                kept = one.store.put([piece.name for _, piece in batch], [piece.place for _, piece in batch])
                if len(kept) != len(batch):
                    raise ValueError(f"it was given {len(batch)} pages and answers for {len(kept)}")
                one.breaker.worked(began)
            except Exception as error:  # a store may raise anything
                one.failed(error, began)
                kept = [False] * len(batch)
        for (_, piece), is_kept in zip(batch, kept, strict=True):
            if is_kept:
                one.known.add(piece.name)
                one.spoiled.discard(piece.name)
                one.count(stored_tokens=piece.tokens)
                one.count(written_bytes=len(piece.place))
            else:
                one.count(skipped_tokens=piece.tokens)
        one.count(written_seconds=self._clock() - began)
        with one.lock:
            one.writing_bytes -= size

    @property
    def is_quiet(self) -> bool:
        """True if nothing is on its way to a store."""
        return not self._sealing_bytes and not any(one.writing_bytes for one in self.stores)

    def figures(self) -> dict[str, StoreFigures]:
        """The figures of each store."""
        now = self._clock()
        found = {}
        for one in self.stores:
            latency, bandwidth = one.price.figures
            evicted = getattr(one.store, "evicted", 0)
            found[one.name] = replace(
                one.figures,
                evicted_pages=evicted,
                latency_seconds=latency,
                bandwidth=bandwidth,
                is_on=one.breaker.is_on(now),
            )
        return found

    def close(self) -> None:
        """End all threads, when they have done what is queued, and then the stores."""
        self._sealing.submit(self._close)
        self._sealing.close()

    def _close(self) -> None:
        for one in self.stores:
            one.reading.close()
            one.writing.submit(one.close)
            one.writing.close()


def _cut(pieces: Sequence[tuple[int, Piece]]) -> list[list[tuple[int, Piece]]]:
    """Cuts pieces into batches for calls of a store."""
    batches: list[list[tuple[int, Piece]]] = []
    size = BATCH_BYTES + 1
    for place, piece in pieces:
        size += len(piece.place)
        if size > BATCH_BYTES:
            batches.append([])
            size = len(piece.place)
        batches[-1].append((place, piece))
    return batches
