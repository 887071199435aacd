"""A tier in host memory: which blocks it keeps, least recently used first out, and the bytes of a real cache."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

import torch

from kvern.cache.messages import BlockLoad, BlockSave
from kvern.config import EngineConfig
from kvern.runner.plan import Layout


def host_tier(config: EngineConfig, layout: Layout) -> "HostTier":
    """The tier that a package's entry point names."""
    return HostTier(200)


class HostTier:
    """Keeps `capacity` blocks, or all that are in use."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.users: OrderedDict[bytes, int] = OrderedDict()
        self._kept: dict[bytes, list[torch.Tensor]] = {}
        self.saved = self.loaded = 0
        self._finished: list[tuple[int, int]] = []

    def put(self, key: bytes, block: int) -> bool:
        if key in self.users:
            self.users.move_to_end(key)
            return False
        if len(self.users) >= self.capacity:
            unused = next((other for other, users in self.users.items() if not users), None)
            if unused is None:
                return False
            self._drop(unused)
        self.users[key] = 0
        return True

    def acquire(self, keys: Iterable[bytes]) -> list[bytes]:
        found = []
        for key in keys:
            if key not in self.users:
                break
            self.users[key] += 1
            self.users.move_to_end(key)
            found.append(key)
        return found

    def release(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            assert self.users[key] > 0, "released more often than acquired"
            self.users[key] -= 1

    def lose(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            if key in self.users:
                self._drop(key)

    def _drop(self, key: bytes) -> None:
        assert not self.users.pop(key), "a block is dropped while it is loaded"

    def save(self, caches: Sequence[torch.Tensor], saves: Sequence[BlockSave]) -> None:
        for save in saves:
            self._kept[save.key] = [cache[:, save.block].to("cpu", copy=True) for cache in caches]
        self._kept = {key: kept for key, kept in self._kept.items() if key in self.users}
        self.saved += len(saves)

    def load(self, caches: Sequence[torch.Tensor], loads: Sequence[BlockLoad]) -> None:
        for load in loads:
            for cache, kept in zip(caches, self._kept[load.key], strict=True):
                cache[:, load.block] = kept
        self.loaded += len(loads)
        self._finished += Counter(load.load for load in loads).items()

    def finished(self) -> list[tuple[int, int]]:
        finished, self._finished = self._finished, []
        return finished

    def abandon(self) -> None:
        self._finished.clear()
