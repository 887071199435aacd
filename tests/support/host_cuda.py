"""CUDA's streams and copies on the host, in order: for movers of pages where there is no GPU."""

import contextlib
import ctypes
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kvern.runner import device_page_mover
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
    monkeypatch.setattr(device_page_mover, "copy_all", _copy_all)
    monkeypatch.setattr(device_page_mover.DeviceMover, "pin", _pin)
    monkeypatch.setattr(device_page_mover.DeviceMover, "buffer", _buffer)
