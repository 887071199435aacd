"""The blocks of each request: prefix match, allocation, copies of partial blocks, eviction, release.

    waiting --admit--> shares the path of cached blocks, copies the head of a partial block, gets new blocks
    running --extend-> one block more whenever the sequence crosses the end of a block
            --publish> its full blocks whose tokens are known enter the prefix tree
            --fork---> another request shares its full blocks and copies the head of the last one
    ended   --free---> references are dropped; cached blocks stay in the tree until they are evicted

What a model or an option needs besides, such as windows, recurrent states and tiers, is an extension: see
`cache/extension.py`.

The contiguous cache is the same code with blocks as long as the longest sequence: one block per request.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from kvern.cache.allocation import Allocation
from kvern.cache.block_pool import BlockPool
from kvern.cache.journal import CacheJournal
from kvern.cache.keys import contents_of, edges_of
from kvern.cache.radix import CachedPrefix, CacheMemory, Node, RadixCache, SequenceEnd
from kvern.request.request import Request
from kvern.request.spans import cut
from kvern.request.step import BlockCopy, SchedulerOutput

if TYPE_CHECKING:
    from kvern.cache.extension import CacheExtension
    from kvern.cache.shared_prompt import SharedPrompt
    from kvern.request.events import EngineStatistics


MakeExtension = Callable[[CacheMemory], "CacheExtension"]
Extension = TypeVar("Extension", bound="CacheExtension")


@dataclass
class CacheStatistics:
    """Prompt tokens that were looked up in the prefix cache, and how many of them it had."""

    queried_tokens: int = 0
    hit_tokens: int = 0


class KVCacheManager:
    """Owns the block pool and the prefix tree. Holds no tensor, and the same calls give the same decisions.

    With `prefix_cache` off, only requests of one group (the samples of one prompt) share blocks, and the group's blocks
    are dropped with it.
    """

    def __init__(
        self,
        capacity: int,
        block_size: int,
        prefix_cache: bool = True,
        identity: bytes = b"",
        extensions: Sequence[MakeExtension] = (),
        positions: int = 0,
        chunk: int = 0,
    ) -> None:
        """`identity` names the model in content keys, which name blocks outside of the process.

        `positions`: of a model whose layers all have a window, how many blocks the prefix tree has; these are only
        numbers, and the `capacity` blocks of memory belong to an extension. 0: the prefix tree has the memory.
        `chunk`: of so many blocks are the chunks in which the capacity may change; 0: it stays.

        Raises ValueError for extensions that cannot be used together.
        """
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self._memory = memory = BlockPool(capacity, chunk)
        self._wanted_chunks = self._first_chunks = memory.chunks
        self.pool = BlockPool(positions) if positions else memory
        self.identity = identity
        self.tree = RadixCache(self.pool, block_size, identity)
        self.extensions: list[CacheExtension] = []
        parts = CacheMemory(self.pool, memory, self.tree, block_size, self.extensions)
        for make in extensions:
            self.extensions.append(make(parts))
        names = {extension.name for extension in self.extensions}
        for extension in self.extensions:
            if excluded := extension.excludes & names:
                raise ValueError(f"{extension.name} cannot be used together with {', '.join(sorted(excluded))}")
        self.counts_tokens = any(extension.counts_tokens for extension in self.extensions)
        """An extension has to be asked for each token; if not, they are asked for blocks alone."""
        self.tells_parts = any(extension.tells_parts for extension in self.extensions)
        """Other engines may load what was computed of a prompt while the rest is computed."""
        self.tree.losing += [extension.lose for extension in self.extensions]
        self.journal: CacheJournal | None = None
        """Knows which prefixes are cached, if somebody wants to know."""
        self._blocks = Allocation(parts, self.extensions)
        self.statistics = CacheStatistics()
        self._groups: Counter[bytes] = Counter()  # requests alive in each private namespace
        self._renewals = 0
        self._kept: set[Request] = set()
        """Requests whose blocks were computed with several weights: no other shares them."""

    def extension(self, kind: type[Extension]) -> Extension | None:
        """The extension of this class, if there is one."""
        return next((extension for extension in self.extensions if isinstance(extension, kind)), None)

    def watch(self, wanted: bool) -> None:
        """Keep a new journal from now on, or none. Where there is no prefix cache, none is kept."""
        if self.journal is not None:
            self.journal.close()
        self.journal = CacheJournal(self.tree) if wanted and self.prefix_cache else None

    @property
    def available_count(self) -> int:
        """Blocks of the prefix tree's pool that are free or can be made free by eviction."""
        return self._blocks.available(self.pool)

    @property
    def growth_count(self) -> int:
        """The number of blocks in each of their block tables by which requests can grow."""
        return self._blocks.growth_count

    @property
    def usage(self) -> float:
        """The share of the blocks that running requests hold; what is only cached can be evicted."""
        return 1 - self._blocks.available(self._memory) / self._memory.capacity

    @property
    def memory(self) -> BlockPool:
        """The blocks that take memory."""
        return self._memory

    @property
    def tables(self) -> Sequence[int]:
        """The block tables of requests, and those of each extension."""
        return self._blocks.tables

    def beyond(self, chunks: int, running: Iterable[Request]) -> list[Request]:
        """Returns the running requests with blocks beyond so many chunks, as far as that is known."""
        if self._memory.used_chunks <= chunks:
            return []
        limit = chunks * self._memory.chunk
        return [one for one in running if self._has_windows or any(block >= limit for block in one.block_ids)]

    def begin_with(self, chunks: int) -> None:
        """Have so many chunks of memory from now on, and again whenever it is emptied."""
        self._first_chunks = self.resize(chunks)

    def empty(self) -> None:
        """Forget all that is cached, of which no request has any, and have the memory again with which it began."""
        self.tree.clear()
        self.resize(self._first_chunks)

    def resize(self, chunks: int) -> int:
        """Have so many chunks of memory, or more if blocks of others are in use; returns how many.

        What is cached in others is lost.
        """
        if self._memory.used_chunks > chunks:
            if self._has_windows:
                self.tree.clear()
            else:
                self.tree.evict_from(chunks * self._memory.chunk)
        self._memory.resize(max(chunks, self._memory.used_chunks))
        self._wanted_chunks = chunks if self._loads_beyond(chunks) else self._memory.chunks
        for extension in self.extensions:
            extension.resized(self._memory.capacity)
        return self._memory.chunks

    @property
    def shrinks_to(self) -> int | None:
        """The chunks that it was to have, and can have now that loads have ended; None: it has no more than these."""
        chunks = self._wanted_chunks
        return None if chunks >= self._memory.chunks or self._loads_beyond(chunks) else chunks

    def _loads_beyond(self, chunks: int) -> bool:
        limit = self._memory.blocks_in(chunks)
        return any(extension.loads_beyond(limit) for extension in self.extensions)

    @property
    def _has_windows(self) -> bool:
        """True if blocks of an extension take the same memory."""
        return any(extension.pool is self._memory for extension in self.extensions)

    def blocks_for(self, tokens: int) -> int:
        """The number of blocks that hold `tokens` positions."""
        return -(-tokens // self.block_size)

    def register(self, request: Request) -> None:
        """Announce a request; to be called once, before anything else about it."""
        for extension in self.extensions:
            extension.arrived(request, _contents(request))
        if not self.prefix_cache and request.group is not None:
            self._groups[_private(request.group)] += 1

    def forget(self, request: Request) -> None:
        """The counterpart of `register`: the request has ended and its blocks were freed."""
        for extension in self.extensions:
            extension.forget(request)
        if not self.prefix_cache and request.group is not None:
            namespace = _private(request.group)
            self._groups[namespace] -= 1
            if self._groups[namespace] == 0:
                del self._groups[namespace]
                self.tree.drop_namespace(namespace)

    def cached_tokens(self, request: Request, step: int | None = None) -> int:
        """The number of the request's tokens that are cached for `step`; None: for any later step. Changes nothing."""
        return self._tokens_of(self._match(request, step))

    @property
    def is_loading(self) -> bool:
        """True if an extension holds blocks of which no running request knows, until a step brings its report."""
        return any(extension.is_loading for extension in self.extensions)

    @property
    def promised(self) -> int:
        """Blocks of each table that are left free for requests that wait for loads."""
        return sum(extension.promised for extension in self.extensions)

    def ready(self) -> list[Request]:
        """The requests that need not wait any longer, as extensions have found without a report."""
        return [request for extension in self.extensions for request in extension.ready()]

    def lookup(self, request: Request, step: int, reserve: int = 0) -> bool:
        """Let extensions bring more of a waiting request's prefix; returns whether it has to wait for one of them."""
        return any(extension.lookup(request, _contents(request), step, reserve) for extension in self.extensions)

    @property
    def prefetches(self) -> bool:
        """True if `prefetch` may do something."""
        return any(extension.prefetches for extension in self.extensions)

    def prefetch(
        self, request: Request, step: int, reserve: int, ahead: Callable[[], Sequence[tuple[int, int]]]
    ) -> bool:
        """Let extensions bring more of the prefix of a request that waits for others; see `CacheExtension`."""
        contents = partial(_contents, request)
        return any(extension.prefetch(request, contents, step, reserve, ahead) for extension in self.extensions)

    def awaits(self, request: Request, step: int) -> bool:
        """True if a waiting request, admitted now, would lack what its next tokens stand for."""
        if not request.spec.prompt.attachments:
            return False
        computed = self.cached_tokens(request, step)
        return any(extension.awaits(request, computed) for extension in self.extensions)

    def failed(self) -> list[tuple[Request, str]]:
        """The requests that cannot go on, and why."""
        return [pair for extension in self.extensions for pair in extension.failed()]

    def encode(self, tokens: float) -> float:
        """Add what extensions have to compute to the step that is planned; returns what that costs, in tokens."""
        return sum(extension.encode(tokens) for extension in self.extensions)

    def admit(self, request: Request, step: int, reserve: int = 0) -> list[BlockCopy] | None:
        """Give a waiting request its cached prefix and blocks for all tokens that it has now.

        Sets block_ids, nodes and num_computed_tokens and returns the copies to run before the step; None, and nothing
        changed, when there are not enough blocks to leave `reserve` of them for others.
        """
        tokens, prefix = len(request.token_ids), self._match(request, step)
        path, partial = prefix.path, prefix.partial
        self.tree.acquire(path)
        request.nodes = path
        for extension in self.extensions:
            extension.begin(request, prefix)
        needed = [self.blocks_for(tokens) - len(path), *self._needed(request, tokens)]
        if not self._blocks.fit(needed, reserve + self.promised) or not all(
            extension.has_room() for extension in self.extensions
        ):
            self._leave(request, None)
            self.tree.release(path)
            request.nodes = []
            return None
        if partial is not None:
            self.tree.touch(partial)
        sources = self._blocks_at(partial)  # may be evicted now: they are copied before they change
        taken = self._blocks.take(needed, partial)
        shared = [node.block for node in path]
        self.pool.share(shared)
        request.block_ids = shared + taken[0]
        request.num_computed_tokens = self._tokens_of(prefix)
        for extension, blocks in zip(self.extensions, taken[1:], strict=True):
            extension.take(request, blocks)
        if request.queue.preemptions == 0:
            request.answer.cached_tokens = request.num_computed_tokens
            self.statistics.queried_tokens += request.prompt_length
            self.statistics.hit_tokens += request.num_computed_tokens
        return self._blocks.copies(sources, taken, prefix.shared) if prefix.shared else []

    def extend(self, request: Request, tokens: int) -> list[int] | None:
        """Give the request blocks for `tokens` positions in all.

        Returns the new blocks of the first block table; None, and gives none, if there are not enough.
        """
        lacking = max(0, self.blocks_for(tokens) - len(request.block_ids))
        if not lacking and not self.counts_tokens:
            return []  # the most frequent case by far
        needed = [lacking, *self._needed(request, tokens)]
        if not any(needed):
            return []
        if not self._blocks.fit(needed):
            return None
        taken = self._blocks.take(needed)
        request.block_ids = request.block_ids + taken[0]
        for extension, blocks in zip(self.extensions, taken[1:], strict=True):
            extension.take(request, blocks)
        return taken[0]

    def placed(self, request: Request) -> None:
        """The request has got a row of the batch, with the blocks that it has."""
        for extension in self.extensions:
            extension.placed(request)

    def fork(self, parent: Request, child: Request) -> list[BlockCopy] | None:
        """Let `child`, which has no blocks, share what `parent` has computed.

        Sets block_ids, nodes and num_computed_tokens; returns the copies to run before either writes; None, and
        nothing changed, when there is no block for the part that cannot be shared.
        """
        full, tail = divmod(parent.num_computed_tokens, self.block_size)
        if (tail and not self.growth_count) or not all(extension.has_room() for extension in self.extensions):
            return None
        tables = self._blocks.tables
        taken: list[list[int]] = self._blocks.take(tables) if tail else [[] for _ in tables]
        shared = parent.block_ids[:full]
        self.pool.share(shared)
        self.tree.acquire(parent.nodes)
        child.block_ids, child.nodes = shared + taken[0], list(parent.nodes)
        child.num_computed_tokens = parent.num_computed_tokens
        if parent in self._kept:
            self._kept.add(child)
        sources: list[Sequence[int]] = [parent.block_ids[full : full + 1]]
        for extension, blocks in zip(self.extensions, taken[1:], strict=True):
            sources.append(extension.fork(parent, child, blocks))
        return self._blocks.copies(sources, taken, tail) if tail else []

    def publish(self, request: Request, step: int) -> None:
        """Enter the request's full blocks into the prefix tree, as far as their tokens are known and scheduled."""
        size = self.block_size
        full = min(request.num_computed_tokens, len(request.token_ids)) // size
        if full <= len(request.nodes):
            return
        namespace = self._namespace(request)
        if namespace is None:
            return
        nodes = request.nodes
        first = len(nodes)
        edges = edges_of(_contents(request)[first * size : full * size], size)
        grown = self.tree.grow(namespace, nodes, zip(edges, request.block_ids[first:full], strict=True), step)
        if self.extensions:
            for index, node in enumerate(grown, first):
                for extension in self.extensions:
                    extension.publish(request, index, node, step)

    def until(self, request: Request) -> int:
        """The number of the request's remaining tokens that the next step may compute."""
        tokens = request.remaining_tokens
        for extension in self.extensions:
            tokens = extension.until(request, tokens)
        return tokens

    def free(self, request: Request, step: int) -> None:
        """Drop the request's references; the beginning of its last block stays cached too."""
        if request in self._kept:
            self.drop(request)
            return
        self.publish(request, step)
        namespace = self._namespace(request)
        start = len(request.nodes) * self.block_size
        known = min(request.num_computed_tokens, len(request.token_ids))
        end: Node | None = None
        if namespace is not None and self.prefix_cache and start < known:
            parent = request.nodes[-1] if request.nodes else None
            tail = tuple(_contents(request)[start:known])
            end = self.tree.insert_tail(namespace, parent, tail, request.block_ids[len(request.nodes)], step)
        elif request.nodes and start == known:
            end = request.nodes[-1]
        self._leave(request, SequenceEnd(end, known, step))
        self.drop(request)

    def drop(self, request: Request) -> None:
        """Drop the request's references; of its blocks only those stay cached that are in the tree already."""
        self._leave(request, None)
        self._kept.discard(request)
        self.tree.release(request.nodes)
        self.pool.release(reversed(request.block_ids))
        request.block_ids = []
        request.nodes = []
        request.num_computed_tokens = 0

    def retract(self, request: Request) -> None:
        """The request was forked, and no step has copied yet what it cannot share."""
        request.num_computed_tokens -= request.num_computed_tokens % self.block_size
        for extension in self.extensions:
            extension.retract(request)

    def keep(self, requests: Iterable[Request]) -> None:
        """Let running requests go on with what they have, to which other weights add: no other shares it."""
        self._kept.update(requests)

    def renew(self) -> list[Request]:
        """Weights have changed; the requests that need not wait any longer.

        Namespaces of requests do that for prefixes; groups share nothing of before.
        """
        self._renewals += 1
        for namespace in self._groups:
            self.tree.rename(namespace, b"%s\0%d" % (namespace, self._renewals))
        return [request for extension in self.extensions for request in extension.renew()]

    def completed(self, step: int) -> None:
        """All steps up to this one have returned or were undone: what they computed is written."""
        self.tree.completed = step
        for extension in self.extensions:
            extension.completed(step)

    def plan(self, output: SchedulerOutput) -> None:
        """Add the extensions' messages to a step that is planned."""
        for extension in self.extensions:
            message = extension.plan(output)
            if message is not None:
                output.extensions[extension.name] = message

    def report(self, reports: Mapping[str, object]) -> list[Request]:
        """Give extensions what the worker's side has answered; returns the requests that need not wait any longer."""
        found: list[Request] = []
        for extension in self.extensions:
            if extension.name in reports:
                found += extension.report(reports[extension.name])
        return found

    def count(self, statistics: "EngineStatistics") -> None:
        """Write the cache's counters, and those of its extensions."""
        statistics.cached_tokens = self.statistics.hit_tokens
        statistics.queried_tokens = self.statistics.queried_tokens
        statistics.kv_cache_usage = self.usage
        for extension in self.extensions:
            extension.count(statistics)

    def shared(self, request: Request) -> "SharedPrompt | None":
        """Returns what other engines are to find of a prompt that is computed; None: nothing."""
        found = (extension.shared(request, _contents(request)) for extension in self.extensions)
        return next((each for each in found if each is not None), None)

    def shared_part(self, request: Request, tokens: int) -> "SharedPrompt | None":
        """Returns what `shared` does, of the first tokens of a prompt; None: they cannot be loaded alone."""
        found = (extension.shared_part(request, tokens) for extension in self.extensions)
        return next((each for each in found if each is not None), None)

    def bring(self, request: Request, reserve: Callable[[], int]) -> None:
        """Let extensions bring the prefix of a request that will come; `reserve`: see `CacheExtension`."""
        for extension in self.extensions:
            extension.bring(request, _contents(request), reserve)

    def close(self) -> None:
        """The engine ends."""
        for extension in self.extensions:
            extension.close()

    def undo(self, step: int, waiting: Sequence[Request]) -> None:
        """The steps from `step` on failed, and no request holds blocks; those of `waiting` wait for no report."""
        self.completed(step - 1)
        for extension in self.extensions:
            extension.undo(step, waiting)
        self.tree.forget_since(step)

    def check_integrity(self, running: Sequence[Request], loading: Sequence[Request] = ()) -> None:
        """Raise AssertionError unless every block is free, in the tree, owned by one of `running`, or an extension's.

        `loading`: the requests that are LOADING or ENCODING.
        """
        self.tree.check_integrity()
        references = self.tree.size + sum(len(request.block_ids) for request in running)
        owned = sum(extension.check(running, loading) for extension in self.extensions)
        self._blocks.check_integrity(references + owned)
        if not running and not self.is_loading:
            assert self.available_count == self.pool.capacity, "blocks are missing although nothing runs"
            assert self.usage == 0, "blocks of an extension are missing although nothing runs"

    def _match(self, request: Request, step: int | None) -> CachedPrefix:
        """The longest cached prefix from which a request can continue in `step`; None: in any later step."""
        namespace = self._namespace(request)
        if namespace is None:
            return CachedPrefix([], None, 0, -1)
        limit, spans = request.most_cached, request.spec.prompt.spans
        contents = _contents(request)
        while True:
            path, partial, shared = self.tree.match(namespace, contents, limit, request.cached_path)
            request.cached_path = path
            known = len(path)
            if partial is not None and step is not None and partial.step >= step:
                partial, shared = None, 0  # the step that would copy it is the one that computes it
            prefix = CachedPrefix(path, partial, shared, known)
            for extension in self.extensions:
                prefix = extension.match(prefix, step)
            tokens = self._tokens_of(prefix)
            limit = cut(spans, tokens)
            if limit == tokens:
                return prefix

    def _tokens_of(self, prefix: CachedPrefix) -> int:
        return len(prefix.path) * self.block_size + prefix.shared

    def _needed(self, request: Request, tokens: int) -> list[int]:
        """The blocks that the request lacks, for each extension."""
        return [extension.needed(request, tokens) for extension in self.extensions]

    def _blocks_at(self, node: Node | None) -> list[Sequence[int]]:
        """The blocks of a node in each member of the allocation."""
        if node is None:
            return [() for _ in self._blocks.tables]
        return [[node.block], *(extension.blocks_at(node) for extension in self.extensions)]

    def _leave(self, request: Request, end: SequenceEnd | None) -> None:
        for extension in self.extensions:
            extension.leave(request, end)

    def _namespace(self, request: Request) -> bytes | None:
        """Returns the namespace in which a request shares blocks; None if it shares with no other."""
        if request in self._kept:
            return None
        if self.prefix_cache:
            return request.cache_namespace
        return None if request.group is None else _private(request.group)


def _private(group: str) -> bytes:
    """The namespace of a group where there is no prefix cache."""
    return b"group\x00" + group.encode()


def _contents(request: Request) -> list[int]:
    """Returns the content of each of the request's positions; see `contents_of`."""
    return contents_of(request.token_ids, dict(request.spec.prompt.block_keys))
