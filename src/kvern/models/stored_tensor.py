"""One tensor in a checkpoint's file, and the runs of rows in which it is read."""

import math
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvern.errors import CorruptCheckpoint
from kvern.io.files import open_regular, reason

RUN_BYTES = 32 << 20


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: `begin` is its first byte there. `change` makes the model's rows of `together` of its own."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    change: Callable[[Tensor], Tensor] | None = None
    together: int = 1

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def runs(self, data: mmap.mmap, *, whole: bool = False) -> Iterator[tuple[int, Tensor]]:
        """Yield `(first_row, rows)` in order; each run is valid until the next is asked for."""
        row_bytes = self.nbytes // self.shape[0] if self.shape and self.shape[0] else 0
        rows = self.shape[0] if self.shape else 1
        step = rows if whole or not row_bytes else max(1, RUN_BYTES // row_bytes // self.together) * self.together
        for first in range(0, rows, max(step, 1)):
            count = min(step, rows - first)
            begin = self.begin + first * row_bytes
            shape = (count, *self.shape[1:]) if self.shape else ()
            flat = torch.frombuffer(data, dtype=self.dtype, count=math.prod(shape), offset=begin)
            yield first, flat.view(shape) if self.change is None else self.change(flat.view(shape))
            _drop_pages(data, begin, flat.nbytes)


def is_equal(one: StoredTensor, other: StoredTensor) -> bool:
    """True if two tensors hold the same numbers. Raises CorruptCheckpoint if a file cannot be read."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    runs = zip(one.runs(open_map(one.file)), other.runs(open_map(other.file)), strict=True)
    return all(torch.equal(rows.view(torch.uint8), others.view(torch.uint8)) for (_, rows), (_, others) in runs)


def _drop_pages(data: mmap.mmap, begin: int, nbytes: int) -> None:
    """Give the pages of a private, unmodified map back; a platform without madvise keeps them."""
    if hasattr(mmap, "MADV_DONTNEED"):
        first = begin - begin % mmap.PAGESIZE
        data.madvise(mmap.MADV_DONTNEED, first, begin + nbytes - first)


def open_map(file: Path) -> mmap.mmap:
    """The whole file, mapped. Raises CorruptCheckpoint."""
    try:
        with open_regular(file) as stream:
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise CorruptCheckpoint(f"{file} cannot be read: {reason(error)}") from None
