"""CUDA's streams and copies on the host, in order: for movers of pages where there is no GPU."""

import contextlib
import ctypes
import mmap
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvern.device.mapped_memory import Range
from kvern.runner import device_asleep, device_page_mover
from kvern.runner.device_page_mover import DeviceMover
from kvern.tiers.host import HostStore
from kvern.tiers.page_memory import Piece


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
    monkeypatch.setattr(device_asleep, "MappedMemory", HostMapped)
    everything = {"address": 0, "total_size": 1 << 63, "segment_pool_id": (0, 0)}
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
    answers = {"memory_snapshot": [everything], "cudart": runtime, "memory_reserved": 1 << 20}
    for name in ("memory_snapshot", "cudart", "memory_reserved", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: answers.get(name))


class HostMapped:
    """`MappedMemory` on the host: what is given back has other contents when it is taken again."""

    failing = False

    def __init__(self, device: torch.device) -> None:
        self._memory: dict[int, mmap.mmap] = {}
        self.is_mapped = True

    @property
    def size(self) -> int:
        return sum(map(len, self._memory.values()))

    def add(self, size: int) -> Range:
        assert self.is_mapped
        memory = mmap.mmap(-1, size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._memory[address] = memory
        return Range(address, size)

    def tensor(self, address: int, size: int) -> torch.Tensor:
        return torch.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype=torch.uint8)

    def unmap(self) -> None:
        assert self.is_mapped
        self.is_mapped = False
        for memory in self._memory.values():
            memory[:] = b"\xee" * len(memory)

    def map(self) -> None:
        if HostMapped.failing:
            raise torch.OutOfMemoryError("the GPU's driver cannot map memory")
        assert not self.is_mapped
        self.is_mapped = True
