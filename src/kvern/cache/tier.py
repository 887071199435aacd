"""Pages of the KV cache outside the device: which are saved and loaded, and who waits for them.

    the last block of a page is written, its step has returned --completed--> `saves` of the next step, which copies
        them before anything else
    a request arrives  --ask--> distant stores are asked which of its pages they have
    it is the next to run, and a tier has its next pages --lookup--> blocks are allocated; `loads` of the next step,
        which begin after it; the request is LOADING --report--> the blocks enter the prefix tree, and it is WAITING

A page has `page_blocks` blocks, and the content key (`cache/keys.py`) of the last. The scheduler asks an index
(`TierIndex`); the bytes are moved in the worker (`runner/tiered.py`). While loads are on their way the worker reports
with each step which of them have ended, with several ranks those that have ended on all. A load that fails is reported
as shorter and never raised: a step that raises has a request to blame. What was loaded is ordinary cached prefix: the
request is then admitted like any other, and so are all that waited for the same blocks.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise, takewhile
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import msgspec

from kvern.cache.extension import CacheExtension
from kvern.cache.keys import block_keys
from kvern.cache.messages import PageLoad, PageSave, TierIndex, TierMessage
from kvern.cache.radix import CacheMemory, Node
from kvern.request.events import EngineStatistics
from kvern.request.request import Request, State
from kvern.request.step import ExtensionMessage, SchedulerOutput

LEFT_OUT = -1
"""In the place of a block of a page that is not loaded."""


class _Page(NamedTuple):
    """A page of a prompt: the number of blocks up to its end, and the store that had it when it was looked for."""

    key: bytes
    end: int
    store: str


@dataclass(eq=False)
class _Load:
    """Pages that are being loaded to `blocks`, which follow `path`, whose nodes stay; no request has them yet.

    The first `known` blocks of the first page are in the path.
    """

    namespace: bytes
    path: list[Node]
    known: int
    contents: list[tuple[int, ...]]
    pages: list[_Page]
    blocks: list[int]
    step: int
    waiting: list[Request] = field(default_factory=list)


class TierTraffic(CacheExtension):
    """The transfers to and from a tier, and the requests that wait for loads."""

    name = TierMessage.extension
    excludes = frozenset({"states", "windows"})

    def __init__(self, tier: TierIndex, page_blocks: int, memory: CacheMemory) -> None:
        self._tier = tier
        self._page_blocks = page_blocks
        self._pool = memory.pool
        self._tree = memory.tree
        self._block_size = memory.block_size
        self._offers: dict[Node, None] = {}
        """Nodes that end a page and are not written yet."""
        self._saves: list[PageSave] = []
        self._loads: list[PageLoad] = []
        self._ended: list[int] = []
        self._completed = 0
        self._loading: dict[int, _Load] = {}
        self._arriving: dict[bytes, _Load] = {}
        self._numbers = 0
        self._asked: WeakSet[Request] = WeakSet()
        """Waiting requests for which a load was decided on, which happens once at most while a request waits."""
        self._stores = [*tier.figures()]
        self._came: WeakKeyDictionary[Request, list[tuple[str, int, int]]] = WeakKeyDictionary()
        """What has been loaded for waiting requests: the store, the first token of each page, and the one after it."""
        self._questions: dict[Request, int] = {}
        self._unanswered: dict[Request, None] = {}
        """Requests that wait for what distant stores answer."""

    @property
    def is_loading(self) -> bool:
        return bool(self._loading or self._unanswered or self._saves)

    def count(self, statistics: EngineStatistics) -> None:
        statistics.stores = self._tier.figures()

    def arrived(self, request: Request, contents: Sequence[int]) -> None:
        path, _, _ = self._tree.match(request.cache_namespace, contents, request.most_cached)
        question = self._tier.ask(key for key, _ in self._pages(request, path, contents))
        if question is not None:
            self._questions[request] = question

    def ready(self) -> list[Request]:
        found = [request for request in self._unanswered if self._tier.answered(self._questions[request])]
        for request in found:
            del self._unanswered[request]
        return found

    def forget(self, request: Request) -> None:
        self._questions.pop(request, None)
        self._unanswered.pop(request, None)

    def plan(self, output: SchedulerOutput) -> ExtensionMessage | None:
        """A step without requests runs if there are pages to move, or if no other step can report what has ended."""
        polls = bool(self._loading) and self._completed >= output.step - 1
        if not (output.scheduled or self._saves or self._loads or polls):
            return None
        message = TierMessage(self._saves, self._loads, self._ended)
        self._saves = []
        self._loads = []
        self._ended = []
        return message if message.saves or message.loads or message.ended or polls else None

    def publish(self, request: Request, index: int, node: Node, step: int) -> None:
        if (index + 1) % self._page_blocks == 0:
            self._offers[node] = None

    def completed(self, step: int) -> None:
        """Pages that are written now are saved by the next step, whatever it evicts."""
        self._completed = step
        for node in [*takewhile(self._tree.is_written, self._offers)]:
            del self._offers[node]
            key = self._tree.key(node)
            if self._tier.wants(key):
                self._saves.append(PageSave(key, [self._blocks_of(node)]))

    def _blocks_of(self, node: Node) -> list[int]:
        """The blocks of the page that ends with a node."""
        blocks = [node.block]
        while len(blocks) < self._page_blocks:
            assert node.parent is not None
            node = node.parent
            blocks.append(node.block)
        return blocks[::-1]

    def _pages(self, request: Request, path: Sequence[Node], contents: Sequence[int]) -> Iterator[tuple[bytes, int]]:
        """The pages of a prompt that end behind a path: their keys, and the numbers of blocks up to their ends."""
        size, known = self._block_size, len(path)
        parent = self._tree.key(path[-1]) if path else self._tree.root_key(request.cache_namespace)
        keys = block_keys(parent, contents[known * size : request.most_cached], size)
        return ((key, end) for end, key in enumerate(keys, known + 1) if end % self._page_blocks == 0)

    def lookup(self, request: Request, contents: Sequence[int], step: int, reserve: int) -> bool:
        """Load the pages that follow what the prefix tree has of a request, if the tier has any and it pays.

        None are loaded for a request that would not fit now, with `reserve` blocks left for others.
        """
        if request in self._asked:
            return False
        if request in self._questions and not self._tier.answered(self._questions[request]):
            self._unanswered[request] = None
            return True
        path, _, _ = self._tree.match(request.cache_namespace, contents, request.most_cached)
        pages = self._pages(request, path, contents)
        first = next(pages, None)
        if first is None:
            return False
        if first[0] in self._arriving:
            self._arriving[first[0]].waiting.append(request)
            return True
        start = len(path) * self._block_size
        if not self._fits(path, -(-(len(contents) - start) // self._block_size) + reserve):
            return False
        found = [*self._kept(chain([first], pages))]
        if not found:
            return False
        self._asked.add(request)
        if not self._tier.pays([page.key for page in found], start, found[-1].end * self._block_size):
            return False
        self._begin(request, path, contents, found, step)
        return True

    def _kept(self, pages: Iterable[tuple[bytes, int]]) -> Iterator[_Page]:
        """The leading pages that a store has."""
        for key, end in pages:
            store = self._tier.source(key)
            if store is None:
                return
            yield _Page(key, end, store)

    def _fits(self, path: Sequence[Node], blocks: int) -> bool:
        unused = sum(not node.users for node in path)
        return blocks <= self._pool.free_count + self._tree.evictable_count - unused

    def _begin(
        self, request: Request, path: list[Node], contents: Sequence[int], pages: list[_Page], step: int
    ) -> None:
        """Load pages that follow a path."""
        size, known = self._block_size, len(path) % self._page_blocks
        count = len(pages) * self._page_blocks - known
        self._tree.acquire(path)
        self._tree.evict(count - self._pool.free_count)
        blocks = self._pool.allocate(count)
        starts = range(len(path) * size, (len(path) + count) * size, size)
        pieces = [tuple(contents[begin : begin + size]) for begin in starts]
        self._numbers += 1
        load = _Load(request.cache_namespace, path, known, pieces, pages, blocks, step, [request])
        self._loading[self._numbers] = load
        self._arriving |= {page.key: load for page in pages}
        targets = [LEFT_OUT] * known + blocks
        for place, page in enumerate(pages):
            own = targets[place * self._page_blocks : (place + 1) * self._page_blocks]
            self._loads.append(PageLoad(self._numbers, page.key, [own]))

    def placed(self, request: Request) -> None:
        self._asked.discard(request)
        came = self._came.pop(request, [])
        if request.queue.preemptions == 0:
            loaded = dict.fromkeys(self._stores, 0)
            for store, first, end in came:
                loaded[store] += max(0, min(end, request.answer.cached_tokens) - first)
            request.answer.loaded_tokens = loaded

    def report(self, report: object) -> list[Request]:
        """Enter loaded pages into the prefix tree; the requests that waited. `report`: (load, first pages that came).

        A load that was given up, with the steps that were undone, is ignored.
        """
        return [request for number, count in _pairs(report) for request in self.loaded(number, count)]

    def loaded(self, number: int, count: int) -> list[Request]:
        """The first `count` pages of a load have arrived, and the others will not; the requests that waited for it."""
        load = self._loading.pop(number, None)
        if load is None:
            return []
        self._ended.append(number)
        blocks = max(0, count * self._page_blocks - load.known)
        for tokens, block in zip(load.contents[:blocks], load.blocks, strict=False):
            parent = load.path[-1] if load.path else None
            node = self._tree.insert(load.namespace, parent, tokens, block, load.step)
            self._tree.acquire([node])
            load.path.append(node)
        self._note(load, count)
        self._end(load)
        return load.waiting

    def _note(self, load: _Load, count: int) -> None:
        """Remember from where the first pages of a load have come, for all that waited for them."""
        first = load.pages[0].end - self._page_blocks + load.known
        bounds = [blocks * self._block_size for blocks in (first, *(page.end for page in load.pages[:count]))]
        pages = [(page.store, *span) for page, span in zip(load.pages, pairwise(bounds), strict=False)]
        for request in load.waiting:
            self._came.setdefault(request, []).extend(pages)

    def undo(self, step: int, waiting: Sequence[Request]) -> None:
        """All loads are given up; the requests do without them, whatever failed."""
        loads = list(self._loading.values())
        self._ended += self._loading
        self._loading = {}
        self._loads = []
        self._saves = []
        self._unanswered.clear()
        for load in loads:
            self._end(load)
        self._asked.update(waiting)

    def lose(self, node: Node) -> None:
        self._offers.pop(node, None)

    def check(self, running: Sequence[Request], loading: Sequence[Request]) -> int:
        blocks = [block for load in self._loading.values() for block in load.blocks]
        assert all(self._pool.references(block) == 1 for block in blocks), "a block that is being loaded is shared"
        assert self._arriving.keys() == {key for load in self._loading.values() for key, *_ in load.pages}
        awaited = {request for load in self._loading.values() for request in load.waiting} | self._unanswered.keys()
        assert awaited >= {request for request in loading if request.state is State.LOADING}, (
            "a request waits for blocks that nobody loads"
        )
        assert self._offers.keys() <= set(self._tree.nodes()), "a block is offered that was removed"
        assert {load.load for load in self._loads} <= self._loading.keys(), "a load was given up and is still planned"
        return len(blocks)

    def _end(self, load: _Load) -> None:
        self._tree.release(load.path)
        self._pool.release(load.blocks)
        for page in load.pages:
            del self._arriving[page.key]


def _pairs(report: object) -> list[tuple[int, int]]:
    return msgspec.convert(report, list[tuple[int, int]])
