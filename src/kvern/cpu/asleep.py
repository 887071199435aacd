"""The memory of an engine that is asleep: its contents are in a file, its addresses stay.

    leave   contents -> a file in the cache folder that has no name; the system gets the pages
    enter   contents <- the file, at the same addresses, so that compiled kernels and captured steps find them

This is the memory of what the start of the engine made: tensors that the garbage collector was told to leave alone
(`gc.freeze`). Later ones, such as pages on their way to a tier, may be read by other threads, and stay.
"""

import ctypes
import gc
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

SMALLEST = 1 << 16
"""Bytes of a tensor that is worth it."""
PIECE_BYTES = 32 << 20
"""Bytes that a thread brings at a time."""
BUFFER_BYTES = 1 << 20
"""Bytes that are compared with the file at a time."""

_libc = ctypes.CDLL(None, use_errno=True)
_madvise, _memcmp = _libc.madvise, _libc.memcmp
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_memcmp.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t]


class Span(NamedTuple):
    """Whole pages of memory, and where their contents are in the file."""

    address: int
    size: int
    offset: int = 0

    @property
    def bytes(self) -> memoryview:
        """The memory itself."""
        return memoryview((ctypes.c_char * self.size).from_address(self.address)).cast("B")

    def cut(self, size: int) -> "Iterator[Span]":
        """Yields it in parts of at most so many bytes."""
        for first in range(0, self.size, size):
            yield Span(self.address + first, min(size, self.size - first), self.offset + first)


class SleepingMemory:
    """Memory that this process gives back and takes again. No step may run from `leave` until `enter` has ended."""

    size = 0

    def __init__(self, folder: Path, emptied: Sequence[Tensor] = ()) -> None:
        """`folder`: where its file is. `emptied`: caches whose contents are not needed again; they become zeros."""
        empty = {tensor.untyped_storage().data_ptr() for tensor in emptied}
        own = _own_memory()
        memory, self._held = _storages()
        found = [(address, size, address in empty) for address, size in memory if _is_within(own, address, size)]
        self._emptied = [_pages(address, size) for address, size, is_empty in found if is_empty]
        self._kept: list[Span] = []
        offset = 0
        for address, size, is_empty in found:
            if not is_empty:
                self._kept.append(_pages(address, size)._replace(offset=offset))
                offset += self._kept[-1].size
        folder.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (open as long as the process runs)

    def leave(self) -> int:
        """See `MemoryAsleep` (`runner/asleep.py`). Raises OSError if the file cannot hold the contents."""
        self._in_threads(self._write)
        os.fdatasync(self._file.fileno())  # or a full disk would be noticed when the memory is gone
        for span in (*self._kept, *self._emptied):
            _madvise(span.address, span.size, mmap.MADV_DONTNEED)
        _libc.malloc_trim(0)
        return 0

    def enter(self) -> None:
        """Brings the contents back."""
        self._in_threads(self._read)

    def forget(self, tensors: Sequence[Tensor]) -> None:
        """Leave the memory of tensors alone from now on, which may be freed."""
        gone = {_pages(*found).address for tensor in tensors if (found := _storage(tensor)) is not None}
        ids = {id(tensor) for tensor in tensors}
        self._kept = [span for span in self._kept if span.address not in gone]
        self._held = [tensor for tensor in self._held if id(tensor) not in ids]

    def _in_threads(self, work: Callable[[Span], None]) -> None:
        with ThreadPoolExecutor(torch.get_num_threads(), "kvern-memory") as pool:
            for _ in pool.map(work, [piece for span in self._kept for piece in span.cut(PIECE_BYTES)]):
                pass

    def _write(self, piece: Span) -> None:
        """Write what differs from the file: most weights never change, so that it is there since the first time."""
        buffer = bytearray(BUFFER_BYTES)
        within = ctypes.c_char.from_buffer(buffer)
        for part in piece.cut(BUFFER_BYTES):
            read = os.preadv(self._file.fileno(), [memoryview(buffer)[: part.size]], part.offset)
            if read < part.size or _memcmp(ctypes.cast(ctypes.byref(within), ctypes.c_char_p), part.address, part.size):
                _whole(os.pwrite, self._file.fileno(), part)

    def _read(self, piece: Span) -> None:
        _whole(lambda file, memory, offset: os.preadv(file, [memory], offset), self._file.fileno(), piece)


def give_back(tensor: Tensor) -> None:
    """Gives the whole pages of a tensor, which has no gaps, back to the system; they are zeros when they are used."""
    span = _pages(tensor.data_ptr(), tensor.nbytes)
    if span.size > 0:
        _madvise(span.address, span.size, mmap.MADV_DONTNEED)


def _whole(move: Callable[[int, memoryview, int], int], file: int, span: Span) -> None:
    """Move all bytes between memory and file, of which a call may move a part."""
    moved = 0
    while moved < span.size:
        count = move(file, span.bytes[moved:], span.offset + moved)
        if not count:
            raise OSError(f"the file of a sleeping model ends after {span.offset + moved} bytes")
        moved += count


def _storages() -> tuple[list[tuple[int, int]], list[Tensor]]:
    """Returns address and size of the memory of tensors that the start of the engine made; and these, to be held: what
    comes to where one was must not be given back."""
    kinds = {Tensor}
    while more := {kind for known in kinds for kind in known.__subclasses__()} - kinds:
        kinds |= more
    later = {id(one) for one in gc.get_objects() if type(one) in kinds}
    gc.unfreeze()
    tensors = [one for one in gc.get_objects() if type(one) in kinds]
    gc.freeze()
    tensors = [one for one in tensors if id(one) not in later and one.device.type == "cpu"]
    memory = dict(found for tensor in tensors if (found := _storage(tensor)) is not None)
    return sorted((address, size) for address, size in memory.items() if size >= SMALLEST), tensors


def _storage(tensor: Tensor) -> tuple[int, int] | None:
    if tensor.layout == torch.strided:
        return tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
    if tensor.is_mkldnn:  # weights in oneDNN's own order
        return torch.ops.mkldnn.data_ptr(tensor), torch.ops.mkldnn._nbytes(tensor)
    return None


def _own_memory() -> list[tuple[int, int]]:
    """Returns begin and end of memory that belongs to this process alone and to no file."""
    found: list[tuple[int, int]] = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, rights, _, _, inode, *_ = line.split()
        if rights.startswith("rw") and rights.endswith("p") and inode == "0":
            first, end = (int(number, 16) for number in place.split("-"))
            if found and found[-1][1] == first:
                first = found.pop()[0]
            found.append((first, end))
    return found


def _is_within(spans: Sequence[tuple[int, int]], address: int, size: int) -> bool:
    return any(first <= address and address + size <= end for first, end in spans)


def _pages(address: int, size: int) -> Span:
    """The whole pages within some memory: others share the first and the last."""
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    return Span(first, (address + size) // mmap.PAGESIZE * mmap.PAGESIZE - first)
