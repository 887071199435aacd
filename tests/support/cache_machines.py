"""Hypothesis state machines of the block pool and of the KV cache manager."""

from collections import Counter
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from itertools import takewhile
from operator import eq

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvern.cache.block_pool import BlockPool
from kvern.cache.messages import NO_STATE, PageLoad, StateMessage, TierMessage, WindowLimits
from kvern.cache.radix import Node, RadixCache
from kvern.cache.states import StatePool
from kvern.cache.tier import TierTraffic
from kvern.cache.windows import WindowedBlocks
from kvern.request.request import PromptInput, Request, RequestSpec, State
from kvern.request.sampling_params import ResolvedParams
from kvern.request.step import ScheduledTokens, SchedulerOutput
from tests.support.simulated_device import make_cache
from tests.support.simulated_tier import SimulatedTier


class PoolMachine(RuleBasedStateMachine):
    """The pool beside a counter of owners."""

    CAPACITY = 6
    CHUNK = 4

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.CAPACITY, self.CHUNK)
        self.owners: Counter[int] = Counter()
        self.size = self.CAPACITY

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        free = self.size - len(self.owners)
        if count > free:
            with pytest.raises(IndexError, match=f"{count} blocks were asked for and {free} of {self.size} are free"):
                self.pool.allocate(count)
        else:
            blocks = self.pool.allocate(count)
            assert len(set(blocks)) == count and not self.owners.keys() & set(blocks)
            low = [block for block in range(self.CHUNK) if not self.owners[block] and block not in blocks]
            assert not low or max(blocks, default=0) < self.CHUNK, "low numbers come first"
            self.owners.update(blocks)

    @rule(chunks=st.integers(0, 3))
    def resize(self, chunks: int) -> None:
        if chunks in (1, 2) and max(self.owners, default=0) < chunks * self.CHUNK:
            self.pool.resize(chunks)
            self.size = min(chunks * self.CHUNK, self.CAPACITY)
        else:
            with pytest.raises(ValueError, match=f"{chunks} chunks of blocks"):
                self.pool.resize(chunks)
        assert self.pool.used_chunks == -(-(1 + max(self.owners, default=-1)) // self.CHUNK)

    @rule(block=st.integers(0, CAPACITY - 1))
    def share(self, block: int) -> None:
        if block in self.owners:
            self.pool.share([block])
            self.owners[block] += 1
        else:
            with pytest.raises(ValueError, match="cannot be shared"):
                self.pool.share([block])

    @rule(block=st.integers(0, CAPACITY - 1))
    def release(self, block: int) -> None:
        if block in self.owners:
            self.pool.release([block])
            self.owners -= Counter([block])
        else:
            with pytest.raises(ValueError, match="released more often"):
                self.pool.release([block])

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity()
        assert (self.pool.capacity, self.pool.free_count) == (self.size, self.size - len(self.owners))
        assert [self.pool.references(block) for block in range(self.CAPACITY)] == [
            self.owners[block] for block in range(self.CAPACITY)
        ]


LIMIT = 20
"""Tokens of the longest sequence."""


def nodes_of(tree: RadixCache, namespace: bytes) -> Iterator[tuple[tuple[int, ...], Node]]:
    """Every node with the tokens from the root to its end."""
    root = tree._roots.get(namespace)
    pending = [((), root)] if root is not None else []
    while pending:
        tokens, node = pending.pop()
        for child in node.children.values():
            yield tokens + child.tokens, child
            pending.append((tokens + child.tokens, child))


class CacheMachine(RuleBasedStateMachine):
    """Requests that are admitted, computed and freed in any order, with what is written in each block remembered."""

    @initialize(
        block_size=st.integers(1, 5),
        spare=st.integers(0, 8),
        prefix_cache=st.booleans(),
        kept=st.sampled_from((None, None, 2, 20)),
        states=st.sampled_from((0, 0, 1, 3, 12)),
        window=st.one_of(st.none(), st.builds(WindowLimits, *(st.integers(1, most) for most in (7, 2, 6)))),
        whole=st.booleans(),
        page_blocks=st.integers(1, 3),
        lies=st.sampled_from((0.0, 0.0, 0.3)),
        chunk=st.sampled_from((0, 1, 3)),
    )
    def start(
        self,
        block_size: int,
        spare: int,
        prefix_cache: bool,
        kept: int | None,
        states: int,
        window: WindowLimits | None,
        whole: bool,
        page_blocks: int,
        lies: float,
        chunk: int,
    ) -> None:
        states = states if window is None else 0
        columns, self.whole = -(-LIMIT // block_size), whole or window is None
        blocks = columns * (self.whole + (0 if window is None else window.tables)) + spare
        if window is not None and not whole:
            window = replace(window, positions=columns + spare)
        self.tier = None if kept is None else SimulatedTier(kept, lies)
        tier, pool = self.tier, BlockPool(blocks, chunk)
        self.cache = make_cache(pool, block_size, prefix_cache, tier, states, window, page_blocks)
        self.windows, self.pool = self.cache.extension(WindowedBlocks), self.cache.extension(StatePool)
        self.states: list[object] = [None] * states
        """The key of all tokens before this one, as `key`; () at the beginning."""
        self.seen: list[list[int]] = []
        self.loads: dict[int, list[PageLoad]] = {}
        self.loading: list[Request] = []
        self.memory: list[list[object]] = [[None] * block_size for _ in range(blocks)]
        self.running: list[Request] = []
        self.steps = 0
        self.groups: dict[str, list[int]] = {}

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=LIMIT - 1),
        namespace=st.sampled_from((b"", b"", b"other")),
        group=st.sampled_from((None, None, "a", "b")),
        scored_from=st.sampled_from((None, None, 1, 2, 5)),
        reserve=st.integers(0, 2),
        like=st.sampled_from((None, 0, 1, 2, 3)),
    )
    def admit(
        self,
        tokens: list[int],
        namespace: bytes,
        group: str | None,
        scored_from: int | None,
        reserve: int,
        like: int | None,
    ) -> None:
        if like is not None and self.seen:
            tokens = [*self.seen[-1 - like % len(self.seen)], *tokens][: LIMIT - 1]
        self.seen.append(tokens)
        if group is not None:
            tokens = list(self.groups.setdefault(group, tokens))
            namespace = b""
        params = ResolvedParams(n=1 if group is None else 2)
        if scored_from is not None:
            params = params.replace(prompt_logprobs=0, prompt_logprobs_from=scored_from)
        request = Request(RequestSpec(group or "", PromptInput(tokens), params, LIMIT, namespace=namespace))
        self.steps += 1
        self.cache.register(request)
        self.try_to_admit(request, reserve)

    def try_to_admit(self, request: Request, reserve: int) -> None:
        fetched = self.cache.lookup(request, self.steps, reserve)
        self.move()
        if fetched:
            self.loading.append(request)
            request.state = State.LOADING
            return
        request.state = State.WAITING
        expected = self.longest_cached(request)
        available, predicted = self.cache.available_count, self.cache.cached_tokens(request)
        assert predicted == expected
        copies = self.cache.admit(request, self.steps, reserve)
        if copies is None:
            assert not request.block_ids and self.cache.available_count == available
            new = self.cache.blocks_for(len(request.token_ids)) - expected // self.cache.block_size
            unused = sum(node.users == 0 for node in self.path_of(request))
            windows = self.windows
            lacks = new + unused + reserve > available
            if windows is not None:
                tables, of_window = windows.limits.tables, self.lacking(windows, request, expected)
                if self.whole:
                    lacks = new + unused + of_window + reserve * (1 + tables) > available
                else:
                    lacks |= of_window + reserve * tables > windows.available_count
            all_states = self.pool is not None and len(self.running) == self.pool.capacity
            assert all_states or lacks, "the request would have fitted"
            self.cache.forget(request)
            return
        self.move()
        assert self.cache.available_count >= reserve
        assert request.num_computed_tokens == request.answer.cached_tokens == expected < len(request.token_ids)
        assert len(request.block_ids) == self.cache.blocks_for(len(request.token_ids))
        for head in copies:
            self.memory[head.target][: head.tokens] = self.memory[head.source][: head.tokens]
        tables = 0 if self.windows is None else self.windows.limits.tables
        assert len(copies) in (0, self.whole + tables)
        request.state = State.RUNNING
        self.running.append(request)
        self.read(request)

    @precondition(lambda self: getattr(self, "seen", None))
    @rule(like=st.integers(0, 3), more=st.lists(st.integers(0, 1), max_size=4), reserve=st.integers(0, 2))
    def bring(self, like: int, more: list[int], reserve: int) -> None:
        """What stores have of a prompt that will come is loaded, and nobody waits for it yet."""
        tokens = [*self.seen[-1 - like % len(self.seen)], *more][: LIMIT - 1]
        self.steps += 1
        self.cache.bring(Request(RequestSpec("", PromptInput(tokens), ResolvedParams(), LIMIT)), lambda: reserve)
        self.move()

    @precondition(lambda self: self.running)
    @rule(place=st.integers(0, 99), count=st.integers(1, 6), next_token=st.integers(0, 1))
    def compute(self, place: int, count: int, next_token: int) -> None:
        """Some more tokens of one request; after the last one comes another, as far as blocks reach."""
        request = self.running[place % len(self.running)]
        if request.remaining_tokens == 0:
            if len(request.token_ids) == LIMIT or self.cache.extend(request, len(request.token_ids) + 1) is None:
                return
            request.token_ids.append(next_token)
            self.move()
        elif self.windows is not None:
            count = min(count, self.windows.limits.step_tokens)
            until = min(request.num_computed_tokens + count, len(request.token_ids))
            if self.cache.extend(request, until) is None:
                return
            held = len(self.windows.window_of(request).blocks) * self.cache.block_size
            assert held <= self.windows.limits.held_tokens + 2 * self.cache.block_size
        self.steps += 1
        for position in range(
            request.num_computed_tokens, min(request.num_computed_tokens + count, len(request.token_ids))
        ):
            block, offset = divmod(position, self.cache.block_size)
            if self.whole:
                self.memory[request.block_ids[block]][offset] = self.key(request, position)
            for table, part in enumerate(self.windowed(request, block)):
                self.memory[part][offset] = (table, self.key(request, position))
            if self.pool is not None:
                state = self.pool.state_of(request)
                before = self.key(request, position - 1) if position else ()
                assert self.states[state] == before, "the state is not that of all tokens before"
                self.states[state] = self.key(request, position)
            request.num_computed_tokens = position + 1
        self.read(request)
        self.cache.publish(request, self.steps)

    @precondition(lambda self: self.running)
    @rule(place=st.integers(0, 99))
    def free(self, place: int) -> None:
        request = self.running.pop(place % len(self.running))
        known = request.token_ids[: request.num_computed_tokens]
        self.cache.free(request, self.steps)
        if self.cache.prefix_cache and self.pool is None:
            path, _, partial = self.cache.tree.match(request.cache_namespace, known, len(known))
            assert len(path) * self.cache.block_size + partial == len(known), "what was computed is not cached"
        request.state = State.FINISHED
        self.cache.forget(request)
        if not any(other.group == request.group for other in self.running):
            self.groups.pop(request.group or "", None)

    @precondition(lambda self: self.running)
    @rule(place=st.integers(0, 99))
    def snapshot(self, place: int) -> None:
        if self.pool is not None:
            self.pool.snapshot(self.running[place % len(self.running)], self.steps)
        self.move()

    @precondition(lambda self: self.running)
    @rule(place=st.integers(0, 99), next_token=st.integers(0, 1))
    def fork(self, place: int, next_token: int) -> None:
        """Another goes on behind what a request has computed."""
        parent = self.running[place % len(self.running)]
        known = parent.token_ids[: parent.num_computed_tokens]
        if not known or len(known) == LIMIT or (parent.num_computed_tokens < parent.prompt_length):
            return
        child = copy(parent)
        child.token_ids = [*known, next_token]
        child.block_ids, child.nodes, child.num_computed_tokens = [], [], 0
        copies = self.cache.fork(parent, child)
        if copies is None:
            assert not child.block_ids and (self.pool is None or self.pool.state_of(child) == NO_STATE)
            return
        self.move()
        for head in copies:
            self.memory[head.target][: head.tokens] = self.memory[head.source][: head.tokens]
        if self.cache.extend(child, len(child.token_ids)) is None:
            self.cache.drop(child)
            return
        self.move()
        self.cache.register(child)
        child.state = State.RUNNING
        self.running.append(child)
        self.read(child)

    @precondition(lambda self: self.running)
    @rule(place=st.integers(0, 99))
    def finish(self, place: int) -> None:
        """All that is left of a request; its step comes back."""
        request = self.running[place % len(self.running)]
        if request.remaining_tokens:
            self.compute(place, request.remaining_tokens, 0)
        self.free(place)
        self.complete()

    @rule()
    def complete(self) -> None:
        """All steps so far have come back."""
        self.cache.completed(self.steps)

    @precondition(lambda self: getattr(self, "loads", None))
    @rule(place=st.integers(0, 99), lost=st.sampled_from((0, 0, 0, 1, 9)), reserve=st.integers(0, 2))
    def deliver(self, place: int, lost: int, reserve: int) -> None:
        """The blocks of a load arrive, or only the first of them."""
        tier = self.cache.extension(TierTraffic)
        assert tier is not None
        number = sorted(self.loads)[place % len(self.loads)]
        loads = self.loads.pop(number)
        arrived = loads[: max(0, len(loads) - lost)]
        assert self.tier is not None
        report = {tier.name: [(number, self.tier.bring(loads, len(arrived), self.memory, self.states))]}
        waiting = self.cache.report(report)
        assert not self.cache.report(report)
        self.loading = [request for request in self.loading if request not in waiting]
        self.agrees()
        self.steps += 1
        for request in waiting:
            self.try_to_admit(request, reserve)

    @rule()
    def answer(self) -> None:
        """Distant stores may have answered: requests wait no longer for that, and pages of coming ones are loaded."""
        if not hasattr(self, "cache"):
            return
        self.steps += 1
        waiting = self.cache.ready()
        self.move()
        self.loading = [request for request in self.loading if request not in waiting]
        for request in waiting:
            self.try_to_admit(request, 0)

    def move(self) -> None:
        """Performs the moves of the next step; its writes come between saves and loads."""
        output = SchedulerOutput(self.steps, scheduled=[ScheduledTokens(0, 0, 1, 0)])
        self.cache.plan(output)
        states, tier = output.message(StateMessage), output.message(TierMessage)
        for save in () if tier is None else tier.saves:
            assert self.tier is not None
            self.tier.keep(save, self.memory, self.states)
        for source, target in () if states is None else states.copies:
            self.states[target] = () if source == NO_STATE else self.states[source]
        for load in () if tier is None else tier.loads:
            assert self.tier is not None
            self.loads.setdefault(load.load, []).append(load)
            self.tier.begin(load, self.memory, self.states)

    @rule(count=st.integers(1, 20), complete=st.booleans())
    def evict(self, count: int, complete: bool) -> None:
        if complete:
            self.complete()
        tree = self.cache.tree
        oldest = list(tree._unused)[:count]
        size, available = tree.size, self.cache.available_count
        tree.evict(count)
        assert size - tree.size == len(oldest) and self.cache.available_count == available
        assert not set(oldest) & set(tree._unused), "not the least recently used went"

    @rule(share=st.floats(0, 1))
    def resize(self, share: float) -> None:
        """Have that share of all chunks, or as few as running requests allow; the others lose their memory."""
        pool, tree = self.cache.memory, self.cache.tree
        chunks = max(1, round(share * pool.most_chunks))
        kept = [node for node in tree.nodes() if node.users]
        beyond = self.cache.beyond(chunks, self.running)
        reached = self.cache.resize(chunks)
        assert reached == pool.chunks >= chunks and all(node in set(tree.nodes()) for node in kept)
        if not self.running and not self.loading:
            assert reached == chunks
        if self.windows is None and not self.loading:
            assert bool(beyond) == (reached > chunks)
        for block in range(pool.capacity, pool.most):
            self.memory[block] = [None] * self.cache.block_size

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check_integrity(self.running, self.loading)
        for namespace in self.cache.tree._roots:
            for tokens, node in nodes_of(self.cache.tree, namespace):
                start = len(tokens) - len(node.tokens)
                keys = [(namespace, tokens[: start + offset + 1]) for offset in range(len(node.tokens))]
                assert not self.whole or self.memory[node.block][: len(keys)] == keys
                for table, part in enumerate(() if self.windows is None else self.windows.blocks_at(node)):
                    assert self.memory[part][: len(keys)] == [(table, key) for key in keys], "not those of its node"
                if self.pool is None or node in self.pool._copied:  # the next step copies it
                    continue
                if (state := self.pool.state_at(node)) != NO_STATE:
                    assert self.states[state] == (namespace, tokens), "a kept state is not that of its node"

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            while self.loads or self.loading:
                if self.loads:
                    self.deliver(0, 0, 0)
                self.answer()
            assert not self.loading
            while self.running:
                self.free(0)
                self.agrees()
            assert self.cache.prefix_cache or self.cache.tree.size == 0
            self.cache.tree.clear()
            assert self.cache.pool.free_count == self.cache.pool.capacity and self.cache.tree.size == 0

    def namespace(self, request: Request) -> bytes:
        """Groups share among themselves alone when there is no prefix cache."""
        namespace = self.cache._namespace(request)
        return b"alone" if namespace is None else namespace

    def key(self, request: Request, position: int) -> object:
        return self.namespace(request), tuple(request.token_ids[: position + 1])

    def read(self, request: Request) -> None:
        for position in range(request.num_computed_tokens):
            block, offset = divmod(position, self.cache.block_size)
            held = self.memory[request.block_ids[block]][offset] if self.whole else self.key(request, position)
            assert held == self.key(request, position), "the request would read what is not its own"
            windows = self.windows
            if windows is not None and position > request.num_computed_tokens - windows.limits.window:
                for table, part in enumerate(self.windowed(request, block)):
                    own = (table, self.key(request, position))
                    assert self.memory[part][offset] == own, "the request would see what is not its own"

    def windowed(self, request: Request, block: int) -> tuple[int, ...]:
        """A request's blocks of layers with a window, in the place of one of the others."""
        if self.windows is None:
            return ()
        window = self.windows.window_of(request)
        return window.blocks[block - window.start]

    def lacking(self, windows: WindowedBlocks, request: Request, computed: int) -> int:
        """Blocks of layers with a window that a request needs: those that it does not find, or that nobody uses."""
        size, limits, path = self.cache.block_size, windows.limits, self.path_of(request)
        room = min(len(request.token_ids), computed + limits.window + limits.step_tokens)
        new = (self.cache.blocks_for(room) - len(path)) * limits.tables
        seen = [node for index, node in enumerate(path) if (index + 1) * size > computed + 1 - limits.window]
        return new + limits.tables * sum(
            window is not None and not window.users for window in map(windows.window_at, seen)
        )

    def path_of(self, request: Request) -> list[Node]:
        if self.cache._namespace(request) is None:
            return []
        return self.cache._match(request, None).path

    def longest_cached(self, request: Request) -> int:
        """The longest head that any path of the tree begins with, found by looking at all of them.

        Or that is a path which ends where a state is kept.
        """
        limit = request.most_cached
        if self.windows is not None:
            return self.longest_seen(self.windows, request)
        if self.pool is not None:
            nodes = nodes_of(self.cache.tree, self.namespace(request))
            ends = (tokens for tokens, node in nodes if self.pool.state_at(node) != NO_STATE)
            head = tuple(request.token_ids[:limit])
            return max((len(tokens) for tokens in ends if head[: len(tokens)] == tokens), default=0)
        paths = (tokens for tokens, _ in nodes_of(self.cache.tree, self.namespace(request)))
        return max((sum(takewhile(bool, map(eq, request.token_ids[:limit], tokens))) for tokens in paths), default=0)

    def longest_seen(self, windows: WindowedBlocks, request: Request) -> int:
        """The longest head, of those that end with a block or with all that is cached, whose window is cached."""
        size, namespace = self.cache.block_size, self.namespace(request)
        if self.cache._namespace(request) is None:
            return 0
        path, partial, shared = self.cache.tree.match(namespace, request.token_ids, request.most_cached)
        window = windows.limits.window
        kept = [windows.window_at(node) is not None for node in path for _ in range(size)]
        ends = [*range(0, len(kept) + 1, size)]
        if partial is not None and windows.window_at(partial) is not None:
            ends.append(len(kept) + shared)
            kept += [True] * shared
        return max(end for end in ends if all(kept[max(0, end + 1 - window) : end]))
