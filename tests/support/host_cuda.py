"""CUDA's streams and copies on the host, in order: for movers of pages where there is no GPU."""

import contextlib
import ctypes
import mmap
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvern.device import chunked_memory
from kvern.device.mapped_memory import Piece as MappedPiece
from kvern.device.mapped_memory import Range
from kvern.runner import device_asleep, device_page_mover
from kvern.runner.device_page_mover import DeviceMover
from kvern.tiers.host import HostStore
from kvern.tiers.page_memory import Piece

GRANULARITY = mmap.PAGESIZE
"""The bytes at whose multiples memory is mapped here."""
NOTHING = 0
"""PROT_NONE."""
_system = ctypes.CDLL(None, use_errno=True)
_system.mmap.restype = ctypes.c_void_p
_system.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
]  # fmt: skip
for _name in ("munmap", "mprotect", "madvise"):
    getattr(_system, _name).argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int][: 2 if _name == "munmap" else 3]


class _Order:
    """A stream or an event: everything has been done when it is asked for."""

    cuda_stream = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def wait_event(self, event: "_Order") -> None:
        pass

    def record(self, stream: "_Order | None" = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: "_Order") -> float:
        return 1.0


def _copy_all(pairs: Sequence[tuple[int, int, int]], stream: _Order, *, to_host: bool) -> None:
    for host, device, size in pairs:
        ctypes.memmove(*((host, device) if to_host else (device, host)), size)


def _pin(mover: DeviceMover, store: HostStore) -> None:
    for part in store.parts(1 << 20):
        store.extend(part)


def _buffer(mover: DeviceMover, piece: Piece) -> memoryview:
    return memoryview(bytearray(len(piece.at)))


def have_cuda_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a `DeviceMover` move pages of caches in the host's memory."""
    for name in ("Stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, _Order)
    monkeypatch.setattr(torch.cuda, "current_stream", _Order)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: contextlib.nullcontext())
    for module in (device_page_mover, device_asleep):
        monkeypatch.setattr(module, "copy_all", _copy_all)
    monkeypatch.setattr(device_page_mover.DeviceMover, "pin", _pin)
    monkeypatch.setattr(device_page_mover.DeviceMover, "buffer", _buffer)
    for module in (device_asleep, chunked_memory):
        monkeypatch.setattr(module, "MappedMemory", HostMapped)
    everything = {"address": 0, "total_size": 1 << 63, "segment_pool_id": (0, 0)}
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
    answers = {"memory_snapshot": [everything], "cudart": runtime, "memory_reserved": 1 << 20}
    for name in ("memory_snapshot", "cudart", "memory_reserved", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: answers.get(name))


class HostMapped:
    """`MappedMemory` on the host. Who touches an address without memory is ended by the system (SIGSEGV), and memory
    that comes has contents of its own."""

    left: int | None = None
    """Bytes that there still are for all of them; None: any number."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.granularity = GRANULARITY
        self.pieces: list[MappedPiece] = []
        self.mapped = 0
        """The number of pieces that have memory."""
        self._ranges: list[Range] = []

    @property
    def size(self) -> int:
        return sum(piece[0].size for piece in self.pieces)

    def add(self, size: int) -> Range:
        added = self.reserve(size)
        self.extend([[added]])
        return added

    def reserve(self, size: int) -> Range:
        size = -(-size // self.granularity) * self.granularity
        address = _system.mmap(None, size, NOTHING, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        self._ranges.append(Range(address, size))
        return self._ranges[-1]

    def tensor(self, address: int, size: int) -> torch.Tensor:
        numbers = type("Numbers", (ctypes.c_ubyte * size,), {}).from_address(address)
        numbers.memory = self
        return torch.frombuffer(numbers, dtype=torch.uint8)

    def extend(self, pieces: Sequence[MappedPiece]) -> None:
        before = len(self.pieces)
        self.pieces += pieces
        try:
            self.map()
        except torch.OutOfMemoryError:
            self._unmap_to(before)
            del self.pieces[before:]
            raise

    def cut(self, count: int) -> None:
        self._unmap_to(count)
        del self.pieces[count:]

    def unmap(self) -> None:
        self._unmap_to(0)

    def map(self) -> None:
        before = self.mapped
        try:
            for piece in self.pieces[before:]:
                self._map(piece)
        except torch.OutOfMemoryError:
            self._unmap_to(before)
            raise

    def _map(self, piece: MappedPiece) -> None:
        size = piece[0].size
        assert all(where.size == size and where.address % self.granularity == 0 for where in piece)
        assert size % self.granularity == 0
        if HostMapped.left is not None:
            if size > HostMapped.left:
                raise torch.OutOfMemoryError("the GPU's driver cannot map memory: cuMemCreate gives error 2")
            HostMapped.left -= size
        for where in piece:
            assert _system.mprotect(where.address, size, mmap.PROT_READ | mmap.PROT_WRITE) == 0
            ctypes.memset(where.address, 0xEE, size)
        self.mapped += 1

    def _unmap_to(self, count: int) -> None:
        while self.mapped > count:
            self.mapped -= 1
            for where in self.pieces[self.mapped]:
                assert _system.madvise(where.address, where.size, mmap.MADV_DONTNEED) == 0
                assert _system.mprotect(where.address, where.size, NOTHING) == 0
            if HostMapped.left is not None:
                HostMapped.left += self.pieces[self.mapped][0].size

    def __del__(self) -> None:
        self._unmap_to(0)
        for where in self._ranges:
            _system.munmap(where.address, where.size)
