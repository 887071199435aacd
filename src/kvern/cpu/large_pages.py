"""Memory in large pages for the data that every step reads: with small pages a core also waits for page addresses.

A system without large pages, or with large pages disabled, gives small ones.
"""

import contextlib
import math
import mmap
import threading

import torch
from torch import Tensor

PAGE_BYTES = 2 << 20
CHUNK_BYTES = 32 << 20
"""The size of an allocation from the system, which holds several tensors."""
ALIGNMENT = 64
"""Bytes of a cache line."""


class _Chunk(threading.local):
    left = torch.empty(0, dtype=torch.uint8)
    """The unused rest of the newest chunk; tensors keep their chunk alive."""


_chunk = _Chunk()


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in memory of their own: the system provides a page when it is first used."""
    size = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, size + PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    room = torch.frombuffer(memory, dtype=torch.uint8)
    return room[-room.data_ptr() % PAGE_BYTES :][:size].view(dtype).view(shape)


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Uninitialized memory for weights, several of which share large pages."""
    size = math.prod(shape) * dtype.itemsize
    if size > len(_chunk.left):
        _chunk.left = zeros((max(size, CHUNK_BYTES),), torch.uint8)
    taken, _chunk.left = _chunk.left[:size], _chunk.left[-(-size // ALIGNMENT) * ALIGNMENT :]
    return taken.view(dtype).view(shape)
