"""Blocks of layers with a window: a request holds them only as far back as its window reaches.

    admit   --begin-->   shares the blocks of the nodes that the window reaches; new ones for a window and a step
    running --needed-->  gives back the blocks that the window has passed; --take--> new ones
            --publish--> nodes of the prefix tree share the blocks, beside the block of the layers without a window
    ended   --leave-->   the blocks within a window of the end stay, as long as their nodes do

The layers with a window have `tables` block tables, and need one block of the pool in each for every `block_size`
tokens. The layers without a window take their blocks from the same pool. Where all layers have a window, these have all
of the memory, and the blocks of the prefix tree are only numbers (`WindowLimits.positions`).

A node may lose its blocks here and stay in the tree. A request can continue from a path only where the nodes within the
window have their blocks. Of nodes that no request uses, the *passed* ones are evicted first: no request ended there and
none began to differ, so another use is unlikely. The others, the *ends*, go with their nodes, or when nothing else is
left.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from kvern.cache.extension import CacheExtension
from kvern.cache.messages import WindowLimits, WindowMessage
from kvern.cache.radix import CachedPrefix, CacheMemory, Node, SequenceEnd
from kvern.request.request import Request
from kvern.request.step import ExtensionMessage, GrownTable, SchedulerOutput

Blocks = tuple[int, ...]
"""Blocks of the pool, one in each block table of layers with a window."""


@dataclass
class RequestWindow:
    """The blocks that a request holds, from block number `start` on.

    `told`: the number of the first block that the request's row has not been told of. `most_tokens`: what the request
    gets blocks for when it is admitted; None: it was admitted. `ends`: the numbers of blocks after which other requests
    are likely to continue.
    """

    start: int
    blocks: list[Blocks]
    told: int
    ends: tuple[range, ...]
    most_tokens: int | None = None

    @property
    def stop(self) -> int:
        """The number after that of the last block."""
        return self.start + len(self.blocks)


@dataclass
class NodeWindow:
    """The blocks of a node, which `step` computes and `users` running requests share.

    `is_end`: another request is likely to continue after them.
    """

    blocks: Blocks
    step: int
    users: int = 0
    is_end: bool = False


class WindowedBlocks(CacheExtension):
    """The blocks of layers with a window, of requests and of nodes."""

    name = WindowMessage.extension
    excludes = frozenset({"states"})

    def __init__(self, limits: WindowLimits, memory: CacheMemory) -> None:
        self.limits = limits
        self.tables = limits.tables
        self.pool = self._memory = memory.memory
        self._tree, self._block_size = memory.tree, memory.block_size
        self._requests: dict[Request, RequestWindow] = {}
        self._nodes: dict[Node, NodeWindow] = {}
        self._passed: OrderedDict[Node, None] = OrderedDict()
        self._ends: OrderedDict[Node, None] = OrderedDict()
        self._grown: list[GrownTable] = []

    @property
    def available_count(self) -> int:
        """Blocks of the pool that are free, or that nodes have and no request uses."""
        return self._memory.free_count + self.evictable_count

    @property
    def evictable_count(self) -> int:
        return (len(self._passed) + len(self._ends)) * self.limits.tables

    def window_of(self, request: Request) -> RequestWindow:
        """The blocks of a running request."""
        return self._requests[request]

    def window_at(self, node: Node) -> NodeWindow | None:
        """The blocks of a node, if it has any."""
        return self._nodes.get(node)

    def blocks_at(self, node: Node) -> Blocks:
        window = self._nodes.get(node)
        return () if window is None else window.blocks

    def first_seen(self, position: int) -> int:
        """The number of the block with the first key that a query at this position sees."""
        return max(0, position + 1 - self.limits.window) // self._block_size

    def written(self, nodes: Sequence[Node], step: int) -> list[Blocks]:
        """The blocks of all nodes, which are written after `step`, for each block table; none if a node lacks them."""
        windows = [self._nodes.get(node) for node in nodes]
        held = [window.blocks for window in windows if window is not None and window.step <= step]
        return list(zip(*held, strict=True)) if len(held) == len(nodes) else []

    def most_needed(self, computed: int, tokens: int) -> int:
        """The blocks that a request of so many tokens holds when it is admitted to continue after `computed` ones."""
        until = min(tokens, computed + self.limits.step_tokens + self.limits.window)
        return (-(-until // self._block_size) - self.first_seen(computed)) * self.limits.tables

    def touch(self, nodes: Sequence[Node]) -> None:
        """Nodes will be used: their blocks are evicted last."""
        for node in nodes:
            window = self._nodes.get(node)
            if window is not None and not window.users:
                self._idle(window).move_to_end(node)

    def give(self, node: Node, blocks: Blocks, step: int) -> None:
        """Let a node that no request uses have blocks after which others will continue, unless it has some."""
        if node not in self._nodes:
            self._give(node, blocks, step)
            self._nodes[node].is_end = True
            self._ends[node] = None

    def match(self, prefix: CachedPrefix, step: int | None) -> CachedPrefix:
        path, partial, shared, known = prefix
        if partial is not None and partial in self._nodes and step is not None and self._nodes[partial].step >= step:
            partial, shared = None, 0  # the step that would copy its blocks is the one that computes them
        position = len(path) * self._block_size + shared
        if partial is not None and partial in self._nodes and self._missing(path, position) is None:
            return CachedPrefix(path, partial, shared, known)
        end = len(path)
        while (missing := self._missing(path[:end], end * self._block_size)) is not None:
            end = missing  # those behind it see it, too
        return CachedPrefix(path[:end], None, 0, known)

    def begin(self, request: Request, prefix: CachedPrefix) -> None:
        size, path = self._block_size, prefix.path
        position, prompt = len(path) * size + prefix.shared, (request.prompt_length - 1) // size
        start = min(self.first_seen(position), len(path))
        ends = (
            range(self.first_seen(prefix.known * size), prefix.known),
            range(self.first_seen(prompt * size), prompt + 1),
        )
        most_tokens = position + self.limits.step_tokens + self.limits.window
        window = self._requests[request] = RequestWindow(start, [], start, ends, most_tokens)
        for node in path[start:]:
            self._use(node)
            blocks = self._nodes[node].blocks
            self._memory.share(blocks)
            window.blocks.append(blocks)

    def needed(self, request: Request, tokens: int) -> int:
        window = self._requests[request]
        if window.most_tokens is None:
            self.pass_by(request)
        else:
            tokens = min(tokens, window.most_tokens)
        return max(0, -(-tokens // self._block_size) - window.stop) * self.limits.tables

    def take(self, request: Request, blocks: list[int]) -> None:
        tables, window = self.limits.tables, self._requests[request]
        window.most_tokens = None
        window.blocks += [tuple(blocks[start : start + tables]) for start in range(0, len(blocks), tables)]
        self.placed(request)

    def placed(self, request: Request) -> None:
        """The next step tells the request's row, if it has one, of the blocks that the row does not know."""
        window = self._requests[request]
        if request.slot < 0 or window.told >= window.stop:
            return
        first = max(window.told, window.start)
        columns = zip(*window.blocks[first - window.start :], strict=True)
        self._grown += [GrownTable(request.slot, table, first, list(part)) for table, part in enumerate(columns)]
        window.told = window.stop

    def pass_by(self, request: Request) -> None:
        """Give back the blocks that no later step sees; drafts that may be rejected do not count."""
        self._pass(request, self.first_seen(min(request.num_computed_tokens, len(request.token_ids) - 1)))

    def fork(self, parent: Request, child: Request, blocks: list[int]) -> Blocks:
        own, full = self._requests[parent], parent.num_computed_tokens // self._block_size
        shared = own.blocks[: full - own.start]
        for held, node in zip(shared, parent.nodes[own.start :], strict=False):
            if self.blocks_at(node) == held:
                self._use(node)
        self._memory.share(chain(*shared))
        self._requests[child] = RequestWindow(own.start, shared, own.start + len(shared), own.ends)
        self.take(child, blocks)
        return own.blocks[full - own.start] if blocks else ()

    def retract(self, request: Request) -> None:
        self._grown = [grown for grown in self._grown if grown.slot != request.slot]

    def publish(self, request: Request, index: int, node: Node, step: int) -> None:
        """Let the node have the request's blocks, unless it has others."""
        window = self._requests[request]
        if index < window.start:
            return
        blocks = window.blocks[index - window.start]
        self._give(node, blocks, step)
        if self._nodes[node].blocks == blocks:
            self._use(node)

    def leave(self, request: Request, end: SequenceEnd | None) -> None:
        """Frees a request's blocks; with `end`, nodes keep the blocks that a query after the request's end sees."""
        window = self._requests.get(request)
        if window is None:
            return
        if end is not None:
            if end.node is not None and end.node not in request.nodes[-1:]:
                self.give(end.node, window.blocks[len(request.nodes) - window.start], end.step)
            self._pass(request, self.first_seen(end.known // self._block_size * self._block_size))
        for index, blocks in enumerate(window.blocks, window.start):
            self._release(request, index, blocks, end is not None)
        del self._requests[request]

    def evict(self, used: bool) -> bool:
        nodes = self._passed or (self._ends if used else None)
        if not nodes:
            return False
        self.lose(next(iter(nodes)))
        return True

    def lose(self, node: Node) -> None:
        window = self._nodes.pop(node, None)
        if window is not None:
            del self._idle(window)[node]
            self._memory.release(window.blocks)

    def plan(self, output: SchedulerOutput) -> ExtensionMessage | None:
        if not (self._grown and output.scheduled):  # rows that have forked are told with the next step that runs
            return None
        grown, self._grown = self._grown, []
        return WindowMessage(grown)

    def undo(self, step: int, waiting: Sequence[Request]) -> None:
        self._grown.clear()
        for node in [node for node in chain(self._passed, self._ends) if self._nodes[node].step >= step]:
            self.lose(node)

    def check(self, running: Sequence[Request], loading: Sequence[Request]) -> int:
        assert self._nodes.keys() <= set(self._tree.nodes()), "a node that was removed has blocks"
        idle = {*self._passed, *self._ends}
        assert idle == {node for node, window in self._nodes.items() if not window.users}, "idle nodes do not add up"
        assert len(idle) == len(self._passed) + len(self._ends), "a node is idle twice"
        assert self._requests.keys() == set(running), "a request that does not run has blocks"
        users = dict.fromkeys(self._nodes, 0)
        for request, window in self._requests.items():
            assert window.start <= self.first_seen(request.num_computed_tokens), "a request lacks what it sees"
            assert window.stop * self._block_size >= request.num_computed_tokens, "tokens without blocks"
            for blocks, node in zip(window.blocks, request.nodes[window.start :], strict=False):
                if self.blocks_at(node) == blocks:
                    users[node] += 1
        assert all(self._nodes[node].users == count for node, count in users.items()), "users do not add up"
        return (len(self._nodes) + sum(len(window.blocks) for window in self._requests.values())) * self.limits.tables

    def _missing(self, path: Sequence[Node], position: int) -> int | None:
        """The last node of a path without blocks, of those that a query at this position sees; None: all have some."""
        first = self.first_seen(position)
        return next((index for index in range(len(path) - 1, first - 1, -1) if path[index] not in self._nodes), None)

    def _idle(self, window: NodeWindow) -> OrderedDict[Node, None]:
        return self._ends if window.is_end else self._passed

    def _give(self, node: Node, blocks: Blocks, step: int) -> None:
        if node not in self._nodes:
            self._nodes[node] = NodeWindow(blocks, step)
            self._memory.share(blocks)

    def _use(self, node: Node) -> None:
        window = self._nodes[node]
        if not window.users:
            self._idle(window).pop(node, None)
        window.users += 1

    def _pass(self, request: Request, first: int) -> None:
        window = self._requests[request]
        count = first - window.start
        if count <= 0:
            return
        for index, blocks in enumerate(window.blocks[:count], window.start):
            self._release(request, index, blocks, any(index in end for end in window.ends))
        del window.blocks[:count]
        window.start = first

    def _release(self, request: Request, index: int, blocks: Blocks, is_end: bool) -> None:
        node = request.nodes[index] if index < len(request.nodes) else None
        window = None if node is None else self._nodes.get(node)
        if node is not None and window is not None and window.blocks == blocks:
            window.users -= 1
            window.is_end |= is_end
            if not window.users:
                self._idle(window)[node] = None
        self._memory.release(blocks)
