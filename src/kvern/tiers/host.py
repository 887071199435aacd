"""Pages in host memory: an arena whose memory another process may own, so that it outlives the engine.

`tiers/arena_layout.py` says what is where in it. Least recently used pages make room for others.
"""

import mmap
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvern.tiers.arena_layout import ENTRY_BYTES, LARGEST_PAGE, Entry, Layout, gather, runs
from kvern.tiers.store import Identity, read_bytes

LARGEST_CELL, SMALLEST_CELL = 64 << 10, 1 << 10
LEAST_CELLS = 256
"""Cells become smaller in a small arena, so that it has as many."""


@dataclass(eq=False)
class _Page:
    """The cells of a page, in order, its bytes, and how many threads copy from it."""

    cells: list[int]
    length: int
    readers: int = 0


class _Place(NamedTuple):
    """The memory of one page in the arena."""

    name: bytes
    page: _Page
    parts: list[memoryview]


class HostStore:
    """A store in the host's memory of at most `size` bytes. Any thread may call its methods."""

    is_local = True

    def __init__(self, size: int, memory: "mmap.mmap | None" = None, cell: int | None = None) -> None:
        """`memory`: an arena of so many bytes that may have pages already; None: of this process alone.

        `cell`: the bytes of a cell, a multiple of those of a page of the processor's memory; cells are used then once
        `extend` has been told of them. None: by `size`. Raises ConfigError for a size that holds nothing.
        """
        align = 1 if cell is None else mmap.PAGESIZE
        self._layout = layout = Layout.of(size, cell_for(size) if cell is None else cell, align)
        self.size = size
        self.evicted = 0
        """Pages that made room for others."""
        self._cell, self._count = layout.cell, layout.cells
        cells = layout.cells
        self._run = cells
        """The cells of one of `parts`, beyond which one copy may not reach."""
        self._memory = memory if memory is not None else mmap.mmap(-1, size)
        self._bytes = np.frombuffer(self._memory, np.uint8)
        self._view = memoryview(self._memory)
        self._pages: OrderedDict[bytes, _Page] = OrderedDict()
        self._lock = threading.Lock()
        self._generation = 0
        self._free: list[int] = []
        self._used = bytearray(cells)
        """1 for a cell that has a part of a page."""
        self._usable = 0
        self._limit = cells
        """The numbers of cells, the first ones, that may be used now and at last."""
        self._withheld = 0
        """The number of free cells that stay so, because they have no memory and shall not take any."""
        if self._memory[: len(layout.head)] == layout.head:
            self._scan()
        else:
            self._memory[: layout.first] = bytes(layout.first)
            self._memory[: len(layout.head)] = layout.head
        if align == 1:
            self._extend(cells)

    def parts(self, most: int) -> Iterator[memoryview]:
        """The memory of all cells in order, in pieces of whole cells of at most `most` bytes, aligned as cells are."""
        self._run = max(1, most // self._cell)
        for first in range(0, self._count, self._run):
            yield self._part(first, min(self._run, self._count - first) * self._cell)

    def extend(self, part: memoryview) -> None:
        """The next of `parts` may be used, with the pages that it has."""
        self._extend(len(part) // self._cell)

    def _extend(self, cells: int) -> None:
        with self._lock:
            first = self._usable
            self._usable += cells
            self._free[:0] = [cell for cell in range(self._usable - 1, first - 1, -1) if not self._used[cell]]

    def may_grow(self, size: int) -> bool:
        """It is as large as the user said."""
        return True

    def cut(self) -> None:
        """No more parts will be used than now."""
        with self._lock:
            self._limit = self._usable
            for name in [name for name, page in self._pages.items() if not self._is_usable(page)]:
                self._remove(name)

    def _is_usable(self, page: _Page) -> bool:
        return self._usable == self._count or max(page.cells) < self._usable

    @property
    def pages(self) -> int:
        """The number of pages that are kept."""
        return len(self._pages)

    def has(self, names: Sequence[bytes]) -> list[bool]:
        found = map(self._pages.get, names)
        return [page is not None and self._is_usable(page) for page in found]

    def get(self, names: Sequence[bytes], places: Sequence[memoryview]) -> list[bool]:
        return [self._get(name, place) for name, place in zip(names, places, strict=True)]

    def put(self, names: Sequence[bytes], places: Sequence[memoryview]) -> list[bool]:
        return [self._put(name, place) for name, place in zip(names, places, strict=True)]

    def lend(self, names: Sequence[bytes], lengths: Sequence[int]) -> list[_Place | None]:
        """See `DirectStore`."""
        found: list[_Place | None] = []
        with self._lock:
            for name, length in zip(names, lengths, strict=True):
                page = self._pages.get(name)
                if page is None or page.length != length or not self._is_usable(page):
                    found.append(None)
                    continue
                page.readers += 1
                self._pages.move_to_end(name)
                found.append(self._place(name, page))
        return found

    def give_back(self, places: Sequence[_Place]) -> None:
        """See `DirectStore`."""
        with self._lock:
            for place in places:
                place.page.readers -= 1

    def reserve(self, name: bytes, length: int) -> _Place | None:
        """See `DirectStore`."""
        needed = -(-length // self._cell)
        with self._lock:
            if name in self._pages:
                self._pages.move_to_end(name)
                return None
            if needed > self._limit - self._withheld or not 0 < length <= LARGEST_PAGE:
                return None
            while len(self._free) - self._withheld < needed:
                if self._usable < self._limit:  # there will be more cells: nothing is evicted for them
                    return None
                unused = next((other for other, page in self._pages.items() if not page.readers), None)
                if unused is None:
                    return None
                self._remove(unused)
                self.evicted += 1
            cells = [self._free.pop() for _ in range(needed)]
            for cell in cells:
                self._used[cell] = 1
            return self._place(name, _Page(cells, length))

    def publish(self, place: _Place) -> None:
        """See `DirectStore`."""
        page = place.page
        with self._lock:
            self._generation += 1
            generation = self._generation
        for first, count in runs(page.cells, self._count):
            end = first + count
            following = page.cells[end] if end < len(page.cells) else 0
            for index in range(first, end):
                entry = Entry(place.name, generation, index, end - index, following, page.length)
                self._write_entry(page.cells[index], entry.bytes)
        with self._lock:
            if place.name in self._pages:  # another thread was faster
                self._release(page.cells)
            else:
                self._pages[place.name] = page
                self._layout.log(self._memory, page.cells[0])

    def withdraw(self, place: _Place) -> None:
        """See `DirectStore`."""
        with self._lock:
            self._release(place.page.cells)

    def drop(self, names: Sequence[bytes]) -> None:
        """Forgets pages."""
        with self._lock:
            for name in names:
                page = self._pages.get(name)
                if page is not None and not page.readers:
                    self._remove(name)

    def release(self, size: int) -> None:
        """Give memory of so many bytes back to the system, of the pages that were used longest ago, and that of free
        cells; others get no more than is left until `release(0)`. Not for memory that is pinned."""
        with self._lock:
            if not size:
                self._withheld = 0
                return
            freed = 0
            for name, page in list(self._pages.items()):
                if freed >= size:
                    break
                if not page.readers:
                    freed += len(page.cells) * self._cell
                    self._remove(name)
                    self.evicted += 1
            self._withheld = len(self._free)  # also those that no page ever had: they have no memory yet
            cells = sorted(self._free)
            for first, count in runs(cells, self._count):
                start = self._layout.first + cells[first] * self._cell
                page_start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
                length = (start + count * self._cell) // mmap.PAGESIZE * mmap.PAGESIZE - page_start
                if length > 0:
                    self._memory.madvise(mmap.MADV_REMOVE, page_start, length)

    def close(self) -> None:
        """The memory stays with its owner; if that is this process, it goes with the last reference."""

    def _get(self, name: bytes, place: memoryview) -> bool:
        [lent] = self.lend([name], [len(place)])
        if lent is None:
            return False
        gather(lent.parts, place)
        self.give_back([lent])
        return True

    def _put(self, name: bytes, place: memoryview) -> bool:
        reserved = self.reserve(name, len(place))
        if reserved is None:
            return name in self._pages
        start = 0
        for part in reserved.parts:
            np.copyto(np.frombuffer(part, np.uint8), place[start : start + len(part)])
            start += len(part)
        self.publish(reserved)
        return True

    def _place(self, name: bytes, page: _Page) -> _Place:
        """The memory of a page; cells that follow each other are one part, if they are in one of `parts`."""
        left, parts = page.length, list[memoryview]()
        for first, count in runs(page.cells, self._run):
            parts.append(self._part(page.cells[first], min(count * self._cell, left)))
            left -= count * self._cell
        return _Place(name, page, parts)

    def _remove(self, name: bytes) -> None:
        self._release(self._pages.pop(name).cells)

    def _release(self, cells: Sequence[int]) -> None:
        for cell in cells:
            self._write_entry(cell, bytes(ENTRY_BYTES))
            self._used[cell] = 0
        self._free += [cell for cell in cells if cell < self._usable]

    def _part(self, cell: int, length: int) -> memoryview:
        return self._layout.part(self._view, cell, length)

    def _write_entry(self, cell: int, entry: bytes) -> None:
        start = self._layout.entry(cell)
        self._memory[start : start + ENTRY_BYTES] = entry

    def _scan(self) -> None:
        """Find the pages of an earlier engine, the oldest first."""
        start = self._layout.entry(0)
        entries = self._bytes[start : start + self._count * ENTRY_BYTES].reshape(-1, ENTRY_BYTES)
        parts: defaultdict[tuple[int, bytes, int], dict[int, int]] = defaultdict(dict)
        for cell in np.flatnonzero(entries.any(1)).tolist():
            if (entry := Entry.read(entries[cell].tobytes())) is not None:
                parts[entry.generation, entry.name, entry.length][entry.number] = cell
        used: set[int] = set()
        for (generation, name, length), cells in sorted(parts.items(), key=lambda item: item[0]):
            self._generation = max(self._generation, generation)
            if name not in self._pages and sorted(cells) == [*range(-(-length // self._cell))]:
                self._pages[name] = _Page([cells[index] for index in range(len(cells))], length)
                used.update(cells.values())
        for cell in used:
            self._used[cell] = 1
        self._release([cell for cell in range(self._count) if cell not in used])


def cell_for(size: int) -> int:
    """Returns the bytes of a cell in an arena of so many."""
    cell = LARGEST_CELL
    while cell > SMALLEST_CELL and size // (cell + ENTRY_BYTES) < LEAST_CELLS:
        cell //= 2
    return cell


def make_host(rest: str, identity: Identity) -> HostStore:
    """A store of this process alone, for the registry: an engine makes its own, over memory that outlives it."""
    return HostStore(read_bytes(rest))
