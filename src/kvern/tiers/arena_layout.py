"""The format of an arena: memory with pages that an engine writes, and that others of the machine may read meanwhile.

    head 64 | log, 4 bytes for each cell | entries, 64 each, one for a cell | cells

A page takes as many cells as it needs, anywhere. A cell's entry names its page and says which part of it the cell has.
It is zeroed before the cell is written, and written afterwards, so a page that was being written when the process was
killed lacks an entry and is no page. An engine that starts over an arena reads the entries and continues with what is
whole. An entry with a wrong sum, or a page with a part missing, is free memory.

The log has the first cells of the pages in the order in which they were published, and the head how many that were: by
these other engines of the machine find pages (`tiers/peer.py`). An entry says how many cells follow it in order, and
where the page goes on behind them, so that a page is read with few entries.

The numbers are little-endian.
"""

import mmap
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from kvern.errors import ConfigError

_HEAD = struct.Struct("<8sIIQQ24x")
_COUNT = struct.Struct("<Q")
"""The number of pages that were published, the last field of the head."""
HEAD_BYTES = _HEAD.size + _COUNT.size
_MAGIC = b"kvARENA2"
_LOGGED = struct.Struct("<I")
_ENTRY = struct.Struct("<32sQIIII")
_SUM = struct.Struct("<Q")
ENTRY_BYTES = _ENTRY.size + _SUM.size
LARGEST_PAGE = (1 << 32) - 1


class Layout(NamedTuple):
    """The division of an arena: the bytes of a cell, the number of cells, all bytes, the start of the first cell."""

    cell: int
    cells: int
    size: int
    first: int

    @classmethod
    def of(cls, size: int, cell: int, align: int) -> "Layout":
        """Divides so many bytes. Raises ConfigError if they hold nothing."""
        cells = (size - HEAD_BYTES - ENTRY_BYTES - align) // (cell + ENTRY_BYTES + _LOGGED.size)
        if cells < 1:
            least = cell + 2 * ENTRY_BYTES + _LOGGED.size + HEAD_BYTES + align
            raise ConfigError(f"kv_tier host has {size} bytes: give it {least} at least")
        return cls(cell, cells, size, -(-(_entries_at(cells) + cells * ENTRY_BYTES) // align) * align)

    @classmethod
    def read(cls, memory: mmap.mmap) -> "Layout | None":
        """Reads the division of an arena that another process has made; None: it is none."""
        if len(memory) < HEAD_BYTES:
            return None
        magic, *numbers = _HEAD.unpack_from(memory)
        found = cls(*numbers)
        entries = _entries_at(found.cells) + found.cells * ENTRY_BYTES
        fits = entries <= found.first and found.first + found.cell * found.cells <= found.size == len(memory)
        return found if magic == _MAGIC and found.cell and found.cells and fits else None

    @property
    def head(self) -> bytes:
        """The first bytes of the arena."""
        return _HEAD.pack(_MAGIC, *self)

    def entry(self, cell: int) -> int:
        """The start of a cell's entry."""
        return _entries_at(self.cells) + cell * ENTRY_BYTES

    def part(self, view: memoryview, cell: int, length: int) -> memoryview:
        """The memory from a cell on."""
        start = self.first + cell * self.cell
        return view[start : start + length]

    def published(self, memory: mmap.mmap) -> int:
        """The number of pages that were published."""
        count: int = _COUNT.unpack_from(memory, _HEAD.size)[0]
        return count

    def logged(self, memory: mmap.mmap, number: int) -> int:
        """The first cell of page `number` of all that were published."""
        cell: int = _LOGGED.unpack_from(memory, HEAD_BYTES + number % self.cells * _LOGGED.size)[0]
        return cell

    def log(self, memory: mmap.mmap, cell: int) -> None:
        """Tells of a page that is published."""
        number = self.published(memory)
        _LOGGED.pack_into(memory, HEAD_BYTES + number % self.cells * _LOGGED.size, cell)
        _COUNT.pack_into(memory, _HEAD.size, number + 1)


class Entry(NamedTuple):
    """An entry of a cell, which is `number` of those of its page, from 0 on; the page has `length` bytes.

    It goes on in `run` cells from this one on, and then in `following`.
    """

    name: bytes
    generation: int
    number: int
    run: int
    following: int
    length: int

    @classmethod
    def read(cls, entry: bytes) -> "Entry | None":
        """An entry from its bytes; None: it is none."""
        content = entry[: _ENTRY.size]
        if _SUM.unpack_from(entry, _ENTRY.size)[0] != xxhash.xxh3_64_intdigest(content):
            return None
        return cls(*_ENTRY.unpack(content))

    @property
    def bytes(self) -> bytes:
        """Returns the bytes of the entry."""
        content = _ENTRY.pack(*self)
        return content + _SUM.pack(xxhash.xxh3_64_intdigest(content))


def _entries_at(cells: int) -> int:
    """The start of the entries: they are aligned as large as they are."""
    return -(-(HEAD_BYTES + cells * _LOGGED.size) // ENTRY_BYTES) * ENTRY_BYTES


def runs(cells: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Cells that follow each other: (index of the first in `cells`, count). None goes beyond a multiple of `most`."""
    first = 0
    for end in range(1, len(cells) + 1):
        last = cells[end - 1]
        if end == len(cells) or cells[end] != last + 1 or (last + 1) % most == 0:
            yield first, end - first
            first = end


def gather(parts: Sequence[memoryview], place: memoryview) -> None:
    """Copy the parts of a page, one after the other, to `place`, which is as long as all of them."""
    np.concatenate([np.frombuffer(part, np.uint8) for part in parts], out=np.frombuffer(place, np.uint8))
