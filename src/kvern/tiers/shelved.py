"""One store of a shelf: what is known of it, its figures and its threads."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from msgspec.structs import replace

from kvern.request.store_figures import StoreFigures
from kvern.tiers.page_memory import PageName, Piece
from kvern.tiers.price import Breaker, Price
from kvern.tiers.rare_warnings import RareWarnings
from kvern.tiers.store import DirectStore, Store

logger = logging.getLogger("kvern")

LOCAL, DISTANT = (0.0005, 4e9), (0.005, 1e9)
"""Seconds and bytes a second that are expected of stores before they were used."""
READERS, WRITERS = 2, 1
"""Threads of a store."""
PATIENCE = 1.5
"""A load that takes longer than its price by this factor is late."""
FIRST_PATIENCE = 0.5
"""Seconds: nobody knows how long the first transfer of a store takes."""
MOST_KNOWN = 1 << 20
"""Names that are remembered of a store which is not local."""


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
        self._started: list[threading.Thread] = []

    def submit(self, call: Callable[[], None], size: int = 0) -> None:
        """Queues a call, which must not raise, and moves so many bytes: threads need not know, a simulation does."""
        if not self._started:
            self._started = [
                threading.Thread(target=self._run, name=self._name, daemon=True) for _ in range(self._threads)
            ]
            for thread in self._started:
                thread.start()
        self._calls.put(call)

    def end_with(self, call: Callable[[], None] | None) -> None:
        """Ends the threads when they have done what is queued, and then this; at once, if none has started.

        No thread is started: the interpreter may be about to end.
        """
        if call is not None and not self._started:
            call()
        elif call is not None:
            self._calls.put(call)
        for _ in range(self._threads):
            self._calls.put(None)

    def join(self, seconds: float) -> None:
        """Waits until the threads have ended, each for so long at most."""
        for thread in self._started:
            thread.join(seconds)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # or it would hold its pages until the next


MakeLane = Callable[[str, int], Lane]


class Shelved:
    """A store with what is known of it."""

    def __init__(self, name: str, store: Store, lane: MakeLane = Lane, *, by_heads: bool = False) -> None:
        """`by_heads`: no page has more than one head, whatever the store is."""
        self.name, self.store = name, store
        self.is_private = isinstance(store, DirectStore)
        """No other rank puts pages into it."""
        self.direct = store if isinstance(store, DirectStore) and not by_heads else None
        self.is_whole = not by_heads and (self.is_private or getattr(store, "has_whole_pages", False))
        """Its pages have all heads of a rank."""
        self.keeps = not getattr(store, "is_read_only", False)
        """Pages are put into the store."""
        self.price = Price(*(LOCAL if store.is_local else DISTANT))
        self.breaker = Breaker()
        self._warnings = RareWarnings(name)
        self.figures = StoreFigures()
        self.known = Names(MOST_KNOWN)
        """Names of what a distant store has, as far as it was asked or given."""
        self.spoiled = Names(MOST_KNOWN)
        """Pages that were not right; the store is not asked for them again."""
        self.reading, self.writing = lane(f"{name}-get", READERS), lane(f"{name}-put", WRITERS)
        self.reading_bytes = self.writing_bytes = 0
        self.answer_seconds = FIRST_PATIENCE / PATIENCE
        """The seconds that the store takes at most, of late, to say what it has."""
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

    def figures_at(self, now: float) -> StoreFigures:
        """Returns its figures, with its price and whether it may be asked at a time."""
        latency, bandwidth = self.price.figures
        evicted, is_on = getattr(self.store, "evicted", 0), self.breaker.is_on(now)
        return replace(self.figures, evicted_pages=evicted, latency_seconds=latency, bandwidth=bandwidth, is_on=is_on)

    def name_of(self, names: PageName) -> bytes:
        """The name by which the store knows a piece."""
        return names.whole if self.is_whole else names.head

    def pieces_of(self, piece: Piece) -> Sequence[Piece]:
        """The pages of the store that have a piece."""
        return (piece,) if self.is_whole else piece.heads or (piece,)

    def has(self, name: bytes, now: float) -> bool:
        """Returns whether the store probably has a page; in microseconds."""
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
            self._warnings.warn("off", f"it is off for {seconds:g} s, and for longer if it fails again: {error}")

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
