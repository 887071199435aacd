"""States: device memory of a fixed size for each sequence, beside its blocks, as recurrent layers have it.

    admit --acquire--> a state of the request's own: zeroed, or a copy of the state kept at the node where it resumes
    fork  --acquire--> a copy of the parent's
    free  --keep-----> the state goes to the node of the request's last token, without a copy; or --release-->

What a node holds is the state after the last of its tokens and never changes. A request resumes only where there is
one. The states of running requests are never taken; those of nodes are, least recently used first, and the node keeps
its block. A full pool means that nothing is kept, not that nobody runs, as long as it has a state for each row.
"""

from collections import OrderedDict
from typing import TYPE_CHECKING

from kvern.cache.radix import NO_STATE, Node

if TYPE_CHECKING:
    from kvern.request.request import Request


class StatePool:
    """Hands out states 0..capacity-1, and says which are copied or zeroed before the next step."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._copies: list[tuple[int, int]] = []
        self._copied: list[Node] = []  # their state is what the next step copies
        self._free = list(range(capacity - 1, -1, -1))
        self._kept: OrderedDict[Node, int] = OrderedDict()  # to the step after which the state was what it is

    def acquire(self) -> int | None:
        """A state for a request, if need be that of the node used longest ago; None: running requests have them all.

        It still holds what it held.
        """
        if not self._free and self._kept:
            self.drop(next(iter(self._kept)))
        return self._free.pop() if self._free else None

    def begin(self, source: Node | None) -> int | None:
        """A state for a request that resumes at a node, or begins; None: running requests have them all."""
        kept = NO_STATE
        if source is not None:
            kept = source.state
            self._kept.move_to_end(source)
        state_index = self.acquire()
        if state_index is not None and state_index != kept:  # it is the same when no other was to be had
            self._copies.append((kept, state_index))
        return state_index

    def fork(self, state_index: int) -> int | None:
        """A state with what another has before the next step; None: running requests have them all."""
        own = self.acquire()
        if own is not None:
            self._copies.append((state_index, own))
        return own

    def snapshot(self, node: Node, state_index: int, step: int) -> bool:
        """Keep a copy of a request's state at the node of its last token, if there is room; whether there is one."""
        if node.state == NO_STATE:
            copy = self.fork(state_index)
            if copy is None:
                return False
            self.keep(node, copy, step)
            self._copied.append(node)
        return True

    def plan(self, step: int) -> list[tuple[int, int]]:
        """What the step begins with: (source, target) in this order; a source of NO_STATE means zeros."""
        for node in self._copied:
            if node in self._kept:
                self._kept[node] = step
        copies, self._copies, self._copied = self._copies, [], []
        return copies

    def release(self, state_index: int) -> None:
        """A request's state is free."""
        self._free.append(state_index)

    def keep(self, node: Node, state_index: int, step: int) -> None:
        """Let a node have a request's state, as it is after `step`; free it if the node has one."""
        if node.state != NO_STATE:
            self._kept.move_to_end(node)
            self.release(state_index)
        else:
            node.state = state_index
            self._kept[node] = step

    def drop(self, node: Node) -> None:
        """Let a node have no state any more."""
        del self._kept[node]
        self.release(node.state)
        node.state = NO_STATE

    def forget_since(self, step: int) -> None:
        """Forget the states that steps from `step` on were to compute or to copy. No request has a state."""
        for node in self._copied:
            if node in self._kept:
                self.drop(node)
        self._copies, self._copied = [], []
        for node in [node for node, kept in self._kept.items() if kept >= step]:
            self.drop(node)

    def check_integrity(self, owned: list[int]) -> None:
        """Raise AssertionError unless each state is free, kept at one node, or one of `owned`."""
        states = [*self._free, *(node.state for node in self._kept), *owned]
        assert sorted(states) == list(range(self.capacity)), "states do not add up"


def state_marks(request: "Request", known: int, block_size: int, apart: int) -> tuple[int, ...]:
    """The ends of the last blocks that others are likely to share: those that somebody had, and the whole prompt's.

    The last token is left out, which has to be computed in any case. `known`: tokens of blocks that somebody had. A
    mark is a step more: the prompt's own is left out if it is fewer than `apart` tokens behind the state before it.
    """
    start, end = request.num_computed_tokens, (request.prompt_length - 1) // block_size * block_size
    marks = (known,) if known > start else ()
    return (*marks, end) if end - max(known, start) >= apart else marks
