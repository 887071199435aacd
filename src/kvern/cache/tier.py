"""A place beside the blocks that keeps their bytes: host memory, a disk, a cache server, another machine's engine.

    a written, full block is about to be evicted --put--> the next step's `saves`: the worker copies it out first
    a waiting request continues in the tier --acquire--> blocks allocated, the step's `loads`: the worker copies into
        them behind the step, or later; request LOADING --loaded--> they enter the prefix tree, --> WAITING

A tier only decides, by content keys (`cache/keys.py`); bytes are moved by the worker's side of it, which does a step's
saves before the step's copies and its loads after them. A load that fails is reported as such and never raised: a step
that raises has a request to blame. What was loaded is ordinary cached prefix: the request is then admitted as any
other, and so is everybody who waited for the same blocks.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Protocol

from kvern.cache.block_pool import BlockPool
from kvern.cache.keys import block_keys
from kvern.cache.radix import Node, RadixCache
from kvern.request.step import BlockLoad, BlockSave, SchedulerOutput

if TYPE_CHECKING:
    from kvern.request.request import Request


class KVTier(Protocol):
    """Decides which blocks are kept, by their content keys. Moves no bytes, blocks nobody."""

    def put(self, key: bytes, block: int) -> bool:
        """Whether `block`, which is about to be evicted, is to be saved; not if it is kept already or not wanted."""
        ...

    def acquire(self, keys: Iterable[bytes]) -> list[bytes]:
        """The leading keys that it has, up to the first that it has not. They stay until they are released."""
        ...

    def release(self, keys: Sequence[bytes]) -> None:
        """What was acquired has been loaded, or will not be."""
        ...

    def lose(self, keys: Sequence[bytes]) -> None:
        """The steps that were to save these have failed: they are not kept."""
        ...


@dataclass(eq=False)
class _Load:
    """Blocks on their way: they follow `path`, whose nodes stay, and belong to nobody else."""

    namespace: bytes
    path: list[Node]
    contents: list[tuple[int, ...]]
    keys: list[bytes]
    blocks: list[int]
    step: int
    waiting: "list[Request]" = field(default_factory=list)


class TierTraffic:
    """What goes to a tier and comes from it, and who waits for it."""

    def __init__(self, tier: KVTier, pool: BlockPool, tree: RadixCache, block_size: int) -> None:
        self._tier, self._pool, self._tree, self._block_size = tier, pool, tree, block_size
        self._saves: list[BlockSave] = []
        self._loads: list[BlockLoad] = []
        self._saving: deque[tuple[int, bytes]] = deque()  # by steps on their way
        self._loading: dict[int, _Load] = {}
        self._arriving: dict[bytes, _Load] = {}
        self._numbers = 0
        tree.evicting = self._save

    @property
    def block_count(self) -> int:
        """Blocks that are being loaded."""
        return len(self._arriving)

    def plan(self, output: SchedulerOutput) -> None:
        """Have the step, if there is to be one, move what was decided."""
        if output.scheduled or self._loads:
            output.saves, output.loads = self._saves, self._loads
            self._saving += [(output.step, save.key) for save in self._saves]
            self._saves, self._loads = [], []

    def fetch(self, request: "Request", namespace: bytes, contents: list[int], step: int, reserve: int) -> bool:
        """Have the blocks loaded that follow what the tree has of a request; whether it is to wait for any.

        None are loaded for a request that would not fit now, with `reserve` blocks left for others.
        """
        size, limit = self._block_size, request.most_cached
        path, _, _ = self._tree.match(namespace, contents, limit)
        start = len(path) * size
        parent = self._tree.key(path[-1]) if path else self._tree.root_key(namespace)
        keys = block_keys(parent, contents[start:limit], size)
        first = next(keys, None)
        if first is None:
            return False
        if first in self._arriving:
            self._arriving[first].waiting.append(request)
            return True
        self._tree.acquire(path)
        room = self._pool.free_count + self._tree.evictable_count - reserve
        found = self._tier.acquire(chain([first], keys)) if -(-(len(contents) - start) // size) <= room else []
        if not found:
            self._tree.release(path)
            return False
        self._tree.evict(len(found) - self._pool.free_count)
        blocks = self._pool.allocate(len(found))
        starts = range(start, start + len(found) * size, size)
        pieces = [tuple(contents[begin : begin + size]) for begin in starts]
        self._numbers += 1
        load = _Load(namespace, path, pieces, found, blocks, step, [request])
        self._loading[self._numbers] = load
        self._arriving |= dict.fromkeys(found, load)
        self._loads += [BlockLoad(self._numbers, key, block) for key, block in zip(found, blocks, strict=True)]
        request.asked_tier = True
        return True

    def loaded(self, number: int, count: int) -> "list[Request]":
        """The first `count` blocks of a load have arrived, the others will not; who waited for it.

        Nobody, if it was given up: with the steps that were undone.
        """
        load = self._loading.pop(number, None)
        if load is None:
            return []
        for tokens, block in zip(load.contents[:count], load.blocks, strict=False):
            parent = load.path[-1] if load.path else None
            node = self._tree.insert(load.namespace, parent, tokens, block, load.step)
            self._tree.acquire([node])
            load.path.append(node)
        self._end(load)
        return load.waiting

    def completed(self, step: int) -> None:
        """What the steps up to this one were to save is saved."""
        while self._saving and self._saving[0][0] <= step:
            self._saving.popleft()

    def undo(self) -> "list[Request]":
        """All steps on their way failed, and no load goes on; who waited for one."""
        loads = list(self._loading.values())
        self._loading, self._loads = {}, []
        for load in loads:
            self._end(load)
        self._tier.lose([key for _, key in self._saving])
        self._saving.clear()
        return [request for load in loads for request in load.waiting]

    def check_integrity(self, waiting: "Sequence[Request]") -> None:
        """Raise AssertionError if a block that is being loaded is shared, or somebody waits for none."""
        blocks = [block for load in self._loading.values() for block in load.blocks]
        assert all(self._pool.references(block) == 1 for block in blocks), "a block that is being loaded is shared"
        assert self._arriving.keys() == {key for load in self._loading.values() for key in load.keys}
        awaited = {request for load in self._loading.values() for request in load.waiting}
        assert awaited >= set(waiting), "a request waits for blocks that nobody loads"
        assert {load.load for load in self._loads} <= self._loading.keys(), "a load was given up and is still planned"

    def _save(self, node: Node) -> None:
        if len(node.tokens) == self._block_size and self._tree.is_written(node):
            key = self._tree.key(node)
            if self._tier.put(key, node.block):
                self._saves.append(BlockSave(node.block, key))

    def _end(self, load: _Load) -> None:
        self._tree.release(load.path)
        self._pool.release(load.blocks)
        self._tier.release(load.keys)
        for key in load.keys:
            del self._arriving[key]
