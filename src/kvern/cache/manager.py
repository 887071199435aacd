"""Which KV blocks each request owns: prefix match, allocation, copy of partial blocks, eviction, release.

    waiting --admit--> path of cached blocks acquired, head of a partial block copied, new blocks allocated
    running --extend-> one block more whenever the sequence crosses a block's end
            --publish> its blocks that are full and whose tokens are known enter the prefix tree
            --fork---> another request shares its full blocks and copies the head of the last one
    ended   --free---> references dropped; cached blocks stay in the tree until they are evicted

With a tier (`cache/tier.py`) evicted blocks may be kept elsewhere, and are fetched before admission.

Layers with a window may have blocks of their own (`cache/windows.py`), which are given back as the window passes.

The contiguous cache is the same code with blocks as long as the longest sequence: one block per request.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvern.cache.allocation import Allocation
from kvern.cache.block_pool import BlockPool
from kvern.cache.keys import contents_of
from kvern.cache.radix import NO_STATE, Node, RadixCache
from kvern.cache.states import StatePool, state_marks
from kvern.cache.tier import KVTier, TierTraffic
from kvern.cache.windows import WindowedBlocks, WindowLimits
from kvern.request.request import Request
from kvern.request.step import BlockCopy, SchedulerOutput


@dataclass
class CacheStatistics:
    """Prompt tokens looked up in the prefix cache, and how many of them it held."""

    queried_tokens: int = 0
    hit_tokens: int = 0


class KVCacheManager:
    """Owns the block pool and the prefix tree. Holds no tensor and decides the same given the same calls.

    With `prefix_cache` off, only requests of one group (the samples of one prompt) share blocks, and the group's
    blocks are dropped with it.
    """

    def __init__(
        self,
        capacity: int,
        block_size: int,
        prefix_cache: bool = True,
        identity: bytes = b"",
        tier: KVTier | None = None,
        states: int = 0,
        window: WindowLimits | None = None,
        states_apart: int = 1,
    ) -> None:
        """`identity` says which model's keys and values these are, for a tier, which knows blocks by content keys.

        `states`: how many states of sequences there are, for models that have them; at least one for each row.
        `states_apart`: tokens that a prompt's last state is behind the one before it, or is not worth a step.
        `window`: of layers that have block tables of their own.
        """
        if tier is not None and states:
            raise ValueError("a tier keeps blocks and no states: models with recurrent layers run without one")
        if window is not None and (tier is not None or states):
            raise ValueError("neither a tier nor states go together with block tables for layers with a window")
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.pool = BlockPool(window.positions if window is not None and window.positions else capacity)
        self.tree = RadixCache(self.pool, block_size, identity)
        self.tier = None if tier is None or not prefix_cache else TierTraffic(tier, self.pool, self.tree, block_size)
        self.states = StatePool(states) if states else None
        self._states_apart = states_apart
        self._at_marks: list[Request] = []
        """Whose state is to be kept as the step that is being planned leaves it."""
        if self.states is not None:
            self.tree.losing_state = self.states.drop
        self.windows: WindowedBlocks | None = None
        if window is not None:
            memory = BlockPool(capacity) if window.positions else self.pool
            self.windows = WindowedBlocks(memory, block_size, window)
            self.tree.losing_window = self.windows.drop
        self._blocks = Allocation(self.pool, self.tree, self.windows)
        self.statistics = CacheStatistics()
        self._groups: Counter[bytes] = Counter()  # requests alive in each private namespace

    @property
    def available_count(self) -> int:
        """Blocks that are free or can be made free by eviction; those of the first table, if it has its own."""
        return self._blocks.available_count

    @property
    def growth_count(self) -> int:
        """By how many blocks in each of their block tables sequences can grow."""
        return self._blocks.growth_count

    @property
    def usage(self) -> float:
        """Share of the blocks that running requests hold; what is merely cached can be evicted."""
        return self._blocks.usage

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` positions."""
        return -(-tokens // self.block_size)

    def register(self, request: Request) -> None:
        """Announce a request; to be called once, before anything else about it."""
        if not self.prefix_cache and request.group is not None:
            self._groups[_private(request.group)] += 1

    def forget(self, request: Request) -> None:
        """The counterpart of `register`: the request has ended and its blocks were freed."""
        if not self.prefix_cache and request.group is not None:
            namespace = _private(request.group)
            self._groups[namespace] -= 1
            if self._groups[namespace] == 0:
                del self._groups[namespace]
                self.tree.drop_namespace(namespace)

    def cached_tokens(self, request: Request) -> int:
        """How many of the request's tokens the prefix tree holds. Changes nothing."""
        namespace = self._namespace(request)
        if namespace is None:
            return 0
        path, _, shared = self._match(namespace, _contents(request), request.most_cached)
        return len(path) * self.block_size + shared

    def fetch(self, request: Request, step: int, reserve: int = 0) -> bool:
        """Have the tier bring what follows the cached prefix of a waiting request; whether it is to wait for that."""
        if self.tier is None or request.asked_tier:
            return False
        return self.tier.fetch(request, request.cache_namespace, _contents(request), step, reserve)

    def admit(self, request: Request, step: int, reserve: int = 0) -> list[BlockCopy] | None:
        """Give a waiting request its cached prefix and blocks for all tokens that it has now.

        Sets block_ids, nodes and num_computed_tokens and returns the copies to run before the step; None, and nothing
        changed, when there are not enough blocks to leave `reserve` of them for others.
        """
        tokens, namespace = _contents(request), self._namespace(request)
        path: list[Node] = []
        partial: Node | None = None
        shared = 0
        if namespace is not None:
            path, partial, shared = self._match(namespace, tokens, request.most_cached, step)
        self.tree.acquire(path)
        request.nodes = path
        needed, of_window = self.blocks_for(len(tokens)) - len(path), 0
        if self.windows is not None:
            room = self.windows.begin(request, path, len(path) * self.block_size + shared)
            of_window = self.windows.needed(request, room)
        resumed = partial if partial is not None else path[-1] if path else None
        if not self._blocks.fit(needed, of_window, reserve) or not self._give_state(request, resumed):
            if self.windows is not None:
                self.windows.leave(request, None)
            self.tree.release(path)
            request.nodes = []
            return None
        if partial is not None:
            self.tree.touch(partial)
        sources = () if partial is None else partial.windowed  # may be evicted now: they are copied before they change
        windowed, blocks = self._blocks.take(needed, of_window, partial)
        if self.windows is not None:
            self.windows.grow(request, windowed)
        self.pool.share(node.block for node in path)
        request.block_ids = [node.block for node in path] + blocks
        request.num_computed_tokens = len(path) * self.block_size + shared
        if namespace is not None and (self.states is not None or self.windows is not None):
            known = len(self.tree.match(namespace, tokens, request.most_cached)[0])
            if self.windows is not None:
                self.windows.mark(request, known)
            else:
                sizes = known * self.block_size, self.block_size, self._states_apart
                request.state_marks = state_marks(request, *sizes)
        if request.preemptions == 0:
            request.cached_tokens = request.num_computed_tokens
            self.statistics.queried_tokens += request.prompt_length
            self.statistics.hit_tokens += request.num_computed_tokens
        if partial is None or not shared:
            return []
        return self._blocks.copies(partial.block, blocks[0], sources, windowed, shared)

    def extend(self, request: Request, tokens: int) -> list[int] | None:
        """Make room for `tokens` positions in all; the new blocks, or None and no more of them when there are none."""
        needed, of_window = self.blocks_for(tokens) - len(request.block_ids), 0
        if self.windows is not None:
            self.windows.pass_by(request)
            of_window = self.windows.needed(request, tokens)
        if needed <= 0 and not of_window:
            return []
        needed = max(needed, 0)
        if not self._blocks.fit(needed, of_window):
            return None
        windowed, blocks = self._blocks.take(needed, of_window)
        if self.windows is not None:
            self.windows.grow(request, windowed)
        request.block_ids = request.block_ids + blocks
        return blocks

    def fork(self, parent: Request, child: Request) -> list[BlockCopy] | None:
        """Let `child`, which has no blocks, share what `parent` has computed.

        Sets block_ids, nodes and num_computed_tokens; returns the copies to run before either writes; None, and
        nothing changed, when there is no block for the part that cannot be shared.
        """
        full, tail = divmod(parent.num_computed_tokens, self.block_size)
        if tail and not self.growth_count:
            return None
        if self.states is not None:
            state = self.states.fork(parent.state_index)
            if state is None:
                return None
            child.state_index = state
        windowed, own = self._blocks.take(1, self._blocks.window_tables) if tail else ([], [])
        shared = parent.block_ids[:full]
        self.pool.share(shared)
        self.tree.acquire(parent.nodes)
        child.block_ids, child.nodes = shared + own, list(parent.nodes)
        child.num_computed_tokens = parent.num_computed_tokens
        sources = () if self.windows is None else self.windows.fork(parent, child, full, windowed)
        return self._blocks.copies(parent.block_ids[full], own[0], sources, windowed, tail) if own else []

    def publish(self, request: Request, step: int) -> None:
        """Enter the request's full blocks into the prefix tree, as far as their tokens are known and scheduled."""
        size = self.block_size
        full = min(request.num_computed_tokens, len(request.token_ids)) // size
        if full <= len(request.nodes):
            return
        namespace = self._namespace(request)
        if namespace is None:
            return
        contents = _contents(request)
        for index in range(len(request.nodes), full):
            parent = request.nodes[-1] if request.nodes else None
            tokens = tuple(contents[index * size : (index + 1) * size])
            node = self.tree.insert(namespace, parent, tokens, request.block_ids[index], step)
            self.tree.acquire([node])
            request.nodes.append(node)
            if self.windows is not None:
                self.windows.attach(request, index, node, step)
        if request.num_computed_tokens in request.state_marks:
            self._at_marks.append(request)

    def until_mark(self, request: Request) -> int:
        """How many tokens of a request come before a copy of its state is to be kept, or are left."""
        ahead = (mark - request.num_computed_tokens for mark in request.state_marks)
        return min([request.remaining_tokens, *(tokens for tokens in ahead if tokens > 0)])

    def free(self, request: Request, step: int) -> None:
        """Drop the request's references; the beginning of its last block stays cached too."""
        self.publish(request, step)
        namespace = self._namespace(request)
        start = len(request.nodes) * self.block_size
        known = min(request.num_computed_tokens, len(request.token_ids))
        end: Node | None = None
        if namespace is not None and self.prefix_cache and start < known:
            parent = request.nodes[-1] if request.nodes else None
            tail = tuple(_contents(request)[start:known])
            end = self.tree.insert_tail(namespace, parent, tail, request.block_ids[len(request.nodes)], step)
            if self.windows is not None and end is not None:
                self.windows.attach_tail(request, end, step)
        elif request.nodes and start == known:
            end = request.nodes[-1]
        has_state = request.state_index != NO_STATE  # of its last token, unless it was retracted
        if self.states is not None and has_state and end is not None and known == request.num_computed_tokens:
            self.states.keep(end, request.state_index, step)
            request.state_index = NO_STATE
        if self.windows is not None:
            self.windows.leave(request, known // self.block_size)
        self.drop(request)

    def drop(self, request: Request) -> None:
        """Drop the request's references; of its blocks only those stay cached that are in the tree already."""
        if self.windows is not None:
            self.windows.leave(request, None)
        self.tree.release(request.nodes)
        self.pool.release(reversed(request.block_ids))
        request.block_ids, request.nodes, request.num_computed_tokens = [], [], 0
        if self.states is not None and request.state_index != NO_STATE:
            self.states.release(request.state_index)
            request.state_index = NO_STATE

    def retract(self, request: Request) -> None:
        """The request was forked, and neither the head of its last block nor its state were copied yet."""
        request.num_computed_tokens -= request.num_computed_tokens % self.block_size
        if self.states is not None:
            self.states.release(request.state_index)
            request.state_index = NO_STATE

    def snapshot(self, request: Request, step: int) -> bool:
        """Keep a copy of a request's state as it is after `step`, the last one planned, if that ends a block.

        Whether its last token's node has a state now.
        """
        full, tail = divmod(request.num_computed_tokens, self.block_size)
        if self.states is None or tail or not full or len(request.nodes) != full:
            return False
        return self.states.snapshot(request.nodes[-1], request.state_index, step)

    def completed(self, step: int) -> None:
        """All steps up to this one have come back or were undone: what they computed is written."""
        self.tree.completed = step
        if self.tier is not None:
            self.tier.completed(step)

    def plan(self, output: SchedulerOutput) -> None:
        """Have the step, if there is to be one, copy states, and move what is to go to the tier and to come from it."""
        if self.tier is not None:
            self.tier.plan(output)
        if self.states is not None and output.scheduled:
            output.state_copies = self.states.plan(output.step)
            for request in self._at_marks:  # behind the plan: what they have then is for the next step to copy
                self.snapshot(request, output.step)
            self._at_marks.clear()
        if self.windows is not None:
            output.grown_windows += self.windows.grown()

    def loaded(self, load: int, count: int) -> list[Request]:
        """The first `count` blocks of a load have arrived, the others will not; the requests that waited for it."""
        return [] if self.tier is None else self.tier.loaded(load, count)

    def undo(self, step: int) -> list[Request]:
        """The steps from `step` on failed, and no request holds blocks; the requests that waited for loads."""
        self.completed(step - 1)
        waiting = [] if self.tier is None else self.tier.undo()
        if self.states is not None:
            self._at_marks.clear()
            self.states.forget_since(step)
        if self.windows is not None:
            self.windows.forget_since(step)
        self.tree.forget_since(step)
        return waiting

    def check_integrity(self, running: list[Request], loading: Sequence[Request] = ()) -> None:
        """Raise AssertionError unless every block is free, in the tree, being loaded, or owned by one of `running`.

        And unless those of `loading` wait for blocks.
        """
        if self.states is not None:
            self.states.check_integrity([request.state_index for request in running if request.state_index != NO_STATE])
        self.tree.check_integrity()
        owners = self.tree.size + sum(len(request.block_ids) for request in running)
        if self.tier is not None:
            self.tier.check_integrity(loading)
            owners += self.tier.block_count
        if self.windows is not None:
            owners += self.windows.check_integrity(self.tree.nodes(), running)
        self._blocks.check_integrity(owners)
        if not running and (self.tier is None or not self.tier.block_count):
            assert self.available_count == self.pool.capacity, "blocks are missing although nothing runs"
            assert self.usage == 0, "blocks of layers with a window are missing although nothing runs"

    def _match(
        self, namespace: bytes, contents: list[int], limit: int, step: int | None = None
    ) -> tuple[list[Node], Node | None, int]:
        """The longest cached prefix on which a request can go on in `step`; see `RadixCache.match`."""
        path, partial, shared = self.tree.match(namespace, contents, limit)
        if partial is not None and step is not None and max(partial.step, partial.window_step) >= step:
            partial, shared = None, 0  # computed by the very step that would copy it
        if self.windows is not None:
            path, partial, shared = self.windows.reachable(path, partial, shared)
        if self.states is not None:  # only where a state is kept, and so never within a block
            if partial is not None and (partial.state == NO_STATE or shared < len(partial.tokens)):
                partial, shared = None, 0
            while partial is None and path and path[-1].state == NO_STATE:
                path.pop()
        return path, partial, shared

    def _give_state(self, request: Request, resumed: Node | None) -> bool:
        """Give a request that resumes behind a node the state there, if the model has states."""
        if self.states is None:
            return True
        state_index = self.states.begin(resumed)
        request.state_index = NO_STATE if state_index is None else state_index
        return state_index is not None

    def _namespace(self, request: Request) -> bytes | None:
        """Who may share with this request; None: nobody."""
        if self.prefix_cache:
            return request.cache_namespace
        return None if request.group is None else _private(request.group)


def _private(group: str) -> bytes:
    """The namespace of a group where there is no prefix cache."""
    return b"group\x00" + group.encode()


def _contents(request: Request) -> list[int]:
    """What each of the request's positions holds; see `contents_of`."""
    return contents_of(request.token_ids, request.block_keys)
