"""Memory of the host that is pinned in the background, so that a GPU's copy engines read and write it."""

import ctypes
import functools
import logging
import sys
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch

PINNED_BYTES = 16 << 20
"""The host's memory that is pinned at once: launches wait meanwhile, about a millisecond."""
POPULATING = 4
"""Threads that have the system make memory, each about 1.4 GB/s."""
AHEAD = 32
"""Pieces that these threads are given at once."""
POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux: pinning is fast where memory is there already."""

logger = logging.getLogger("kvern")


class Pinnable(Protocol):
    """Memory of the host that is used as far as it is pinned."""

    def parts(self, most: int) -> Iterable[memoryview]:
        """The memory in order, in whole pages, in pieces of at most `most` bytes."""

    def extend(self, part: memoryview) -> None:
        """The next of `parts` is pinned."""

    def may_grow(self, size: int) -> bool:
        """Returns whether the host may make so many more bytes of it."""

    def cut(self) -> None:
        """No further part will be."""


@functools.cache
def _system() -> ctypes.CDLL:
    return ctypes.CDLL(None)


class Pins:
    """Memory that is pinned, piece after piece, until `end`."""

    def __init__(self, pinnable: Pinnable, device: torch.device, name: str) -> None:
        """`name`: what it is, for people."""
        self._wanted: Pinnable | None = pinnable
        self._memory: Pinnable | None = pinnable
        """The memory, until nothing of it is pinned."""
        self._device, self._name = device, name
        self._pinned: list[int] = []
        self._lock = threading.RLock()  # the last who holds what is pinned may be `extend`, which then calls `end`
        self._thread = threading.Thread(target=self._run, name="kvern-pin", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """Pin all of it, behind threads that have the system make the memory, which takes longer."""
        parts = [] if self._wanted is None else [*self._wanted.parts(PINNED_BYTES)]
        pool = ThreadPoolExecutor(POPULATING, "kvern-populate")
        try:
            with torch.cuda.device(self._device):
                for first in range(0, len(parts), AHEAD):  # a process that ends waits for what is queued
                    some = parts[first : first + AHEAD]
                    if not self._goes_on(some):
                        break
                    if not all(self._pin(*found) for found in zip(some, pool.map(self._populate, some), strict=True)):
                        break
        except RuntimeError as error:  # also raised when the interpreter ends
            if not sys.is_finalizing() and self._wanted is not None:
                logger.warning("%s ends after %.2f GB: %s", self._name, self._gigabytes, error)
        pool.shutdown(cancel_futures=True)

    @property
    def _gigabytes(self) -> float:
        return len(self._pinned) * PINNED_BYTES / 1e9

    def _goes_on(self, parts: Sequence[memoryview]) -> bool:
        """Returns whether the host has room for some parts."""
        wanted = self._wanted
        if wanted is None or wanted.may_grow(sum(map(len, parts))):
            return wanted is not None
        logger.warning("%s ends after %.2f GB: the host's memory is short", self._name, self._gigabytes)
        wanted.cut()
        return False

    def _populate(self, part: memoryview) -> int:
        """Have the system make memory; returns its address."""
        address = torch.frombuffer(part, dtype=torch.uint8).data_ptr()
        if self._wanted is not None:
            _system().madvise(ctypes.c_void_p(address), ctypes.c_size_t(len(part)), POPULATE_WRITE)
        return address

    def _pin(self, part: memoryview, address: int) -> bool:
        """Pin the next part, and let it be used. Returns whether the next one should be pinned."""
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with self._lock:
            if self._wanted is None:
                return False
            if error := int(runtime.cudaHostRegister(address, len(part), 0)):
                logger.warning(
                    "%s ends after %.2f GB: CUDA pins no more (error %d)", self._name, self._gigabytes, error
                )
                self._wanted.cut()
                return False
            self._pinned.append(address)
            self._wanted.extend(part)
            return True

    def wait(self) -> None:
        """Waits until all is pinned, or no more can be."""
        self._thread.join()

    def end(self) -> None:
        """Let the memory go, which takes a while: the process must not end meanwhile."""
        with self._lock:
            self._wanted = None
        if threading.current_thread() is threading.main_thread():
            self._unpin()
        else:
            threading.Thread(target=self._unpin, name="kvern-unpin", daemon=False).start()

    def _unpin(self) -> None:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self._thread.join()
        for address in self._pinned:
            runtime.cudaHostUnregister(address)
        self._memory = None
