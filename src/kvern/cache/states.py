"""Recurrent states: device memory of a fixed size for each request, in models with recurrent layers.

    admit --take---> a state of the request's own: zeros, or a copy of the state kept at the node where it continues
    fork  ---------> a copy of the parent's state
    leave ---------> the node of the request's last token gets the state, without a copy; otherwise it becomes free
    a tier --reserve--> loads a state; `settle`: a node gets it, or it becomes free

The state that a node has is the state after the last of its tokens, and it never changes. A request can continue only
where a node has a state. The states of running requests are never taken from them. Those of nodes are, the least
recently used first, and the node keeps its block. With no free state nothing is kept, but requests run as long as there
is a state for each row.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kvern.cache.extension import CacheExtension
from kvern.cache.messages import NO_STATE, StateMessage
from kvern.cache.radix import CachedPrefix, CacheMemory, Node, SequenceEnd
from kvern.request.request import Request
from kvern.request.step import ExtensionMessage, SchedulerOutput


@dataclass
class _Held:
    """The state of a request; `marks` are the numbers of computed tokens at which a copy of it is to be kept.

    `source` is the state that it begins with: that of `node`, or of another request.
    """

    node: Node | None
    source: int
    marks: tuple[int, ...]
    index: int = NO_STATE


@dataclass
class _Kept:
    """The state of a node, and the step after which it is the state of the node's last token.

    `is_copy`: it is that of a prompt, or out of a tier. Another has been a request's own, and stages may not know yet
    which drafts it saw.
    """

    index: int
    step: int
    is_copy: bool = False


class StatePool(CacheExtension):
    """Allocates the states 0 to capacity - 1, and says which are copied or zeroed before the next step.

    States of prompts are kept at ends of so many `page_blocks`, with which a tier finds them. A prompt's last state is
    not kept if it is fewer than `apart` tokens after the state before it. With a tier that is the one before it at the
    end of a page: states at ends of requests, of which each turn of a conversation leaves one, are not in the tier.
    """

    name = StateMessage.extension
    excludes = frozenset({"windows"})

    def __init__(self, capacity: int, apart: int, memory: CacheMemory, page_blocks: int = 1) -> None:
        self.capacity = capacity
        self._apart = apart
        self._tree = memory.tree
        self._block_size = memory.block_size
        self._page_blocks = page_blocks
        self._free = list(range(capacity - 1, -1, -1))
        self._held: dict[Request, _Held] = {}
        self._kept: OrderedDict[Node, _Kept] = OrderedDict()
        self._copies: list[tuple[int, int]] = []
        self._copied: list[Node] = []  # the next step copies their states
        self._given: list[tuple[int, int]] = []
        self._reserved: set[int] = set()  # states that are being loaded
        self._at_marks: list[Request] = []  # a copy of their states is kept as the step being planned leaves them

    def state_of(self, request: Request) -> int:
        """The request's state; NO_STATE: it has none."""
        held = self._held.get(request)
        return NO_STATE if held is None else held.index

    def state_at(self, node: Node) -> int:
        """The node's state; NO_STATE: it has none."""
        kept = self._kept.get(node)
        return NO_STATE if kept is None else kept.index

    def is_written(self, node: Node) -> bool:
        """True if the steps that compute and copy the node's state have returned."""
        return node in self._kept and node not in self._copied and self._kept[node].step <= self._tree.completed

    def copy_at(self, node: Node) -> int:
        """The copy of a prompt's state that the node has, or will have after the next step; NO_STATE: it has none."""
        kept = self._kept.get(node)
        return NO_STATE if kept is None or not kept.is_copy else kept.index

    def has_spare(self) -> bool:
        """True if a state can be reserved: no copy that is still to be made reads or writes it."""
        return self._spare() is not None

    def reserve(self) -> int:
        """A state to be loaded, of which there is a spare one."""
        found = self._spare()
        assert found is not None
        if isinstance(found, Node):
            index = self._kept.pop(found).index
        else:
            index = found
            self._free.remove(index)
        self._reserved.add(index)
        return index

    def _spare(self) -> int | Node | None:
        """A free state, or the node used longest ago that has one; what the next step copies stays as it is."""
        copied = {index for pair in self._copies for index in pair}
        free = next((index for index in reversed(self._free) if index not in copied), None)
        if free is not None:
            return free
        return next((node for node, kept in self._kept.items() if kept.index not in copied), None)

    def settle(self, index: int, node: Node | None, step: int) -> None:
        """A reserved state was loaded, with a load of this step, and is that of a node; None: it was not loaded."""
        self._reserved.remove(index)
        if node is None:
            self._free.append(index)
        else:
            self.keep(node, index, step)
            self._kept[node].is_copy |= self._kept[node].index == index

    @property
    def kept(self) -> Sequence[Node]:
        """The nodes that have states, least recently used first."""
        return list(self._kept)

    def match(self, prefix: CachedPrefix, step: int | None) -> CachedPrefix:
        path, partial, shared, known = prefix
        if partial is not None and (partial not in self._kept or shared < len(partial.tokens)):
            partial, shared = None, 0
        if partial is None:
            path = path[: next((end for end in range(len(path), 0, -1) if path[end - 1] in self._kept), 0)]
        return CachedPrefix(path, partial, shared, known)

    def begin(self, request: Request, prefix: CachedPrefix) -> None:
        source = NO_STATE if prefix.last is None else self._kept[prefix.last].index
        size = self._block_size
        cached = len(prefix.path) * size + prefix.shared, prefix.known * size
        marks: tuple[int, ...] = ()
        if prefix.known >= 0:
            saved = cached[0] if self._page_blocks == 1 else self._saved_tokens(prefix.path)
            marks = state_marks(request, cached, saved, self._page_blocks * size, self._apart)
        self._held[request] = _Held(prefix.last, source, marks)

    def _saved_tokens(self, path: Sequence[Node]) -> int:
        """The tokens up to the last node of a path that has the copy of a prompt's state; 0: none has."""
        ends = range(len(path) // self._page_blocks * self._page_blocks, 0, -self._page_blocks)
        last = next((end for end in ends if self.copy_at(path[end - 1]) != NO_STATE), 0)
        return last * self._block_size

    def has_room(self) -> bool:
        return bool(self._free or self._kept)

    def take(self, request: Request, blocks: list[int]) -> None:
        held = self._held[request]
        if held.index == NO_STATE:
            if held.node is not None and held.node in self._kept:
                self._kept.move_to_end(held.node)
            held.index = self._acquire()
            if held.index != held.source:  # they are equal if there was no other state
                self._copies.append((held.source, held.index))

    def placed(self, request: Request) -> None:
        self._given.append((request.slot, self._held[request].index))

    def until(self, request: Request, tokens: int) -> int:
        held, computed = self._held.get(request), request.num_computed_tokens
        marks = () if held is None else held.marks  # None: it was preempted for others of the same step
        return min([tokens, *(mark - computed for mark in marks if mark > computed)])

    def publish(self, request: Request, index: int, node: Node, step: int) -> None:
        held, end = self._held.get(request), (index + 1) * self._block_size
        if held is not None and end == request.num_computed_tokens and end in held.marks:
            self._at_marks.append(request)

    def fork(self, parent: Request, child: Request, blocks: list[int]) -> Sequence[int]:
        held = self._held[parent]
        self._held[child] = _Held(None, held.index, held.marks)
        self.take(child, [])
        return ()

    def retract(self, request: Request) -> None:
        """Undo `fork` of a child that never ran: its state is free, and the message for its row is not sent."""
        held = self._held.pop(request)
        self._free.append(held.index)
        self._given = [(slot, index) for slot, index in self._given if index != held.index]

    def leave(self, request: Request, end: SequenceEnd | None) -> None:
        held = self._held.pop(request, None)
        if held is None or held.index == NO_STATE:
            return
        if end is not None and end.node is not None and end.known == request.num_computed_tokens:
            self.keep(end.node, held.index, end.step)
        else:
            self._free.append(held.index)

    def snapshot(self, request: Request, step: int) -> bool:
        """Keep a copy of the request's state after `step`, the last one planned, if that step ends a block.

        Returns whether the node of its last token has a state now.
        """
        full, tail = divmod(request.num_computed_tokens, self._block_size)
        if tail or not full or len(request.nodes) != full:
            return False
        node = request.nodes[-1]
        if node not in self._kept:
            if not self.has_room():
                return False
            copy = self._acquire()
            self._copies.append((self._held[request].index, copy))
            self._kept[node] = _Kept(copy, step, is_copy=True)
            self._copied.append(node)
        return True

    def keep(self, node: Node, index: int, step: int) -> None:
        """Let a node have a state, as it is after `step`; if the node has one, the state becomes free."""
        if node in self._kept:
            self._kept.move_to_end(node)
            self._free.append(index)
        else:
            self._kept[node] = _Kept(index, step)

    def lose(self, node: Node) -> None:
        kept = self._kept.pop(node, None)
        if kept is not None:
            self._free.append(kept.index)

    def plan(self, output: SchedulerOutput) -> ExtensionMessage | None:
        if not output.scheduled:
            return None
        for node in self._copied:
            if node in self._kept:
                self._kept[node].step = output.step
        message = StateMessage(self._copies, self._given)
        self._copies = []
        self._copied = []
        self._given = []
        for request in self._at_marks:  # after the copies of this step: the next step copies these
            if request in self._held:
                self.snapshot(request, output.step)
        self._at_marks.clear()
        return message if message.copies or message.given else None

    def undo(self, step: int, waiting: Sequence[Request]) -> None:
        lost = [*self._copied, *(node for node, kept in self._kept.items() if kept.step >= step)]
        for node in lost:
            self.lose(node)
        for pending in (self._copies, self._copied, self._given, self._at_marks):
            pending.clear()

    def check(self, running: Sequence[Request], loading: Sequence[Request]) -> int:
        owned = [held.index for held in self._held.values() if held.index != NO_STATE]
        states = [*self._free, *(kept.index for kept in self._kept.values()), *owned, *self._reserved]
        assert sorted(states) == list(range(self.capacity)), "states do not add up"
        assert self._held.keys() <= set(running), "a request that does not run has a state"
        return 0

    def _acquire(self) -> int:
        """A state, which still holds what it held; if there is no free one, that of the node used longest ago."""
        if not self._free:
            self.lose(next(iter(self._kept)))
        return self._free.pop()


def state_marks(request: Request, cached: tuple[int, int], saved: int, every: int, apart: int) -> tuple[int, ...]:
    """The ends of blocks at which other requests are likely to continue: the last known block, and the prompt's last.

    They are multiples of `every` tokens, of one block or of a page. The last token of the prompt is left out, because
    it has to be computed in any case. `cached`: the tokens that the request continues from, and those of blocks that
    the prefix tree knows. A mark costs a step: the prompt's own is left out if it is fewer than `apart` tokens after
    the mark before it, or after `saved` ones.
    """
    start, known = cached
    known, end = (tokens // every * every for tokens in (known, request.prompt_length - 1))
    marks = (known,) if known > start else ()
    return (*marks, end) if end > start and end - max((saved, *marks)) >= apart else marks
