"""Blocks of the layers that see a window of keys: a sequence holds them only as far back as its window reaches.

    admit   --begin-->  shared with the nodes that the window reaches back to; new ones for a window and a step
    extend  --pass-->   what lies behind the window is given back, --grow--> new ones
    publish --attach--> nodes of the prefix tree have them, too, beside the block of the layers without a window
    free    --leave-->  those within a window of the sequence's end stay, as long as its nodes do

A block of the pool has room for the layers without a window; those with one need `tables` block tables, and one block
of the pool in each for every `block_size` tokens. So both take their memory from one pool. Where all layers have a
window they have all of it, and what nodes are hung on are numbers (`WindowLimits.positions`).

What a node has of these may go while the node stays. A request goes on behind a path only where the nodes within the
window have theirs. Those that nobody uses are dropped first where no sequence ended and none began to differ: the
*passed* ones, whose use is unlikely. The others, *ends*, go with their nodes, or when there are no others.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from kvern.cache.block_pool import BlockPool
from kvern.cache.radix import Node, RadixCache
from kvern.request.step import GrownTable

if TYPE_CHECKING:
    from kvern.request.request import Request

Blocks = tuple[int, ...]
"""Of the pool, one in each block table of layers with a window."""


@dataclass(frozen=True)
class WindowLimits:
    """The keys that a query sees, its own included, in how many block tables, and the most tokens of a step.

    `positions`: of a model whose layers all have a window, how many blocks the first table has to number what nodes of
    the tree and requests have: they take no memory, and nothing is stored there. 0: they are blocks of the pool.
    """

    window: int
    tables: int
    step_tokens: int
    positions: int = 0

    @property
    def held_tokens(self) -> int:
        """Tokens that a sequence holds at most, beside parts of blocks at both ends."""
        return 2 * self.window + self.step_tokens


class WindowedBlocks:
    """Which of these blocks requests and nodes have."""

    def __init__(self, pool: BlockPool, block_size: int, limits: WindowLimits) -> None:
        self.limits = limits
        self.pool, self._block_size = pool, block_size
        self._passed: OrderedDict[Node, None] = OrderedDict()
        self._ends: OrderedDict[Node, None] = OrderedDict()
        self._grown: list[GrownTable] = []

    @property
    def available_count(self) -> int:
        """Blocks of the pool that are free or that nodes have and nobody uses."""
        return self.pool.free_count + self.evictable_count

    @property
    def evictable_count(self) -> int:
        """Blocks of the pool that nodes have and nobody uses."""
        return (len(self._passed) + len(self._ends)) * self.limits.tables

    def first_seen(self, position: int) -> int:
        """The block of the first key that a query at this position sees."""
        return max(0, position + 1 - self.limits.window) // self._block_size

    def reachable(self, path: list[Node], partial: Node | None, shared: int) -> tuple[list[Node], Node | None, int]:
        """As much of a cached prefix, as `RadixCache.match` returns it, as a request can go on behind."""
        deepest = first = 0
        for end, node in enumerate(path, 1):
            if not node.windowed:
                first = end
            if first <= self.first_seen(end * self._block_size):
                deepest = end
        position = len(path) * self._block_size + shared
        if partial is not None and partial.windowed and first <= self.first_seen(position):
            return path, partial, shared
        return path[:deepest], None, 0

    def needed(self, request: "Request", tokens: int) -> int:
        """Blocks of the pool that a request lacks for `tokens` positions."""
        held = request.window_start + len(request.windowed)
        return max(0, -(-tokens // self._block_size) - held) * self.limits.tables

    def begin(self, request: "Request", path: Sequence[Node], position: int) -> int:
        """Let a request share what it sees behind a path; the positions that it should have room for at once."""
        request.window_start = min(self.first_seen(position), len(path))
        for node in path[request.window_start :]:
            self._use(node)
            self.pool.share(node.windowed)
            request.windowed.append(node.windowed)
        return min(len(request.token_ids), position + self.limits.step_tokens + self.limits.window)

    def mark(self, request: "Request", known: int) -> None:
        """Remember where others are likely to go on: behind the `known` first blocks, and behind the prompt."""
        prompt, size = (request.prompt_length - 1) // self._block_size, self._block_size
        request.window_ends = (
            range(self.first_seen(known * size), known),
            range(self.first_seen(prompt * size), prompt + 1),
        )

    def grow(self, request: "Request", blocks: Sequence[int]) -> None:
        """Let a request have more blocks, one in each table in turn; the next step tells, if the request has a row."""
        tables = self.limits.tables
        if blocks and request.slot >= 0:
            first = request.window_start + len(request.windowed)
            parts = (list(blocks[table::tables]) for table in range(tables))
            self._grown += [GrownTable(request.slot, table, first, part) for table, part in enumerate(parts)]
        request.windowed += [tuple(blocks[start : start + tables]) for start in range(0, len(blocks), tables)]

    def grown(self) -> list[GrownTable]:
        """What is to be told, once."""
        grown, self._grown = self._grown, []
        return grown

    def pass_by(self, request: "Request") -> None:
        """Give back what no step to come sees; drafts that may be rejected do not count."""
        self._pass(request, self.first_seen(min(request.num_computed_tokens, len(request.token_ids) - 1)))

    def fork(self, parent: "Request", child: "Request", full: int, own: Sequence[int]) -> Blocks:
        """Let a child share what its parent has of the first `full` blocks, and have its `own` for the part behind.

        Returns the parent's blocks of that part, if there is one.
        """
        child.window_start, child.window_ends = parent.window_start, parent.window_ends
        child.windowed = parent.windowed[: full - parent.window_start]
        for blocks, node in zip(child.windowed, parent.nodes[child.window_start :], strict=False):
            if node.windowed == blocks:
                self._use(node)
        self.pool.share(chain(*child.windowed))
        self.grow(child, own)
        return parent.windowed[full - parent.window_start] if own else ()

    def attach(self, request: "Request", index: int, node: Node, step: int) -> None:
        """Let the node of a request's full block have the request's blocks, unless it has others."""
        if index < request.window_start:
            return
        blocks = request.windowed[index - request.window_start]
        self._give(node, blocks, step)
        if node.windowed == blocks:
            self._use(node)

    def attach_tail(self, request: "Request", node: Node, step: int) -> None:
        """Let the node of a request's last block, which it does not use itself, have the request's blocks."""
        if not node.windowed:
            self._give(node, request.windowed[len(request.nodes) - request.window_start], step)
            node.window_end = True
            self._ends[node] = None

    def leave(self, request: "Request", known: int | None) -> None:
        """Drop a request's references. Nodes keep what is seen behind its `known` first blocks; None: it was undone."""
        if known is not None:
            self._pass(request, self.first_seen(known * self._block_size))
        for index, blocks in enumerate(request.windowed, request.window_start):
            self._leave(request, index, blocks, known is not None)
        request.windowed, request.window_start, request.window_ends = [], 0, ()

    def evict(self, count: int, tree: RadixCache) -> None:
        """Make `count` blocks of the pool free: what was passed, then nodes, last what ends in use have."""
        while self.pool.free_count < count:
            if self._passed or not tree.evictable_count:
                self.drop(next(iter(self._passed or self._ends)))
            else:
                tree.evict(1)

    def drop(self, node: Node) -> None:
        """Let a node have none any more."""
        del self._idle(node)[node]
        self.pool.release(node.windowed)
        node.windowed, node.window_end = (), False

    def forget_since(self, step: int) -> None:
        """Forget what steps from `step` on were to compute. Nothing is in use."""
        for node in [node for node in chain(self._passed, self._ends) if node.window_step >= step]:
            self.drop(node)

    def check_integrity(self, nodes: Iterable[Node], running: Sequence["Request"]) -> int:
        """Raise AssertionError if a node's users do not add up, or a request lacks what it sees.

        Returns how many references to blocks of the pool there are.
        """
        having = {node for node in nodes if node.windowed}
        idle = {*self._passed, *self._ends}
        assert idle == {node for node in having if not node.window_users}, "blocks that nobody uses do not add up"
        assert len(idle) == len(self._passed) + len(self._ends), "a node is idle twice"
        users = dict.fromkeys(having, 0)
        for request in running:
            assert request.window_start <= self.first_seen(request.num_computed_tokens), "a request lacks what it sees"
            held = request.window_start + len(request.windowed)
            assert held * self._block_size >= request.num_computed_tokens, "tokens without blocks"
            for blocks, node in zip(request.windowed, request.nodes[request.window_start :], strict=False):
                if node.windowed == blocks:
                    users[node] += 1
        assert all(node.window_users == count for node, count in users.items()), "users of a node do not add up"
        return (len(having) + sum(len(request.windowed) for request in running)) * self.limits.tables

    def _idle(self, node: Node) -> OrderedDict[Node, None]:
        return self._ends if node.window_end else self._passed

    def _give(self, node: Node, blocks: Blocks, step: int) -> None:
        if not node.windowed:
            node.windowed, node.window_step = blocks, step
            self.pool.share(blocks)

    def _use(self, node: Node) -> None:
        if not node.window_users:
            self._idle(node).pop(node, None)
        node.window_users += 1

    def _pass(self, request: "Request", first: int) -> None:
        count = first - request.window_start
        if count <= 0:
            return
        for index, blocks in enumerate(request.windowed[:count], request.window_start):
            self._leave(request, index, blocks, any(index in end for end in request.window_ends))
        del request.windowed[:count]
        request.window_start = first

    def _leave(self, request: "Request", index: int, blocks: Blocks, end: bool) -> None:
        node = request.nodes[index] if index < len(request.nodes) else None
        if node is not None and node.windowed == blocks:
            node.window_users -= 1
            node.window_end |= end
            if not node.window_users:
                self._idle(node)[node] = None
        self.pool.release(blocks)
