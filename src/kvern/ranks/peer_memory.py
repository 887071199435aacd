"""Memory of every rank's GPU that the GPUs of all ranks on a machine can write to."""

import itertools
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import _distributed_c10d

from kvern.errors import in_a_line
from kvern.kernels.launch import processors

Made = TypeVar("Made")

distributed: Any = _distributed_c10d  # PyTorch's own description of it lacks some of this
_names = itertools.count()
"""PyTorch keeps who meets where by names, for the life of a process."""


class _Counted(_distributed_c10d.Store):
    """A store of one meeting, for PyTorch, whose keys count what a process has exchanged in all its life.

    Here they count what was exchanged in this meeting, so that processes with different pasts find each other.
    """

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store
        self._counts: dict[str, int] = {}

    def _own(self, key: str) -> str:
        prefix, *parts = key.split("/")
        count = self._counts.setdefault(parts[0], len(self._counts)) if parts else 0
        return "/".join([prefix, str(count), *parts[1:]])

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._own(key), value)

    def get(self, key: str) -> bytes:
        found: bytes = self._store.get(self._own(key))
        return found

    def multi_get(self, keys: list[str]) -> list[bytes]:
        found: list[bytes] = self._store.multi_get([self._own(key) for key in keys])
        return found

    def add(self, key: str, value: int) -> int:
        total: int = self._store.add(self._own(key), value)
        return total

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self._store.wait([self._own(key) for key in keys], *timeout)


def processors_together(store: Any, rank: int, size: int, device: torch.device) -> int:
    """The least number of processors that a rank's GPU has; 0: some GPU does not reach those of all others.

    `device`: of this rank. All ranks call this once.
    """
    store.set(f"device-{rank}", str(device.index))
    others = [int(store.get(f"device-{other}")) for other in range(size) if other != rank]
    reaches = all(torch.cuda.can_device_access_peer(device, other) for other in others)
    store.set(f"processors-{rank}", str(processors(device) if reaches else 0))
    return min(int(store.get(f"processors-{other}")) for other in range(size))


def on_all(store: Any, rank: int, size: int, make: Callable[[], Made]) -> Made:
    """Call `make` on all ranks; returns its result. Raises RuntimeError on all ranks, or on none."""
    made, failed = None, ""
    try:
        made = make()
    except RuntimeError as error:
        failed = in_a_line(error)
    store.set(f"failed-{rank}", failed)
    failures = [store.get(f"failed-{other}").decode() for other in range(size)]
    reason = next(filter(None, failures), None)
    if made is None or reason is not None:
        raise RuntimeError(f"their GPUs share no memory: {reason or failed}")
    return made


def map_words(store: Any, what: str, rank: int, size: int, device: torch.device, words: int) -> list[Tensor]:
    """The `words` int64 of all ranks, all -1, as this one's GPU sees them; its own live as long as they are kept.

    All ranks call this, `what` they map once. Raises RuntimeError.
    """
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # nothing here is sent to all at once
    name, counted = f"kvern-{next(_names)}", _Counted(distributed.PrefixStore(what, store))
    group: Any = distributed.ProcessGroup(counted, rank, size)  # neither is kept by those who look it up
    distributed._register_process_group(name, group)
    distributed._SymmetricMemory.set_group_info(name, rank, size, counted)  # some versions of PyTorch look here
    try:
        own = distributed._SymmetricMemory.empty_strided_p2p([words], [1], torch.int64, device, name)
        own.fill_(-1)
        torch.cuda.synchronize(device)  # before others can write
        mapped = distributed._SymmetricMemory.rendezvous(own)
        return [own if other == rank else mapped.get_buffer(other, [words], torch.int64) for other in range(size)]
    finally:
        distributed._unregister_process_group(name)
