"""A store beside the blocks that keeps their bytes: host memory, a disk, a cache server, another machine's engine.

    a full block is written, its step has returned --put--> `saves` of the next step: copied before anything else
    a waiting request continues in the tier --acquire--> blocks are allocated; `loads` of the next step, which begin
        after it; the request is LOADING --report--> the blocks enter the prefix tree, the request is WAITING

The scheduler asks a tier's index (`TierIndex`), by content keys (`cache/keys.py`); the tier's other half moves the
bytes in the worker (`Tier` in `runner/tiered.py`). While loads are on their way the worker reports with each step which
of them have ended, with several ranks those that have ended on all. A load that fails is reported as shorter and never
raised: a step that raises has a request to blame. What was loaded is ordinary cached prefix: the request is then
admitted like any other, and so are all that waited for the same blocks.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from weakref import WeakSet

import msgspec

from kvern.cache.extension import CacheExtension, CacheMemory
from kvern.cache.keys import block_keys
from kvern.cache.messages import BlockLoad, BlockSave, TierIndex, TierMessage
from kvern.cache.radix import Node
from kvern.request.request import Request, State
from kvern.request.step import ExtensionMessage, SchedulerOutput

MOST_SAVES = 32
"""Blocks that a step saves at most. The others are saved with later steps, or when they are evicted."""


@dataclass(eq=False)
class _Load:
    """Blocks that are being loaded: they follow `path`, whose nodes stay, and no request has them yet."""

    namespace: bytes
    path: list[Node]
    contents: list[tuple[int, ...]]
    keys: list[bytes]
    blocks: list[int]
    step: int
    waiting: list[Request] = field(default_factory=list)


class TierTraffic(CacheExtension):
    """The transfers to and from a tier, and the requests that wait for loads."""

    name = TierMessage.extension
    excludes = frozenset({"states", "windows"})

    def __init__(self, tier: TierIndex, memory: CacheMemory) -> None:
        self._tier = tier
        self._pool = memory.pool
        self._tree = memory.tree
        self._block_size = memory.block_size
        self._offers: dict[Node, None] = {}
        """Nodes that the tier has not been asked about, in the order in which their blocks are written."""
        self._saves: list[BlockSave] = []
        self._loads: list[BlockLoad] = []
        self._ended: list[int] = []
        self._completed = 0
        self._saving: deque[tuple[int, bytes]] = deque()  # by the steps in flight
        self._loading: dict[int, _Load] = {}
        self._arriving: dict[bytes, _Load] = {}
        self._numbers = 0
        self._asked: WeakSet[Request] = WeakSet()
        """Waiting requests for which blocks were loaded, which happens once at most while a request waits."""

    @property
    def is_loading(self) -> bool:
        return bool(self._loading)

    def plan(self, output: SchedulerOutput) -> ExtensionMessage | None:
        """A step without requests runs if there are blocks to load, or if no other step can report what has ended."""
        polls = bool(self._loading) and self._completed >= output.step - 1
        if not (output.scheduled or self._loads or polls):
            return None
        self._offer()
        message = TierMessage(self._saves, self._loads, self._ended)
        self._saving += [(output.step, save.key) for save in self._saves]
        self._saves = []
        self._loads = []
        self._ended = []
        return message if message.saves or message.loads or message.ended or polls else None

    def publish(self, request: Request, index: int, node: Node, step: int) -> None:
        self._offers[node] = None

    def _offer(self) -> None:
        """Ask the tier whether it wants the blocks that have been written since."""
        while self._offers and len(self._saves) < MOST_SAVES:
            node = next(iter(self._offers))
            if not self._tree.is_written(node):
                return
            del self._offers[node]
            self._put(node)

    def _put(self, node: Node) -> None:
        key = self._tree.key(node)
        if self._tier.put(key, node.block):
            self._saves.append(BlockSave(node.block, key))

    def lookup(self, request: Request, contents: Sequence[int], step: int, reserve: int) -> bool:
        """Load the blocks that follow what the prefix tree has of a request, if the tier has any.

        None are loaded for a request that would not fit now, with `reserve` blocks left for others.
        """
        if request in self._asked:
            return False
        size = self._block_size
        limit = request.most_cached
        namespace = request.cache_namespace
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
        self._asked.add(request)
        return True

    def placed(self, request: Request) -> None:
        self._asked.discard(request)

    def report(self, report: object) -> list[Request]:
        """Enter what has arrived into the prefix tree: pairs of a load's number and the count of its leading blocks.

        A load that was given up, with the steps that were undone, is ignored.
        """
        return [request for number, count in _pairs(report) for request in self.loaded(number, count)]

    def loaded(self, number: int, count: int) -> list[Request]:
        """The first `count` blocks of a load have arrived, and the others will not; the requests that waited for it."""
        load = self._loading.pop(number, None)
        if load is None:
            return []
        self._ended.append(number)
        for tokens, block in zip(load.contents[:count], load.blocks, strict=False):
            parent = load.path[-1] if load.path else None
            node = self._tree.insert(load.namespace, parent, tokens, block, load.step)
            self._tree.acquire([node])
            load.path.append(node)
        self._end(load)
        return load.waiting

    def completed(self, step: int) -> None:
        self._completed = step
        while self._saving and self._saving[0][0] <= step:
            self._saving.popleft()

    def undo(self, step: int, waiting: Sequence[Request]) -> None:
        """All loads are given up; the requests do without them, whatever failed."""
        loads = list(self._loading.values())
        self._ended += self._loading
        self._loading, self._loads = {}, []
        for load in loads:
            self._end(load)
        self._tier.lose([key for _, key in self._saving])
        self._saving.clear()
        self._asked.update(waiting)

    def lose(self, node: Node) -> None:
        """A written block that the tier has not been asked about is offered now: the next step saves it first."""
        if node in self._offers:
            del self._offers[node]
            if self._tree.is_written(node):
                self._put(node)

    def check(self, running: Sequence[Request], loading: Sequence[Request]) -> int:
        blocks = [block for load in self._loading.values() for block in load.blocks]
        assert all(self._pool.references(block) == 1 for block in blocks), "a block that is being loaded is shared"
        assert self._arriving.keys() == {key for load in self._loading.values() for key in load.keys}
        awaited = {request for load in self._loading.values() for request in load.waiting}
        assert awaited >= {request for request in loading if request.state is State.LOADING}, (
            "a request waits for blocks that nobody loads"
        )
        assert self._offers.keys() <= set(self._tree.nodes()), "a block is offered that was removed"
        assert {load.load for load in self._loads} <= self._loading.keys(), "a load was given up and is still planned"
        return len(blocks)

    def _end(self, load: _Load) -> None:
        self._tree.release(load.path)
        self._pool.release(load.blocks)
        self._tier.release(load.keys)
        for key in load.keys:
            del self._arriving[key]


def _pairs(report: object) -> list[tuple[int, int]]:
    return msgspec.convert(report, list[tuple[int, int]])
