"""Collective operations of CPU ranks on one machine, through shared memory."""

import ctypes
import mmap
import time
from pathlib import Path

import torch
from torch import Tensor

from kvern.cpu.library import CODE, DTYPES, INTEGER, POINTER, fields, function

_bytes = function("kvern_ranks_bytes", POINTER, INTEGER)
_sum = function("kvern_ranks_sum", POINTER, POINTER, INTEGER, CODE)
_beside = function("kvern_ranks_beside", POINTER, POINTER, POINTER, INTEGER, INTEGER, INTEGER)
_first = function("kvern_ranks_first", POINTER, POINTER, INTEGER)

LOOK_SECONDS = 0.005
"""The interval at which a rank looks for the memory of the first rank."""
LOSSES = ("did not come within {} s", "has ended", "computes another step than this one")
"""Reasons for a lost rank, in the order of the codes in `sources/ranks.cpp`."""


class _Ranks(ctypes.Structure):
    """The struct of this name in `sources/ranks.cpp`."""

    _fields_ = [("memory", POINTER), *fields("rank size pieces nanoseconds lost loss", INTEGER)]


class SharedMemory:
    """Shared memory of rank `rank` of `size`; `file` is made by the first rank and removed when all have opened it.

    Methods do what those of `kvern.ranks.ranks.Ranks` do. Replayed calls raise nothing: `check` reports a lost rank,
    after which nothing is computed any more.
    """

    def __init__(self, file: Path, rank: int, size: int, seconds: float) -> None:
        """Waits at most `seconds` for the other ranks, here and in each operation. Raises RuntimeError and OSError."""
        self._seconds, count = seconds, ctypes.c_int64()
        _bytes(ctypes.addressof(count), size)
        self._memory = _make(file, count.value) if rank == 0 else _find(file, seconds)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._ranks = _Ranks(begin, rank, size, 0, int(seconds * 1e9), 0, 0)
        self._address = ctypes.addressof(self._ranks)
        try:
            self.first(torch.zeros(1))
        finally:
            if rank == 0:
                file.unlink(missing_ok=True)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of float32 or bfloat16 over all ranks, accumulated in float32 in the order of the ranks."""
        x = x.contiguous()
        _sum(self._address, x.data_ptr(), x.numel(), DTYPES[x.dtype])
        self.check()
        return x

    def beside(self, x: Tensor, width: int) -> Tensor:
        """The first `width` columns of `x [N, columns]` of all ranks side by side."""
        x = x.contiguous()
        out = torch.empty(x.shape[0], width, dtype=x.dtype)
        size = x.itemsize
        _beside(self._address, x.data_ptr(), out.data_ptr(), x.shape[0], x.shape[1] * size, width * size)
        self.check()
        return out

    def first(self, x: Tensor) -> Tensor:
        """Copies the tensor of the first rank to all ranks."""
        assert x.is_contiguous()
        _first(self._address, x.data_ptr(), x.nbytes)
        self.check()
        return x

    def check(self) -> None:
        """Raise RuntimeError if a rank was missing, with its number."""
        if self._ranks.lost:
            how = LOSSES[self._ranks.loss].format(f"{self._seconds:g}")
            raise RuntimeError(f"rank {self._ranks.lost - 1} {how}")


def _make(file: Path, size: int) -> mmap.mmap:
    making = file.with_suffix(".making")
    with making.open("w+b") as opened:
        opened.write(bytes(size))  # where there is no room, it shows here
        opened.flush()
        memory = mmap.mmap(opened.fileno(), size)
    making.rename(file)
    return memory


def _find(file: Path, seconds: float) -> mmap.mmap:
    until = time.monotonic() + seconds
    while not file.exists():
        if time.monotonic() > until:
            raise RuntimeError(f"rank 0 {LOSSES[0].format(f'{seconds:g}')}")
        time.sleep(LOOK_SECONDS)
    with file.open("r+b") as opened:
        return mmap.mmap(opened.fileno(), 0)
