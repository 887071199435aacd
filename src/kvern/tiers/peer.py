"""The host memory of a server's other engines on this machine, which this engine reads while they write to it.

Nobody locks anything. A thread follows the logs of the others' arenas (`tiers/arena_layout.py`), and who does not find
a page follows them to their ends, so the engine knows which pages they have. The entries of a page are checked when it
is lent, its header after that, and its sum when it has been copied: a page that made room for another meanwhile is a
miss. It does not matter whether the other engine still runs.
"""

import mmap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from kvern.tiers.arena import map_part, siblings
from kvern.tiers.arena_layout import ENTRY_BYTES, Entry, Layout, gather, runs

PEER = "peer"
"""The option of this store."""
UNPIN_SECONDS = 5.0
"""Seconds for which the memory of an engine that is gone stays pinned: somebody may copy from it."""
FOLLOW_SECONDS = 0.02
"""The interval at which it is looked for engines and logs are followed: little is left when a page is asked for."""
MOST_FOLLOWED = 256
"""Pages that are noted while the store is locked."""


class _Lent(NamedTuple):
    """The memory of one page."""

    parts: list[memoryview]


class RemoteArena:
    """The arena of another engine. If `pinned`, its first cells may be used as far as they are: a GPU reads them."""

    def __init__(self, memory: mmap.mmap, layout: Layout, pinned: bool) -> None:
        self._memory = memory
        self._view = memoryview(memory)
        self._layout = layout
        self._run = layout.cells
        self._usable = 0 if pinned else layout.cells
        self._seen = 0
        """Pages of the log that are noted."""
        self._cells: dict[bytes, int] = {}
        """The first cell of each page, by its name."""
        self._names: dict[int, bytes] = {}

    def parts(self, most: int) -> Iterator[memoryview]:
        """See `HostStore`."""
        self._run = max(1, most // self._layout.cell)
        for first in range(0, self._layout.cells, self._run):
            count = min(self._run, self._layout.cells - first)
            yield self._layout.part(self._view, first, count * self._layout.cell)

    def extend(self, part: memoryview) -> None:
        """See `HostStore`."""
        self._usable += len(part) // self._layout.cell

    def may_grow(self, size: int) -> bool:
        """The memory is there already."""
        return True

    def cut(self) -> None:
        """No more parts will be used than now."""

    @property
    def is_current(self) -> bool:
        """It is still divided as it was when it was opened."""
        return self._memory[: len(self._layout.head)] == self._layout.head

    def follow(self) -> bool:
        """Note pages that were published; returns whether there are more.

        Of what a log has overwritten the pages have mostly been evicted, too.
        """
        published = self._layout.published(self._memory)
        if published == self._seen:
            return False
        first = max(self._seen, published - self._layout.cells)
        last = min(published, first + MOST_FOLLOWED)
        for number in range(first, last):
            cell = self._layout.logged(self._memory, number)
            entry = self._entry(cell)
            if entry is not None and entry.number == 0:
                before = self._names.get(cell, b"")
                if self._cells.get(before) == cell:
                    del self._cells[before]
                self._cells[entry.name] = cell
                self._names[cell] = entry.name
        self._seen = last
        return last < published

    def has(self, name: bytes) -> bool:
        """True if a page is there now."""
        cell = self._cells.get(name)
        if cell is None:
            return False
        start = self._layout.entry(cell)
        if self._memory[start : start + len(name)] == name:
            return cell < self._usable
        del self._cells[name]
        return False

    def lend(self, name: bytes, length: int) -> _Lent | None:
        """Finds the memory of a page; None: it is not there, or has another length."""
        cell = self._cells.get(name)
        generation: int | None = None
        left, number = length, 0
        parts: list[memoryview] = []
        while left > 0:
            entry = None if cell is None else self._entry(cell)
            if entry is None or (entry.name, entry.number, entry.length) != (name, number, length) or not entry.run:
                return None
            if generation not in (None, entry.generation):
                return None
            assert cell is not None
            if cell + entry.run > self._usable:
                return None
            for first, count in runs(range(cell, cell + entry.run), self._run):
                parts.append(self._layout.part(self._view, cell + first, min(left, count * self._layout.cell)))
                left -= count * self._layout.cell
            number += entry.run
            cell, generation = entry.following, entry.generation
        return _Lent(parts)

    def _entry(self, cell: int) -> Entry | None:
        if cell >= self._layout.cells:
            return None
        start = self._layout.entry(cell)
        entry = Entry.read(self._memory[start : start + ENTRY_BYTES])
        return None if entry is None or cell + entry.run > self._layout.cells else entry


class PeerStore:
    """A store that only reads. Any thread may call its methods.

    It is asked for the pages of rank `part` of `parts`. `memories`: numbers and paths of the others' memory. `pin` has
    memory pinned that a GPU reads, and returns what ends that; None: the processor reads it. `watch` begins to follow
    them.
    """

    is_local = True
    is_read_only = True

    def __init__(
        self,
        part: int,
        parts: int,
        pin: Callable[[RemoteArena], Callable[[], None]] | None = None,
        memories: Callable[[], dict[int, str] | None] = siblings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._part, self._parts = part, parts
        self._pin = pin
        self._memories = memories
        self._clock = clock
        self._arenas: dict[int, RemoteArena] = {}
        self._pinned: dict[int, Callable[[], None]] = {}
        self._unpins: list[tuple[float, Callable[[], None]]] = []
        """When the memory of arenas that were dropped is no longer pinned, and what ends that."""
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def watch(self) -> None:
        """Follows the others from now on, in a thread, until `close`."""
        threading.Thread(target=self._watch, name="kvern-peers", daemon=True).start()

    def _watch(self) -> None:
        while not self._closed.wait(FOLLOW_SECONDS):
            self.follow()

    def follow(self) -> None:
        """Sees which engines and pages there are now."""
        self.look()
        while self._follow():
            pass

    def look(self) -> None:
        """Open the arenas of engines that have come, and close those of engines that are gone."""
        with self._lock:
            self._look()

    def _look(self) -> None:
        now, found = self._clock(), self._memories()
        while self._unpins and now >= self._unpins[0][0]:
            self._unpins.pop(0)[1]()
        if found is None:
            return
        kept = {number: arena for number, arena in self._arenas.items() if number in found and arena.is_current}
        dropped = self._pinned.keys() - kept.keys()
        self._unpins += [(now + UNPIN_SECONDS, self._pinned.pop(number)) for number in dropped]
        for number in found.keys() - kept.keys():
            memory = map_part(found[number], self._part, self._parts, writable=self._pin is not None)
            layout = None if memory is None else Layout.read(memory)
            if memory is not None and layout is not None:
                kept[number] = RemoteArena(memory, layout, self._pin is not None)
                if self._pin is not None:
                    self._pinned[number] = self._pin(kept[number])
        self._arenas = kept

    def _follow(self) -> bool:
        """Note some of what was published; returns whether there is more."""
        with self._lock:
            return sum(arena.follow() for arena in self._arenas.values()) > 0

    def has(self, names: Sequence[bytes]) -> list[bool]:
        found = self._has(names)
        if not all(found):
            self.follow()
            found = self._has(names)
        return found

    def _has(self, names: Sequence[bytes]) -> list[bool]:
        with self._lock:
            return [any(arena.has(name) for arena in self._arenas.values()) for name in names]

    def lend(self, names: Sequence[bytes], lengths: Sequence[int]) -> list[_Lent | None]:
        """See `DirectStore`. The memory may change, which the sum of the page tells."""
        with self._lock:
            return [self._lend(name, length) for name, length in zip(names, lengths, strict=True)]

    def _lend(self, name: bytes, length: int) -> _Lent | None:
        lent = (arena.lend(name, length) for arena in self._arenas.values() if arena.has(name))
        return next((one for one in lent if one is not None), None)

    def get(self, names: Sequence[bytes], places: Sequence[memoryview]) -> list[bool]:
        lent = self.lend(names, [len(place) for place in places])
        for one, place in zip(lent, places, strict=True):
            if one is not None:
                gather(one.parts, place)
        return [one is not None for one in lent]

    def put(self, names: Sequence[bytes], places: Sequence[memoryview]) -> list[bool]:
        return [False] * len(names)

    def drop(self, names: Sequence[bytes]) -> None:
        """Nothing: the memory is the other engine's."""

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            self._arenas = {}

    def give_back(self, places: Sequence[_Lent]) -> None:
        """See `DirectStore`."""

    def reserve(self, name: bytes, length: int) -> None:
        """See `DirectStore`: there is no room."""

    def publish(self, place: object) -> None:
        """See `DirectStore`."""

    def withdraw(self, place: object) -> None:
        """See `DirectStore`."""
