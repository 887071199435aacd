"""A tier in host memory: which blocks it keeps, least recently used first out, and the bytes of a real cache."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from kvern.step import ModelRunnerOutput, SchedulerOutput, StepResult
from kvern.worker.executor import Executor


class HostTier:
    """Keeps `capacity` blocks, or all that are in use."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.users: OrderedDict[bytes, int] = OrderedDict()

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


class TieredExecutor:
    """Runs steps through the engine's executor, and copies blocks of `caches` [2, blocks, ...] out and in."""

    def __init__(self, executor: Executor, tier: HostTier, caches: Sequence[torch.Tensor]) -> None:
        self._executor, self._tier, self._caches = executor, tier, caches
        self._kept: dict[bytes, list[torch.Tensor]] = {}
        self.saved = self.loaded = 0

    def submit(self, output: SchedulerOutput) -> StepResult:
        for save in output.saves:
            self._kept[save.key] = [cache[:, save.block].clone() for cache in self._caches]
        result = self._executor.submit(output).result() if output.scheduled else ModelRunnerOutput([], [], [])
        counts: dict[int, int] = {}
        for load in output.loads:
            for cache, kept in zip(self._caches, self._kept[load.key], strict=True):
                cache[:, load.block] = kept
            counts[load.load] = counts.get(load.load, 0) + 1
        result.loaded = list(counts.items())
        self._kept = {key: kept for key, kept in self._kept.items() if key in self._tier.users}
        self.saved += len(output.saves)
        self.loaded += len(output.loads)
        done: Future[ModelRunnerOutput] = Future()
        done.set_result(result)
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)
