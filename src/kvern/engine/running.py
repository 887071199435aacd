"""The requests that run, in the policy's order, their rows, and what admission has to leave for them.

A request's place in the order, and what it may still need, change only when it enters, grows or leaves: no step sorts
or adds up.
"""

from bisect import insort
from collections import Counter
from collections.abc import Iterator

from kvern.cache.manager import KVCacheManager
from kvern.engine.policy import Order, Policy
from kvern.request.request import Request, State

MOST_OWNERS = 1 << 14
"""The number of owners whose last entry is remembered."""


class RunningRequests:
    """Owns the running requests and the rows of the batch. Iterates best first."""

    def __init__(self, rows: int, policy: Policy, cache: KVCacheManager) -> None:
        self._row_count = rows
        self._policy = policy
        self._cache = cache
        self._requests: list[Request] = []
        self._free_slots = list(range(rows - 1, -1, -1))
        self._growing: set[Request] = set()
        self._promised: dict[Request, int] = {}
        self.rows: Counter[str] = Counter()
        """The number of rows of each owner that has some."""
        self._entered: dict[str, int] = {}
        """The number of each owner's last entry, in order; the oldest are forgotten."""
        self._entries = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __reversed__(self) -> Iterator[Request]:
        return reversed(self._requests)

    @property
    def free_rows(self) -> int:
        """The number of rows that no request has."""
        return len(self._free_slots)

    @property
    def promised_rows(self) -> int:
        """Rows that searches will take when their prompts are computed."""
        return sum(self._promised.values())

    @property
    def reserved_blocks(self) -> int:
        """Blocks that admission leaves for running requests, so that they are not preempted for a new one."""
        return len(self._growing) + self.promised_rows

    def share(self, request: Request) -> tuple[int, int]:
        """Returns the share of a request's owner, to compare: its rows, and its last entry."""
        return self.rows[request.owner], self._entered.get(request.owner, 0)

    def enter(self, request: Request) -> None:
        """Give a row to a request that has blocks."""
        self.rows[request.owner] += 1
        self._entries += 1
        self._entered.pop(request.owner, None)
        self._entered[request.owner] = self._entries
        if len(self._entered) > MOST_OWNERS:
            del self._entered[next(iter(self._entered))]
        request.state, request.slot = State.RUNNING, self._free_slots.pop()
        insort(self._requests, request, key=self._order)
        if self._may_grow(request):
            self._growing.add(request)
        siblings = future_siblings(request)
        if siblings:
            self._promised[request] = siblings

    def grew(self, request: Request) -> None:
        """A running request was given blocks."""
        if not self._may_grow(request):
            self._growing.discard(request)

    def branched(self, request: Request) -> None:
        """A search, running or not, has taken its rows."""
        self._promised.pop(request, None)

    def leave(self, request: Request) -> None:
        """Take a request's row; it still has blocks."""
        self._requests.remove(request)
        self.rows[request.owner] -= 1
        if not self.rows[request.owner]:
            del self.rows[request.owner]
        self._growing.discard(request)
        self._promised.pop(request, None)
        self._free_slots.append(request.slot)
        request.slot = -1

    def _order(self, request: Request) -> Order:
        return self._policy.order(request, self._cache)

    def _may_grow(self, request: Request) -> bool:
        return self._cache.blocks_for(request.prompt_length + request.max_tokens) > len(request.block_ids)

    def check_integrity(self) -> None:
        """Raise AssertionError if a row is shared or lost, or what is counted is not so."""
        slots = [request.slot for request in self._requests]
        assert sorted(slots + self._free_slots) == list(range(self._row_count)), "rows do not add up"
        assert self.rows == Counter(request.owner for request in self._requests), "rows of owners do not add up"
        for request in self._requests:
            assert request.state is State.RUNNING and request.num_computed_tokens > 0
            blocks = self._cache.blocks_for(request.num_computed_tokens)
            assert len(request.block_ids) >= blocks, "tokens without blocks"
        assert self._requests == sorted(self._requests, key=self._order), "the best do not come first"
        assert self._growing == {request for request in self._requests if self._may_grow(request)}
        siblings = {request: future_siblings(request) for request in self._requests}
        assert self._promised == {request: count for request, count in siblings.items() if count}


def future_siblings(request: Request) -> int:
    """Rows that a search will take when its prompt is computed."""
    if request.search is None or request.output_length:
        return 0
    return request.search.width - 1
