"""Scheduling policies, and the requests that run and that wait, in the policy's order.

A policy is a key for each request; smaller keys go first. It is registered in POLICIES under the name that
`EngineConfig.policy` selects. Requests that have waited long go before all others with any policy, so that none
starves; equal ones are ordered by turn, then by arrival. A running request's place in the order, and what it may still
need, change only when it enters, grows or leaves: no step sorts or adds up. What waiting requests cost a step does not
grow with their number.

    add --> ready --best--> it can run: remove
              ^      |
              |      +----> it cannot run before something happens: park --> parked
              +------------------------ wake: that has happened ---------------+

Ready requests stand in two heaps for each owner, of those without an adapter and of those with one, so that either can
be taken alone. Between the heaps decides how much their owners have: `kvern.engine.shares`.
A request that leaves a heap, or gets another place in it, leaves a dead entry. It is removed when it comes to the top,
or when most entries are dead.

Requests age in the order in which they began to wait, AGED of them a step at most: of a crowd that came at once, the
last are as many steps late as there are requests for each of AGED.

A key that changes while its request waits is computed anew for a few requests at each look: those that were the best,
and those looked at longest ago. So with up to LOOKS requests each decision is made with present keys, and with more the
key of one that is not among the best is as many looks old as there are requests for each of LOOKS.
"""

import heapq
from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from kvern.cache.manager import KVCacheManager
from kvern.engine.recorder import Recorder
from kvern.request.request import Request, State

MOST_OWNERS = 1 << 14
"""The number of owners whose last entry is remembered."""

Order = tuple[bool, float, int, int]
"""The order of a request; smaller goes first."""


@dataclass(frozen=True)
class Policy:
    """A policy. The key of a running request never changes."""

    key: Callable[[Request, KVCacheManager], float]
    fixed: bool = True
    """The key of a waiting request does not change either."""
    ages: bool = True
    """Requests could wait for ever without aging."""

    def order(self, request: Request, cache: KVCacheManager) -> Order:
        """Returns the order: aged requests first, then by the key, by turn, and by arrival."""
        key = 0 if request.queue.aged else self.key(request, cache)
        return not request.queue.aged, key, request.spec.turn, request.queue.arrival


def first_come(request: Request, cache: KVCacheManager) -> float:
    """Returns the key for the order of arrival."""
    return 0


def lowest_priority_number(request: Request, cache: KVCacheManager) -> float:
    """Returns the request's `priority`; 0 is ordinary, negative is urgent."""
    return request.spec.priority


def shortest_job(request: Request, cache: KVCacheManager) -> float:
    """Returns the most tokens of prompt and answer."""
    return request.prompt_length + request.max_tokens


def longest_cached_prefix(request: Request, cache: KVCacheManager) -> float:
    """Returns the negative number of cached tokens that the request would reuse now, or did reuse if it runs."""
    return -(request.answer.cached_tokens if request.state is State.RUNNING else cache.cached_tokens(request))


POLICIES = {
    "fcfs": Policy(first_come, ages=False),
    "priority": Policy(lowest_priority_number),
    "sjf": Policy(shortest_job),
    "prefix": Policy(longest_cached_prefix, fixed=False),
}


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


Cause = Request | str
"""Why a request cannot run yet: itself (of its last step something is missing), its leader, or its unit."""
Entry = tuple[bool, float, int, int, int, Request]
"""The policy's order, then the order in which requests began to wait."""

LOOKS = 4
AGED = 32


class WaitingQueue:
    """Owns the waiting requests. Iterates over them in the order in which they began to wait."""

    def __init__(self, policy: Policy, cache: KVCacheManager, running: RunningRequests, aging_steps: int) -> None:
        self._policy = policy
        self._cache = cache
        self._running = running
        self._aging_steps = aging_steps
        self.recorder: Recorder | None = None
        self._count = self._arrivals = 0
        self._numbers: dict[Request, int] = {}
        self._entries: dict[Request, Entry] = {}  # of those that are ready
        self._causes: dict[Request, Cause] = {}  # of those that are parked
        self._parked: dict[Cause, dict[Request, None]] = {}
        self._heaps: dict[tuple[bool, str], list[Entry]] = {}  # by whether there is an adapter, and owner
        self._young: OrderedDict[Request, None] = OrderedDict()  # not aged, in the order of `waiting_since`
        self._looked_at: OrderedDict[Request, None] = OrderedDict()  # ready, longest ago first, if keys change

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._numbers)

    def __contains__(self, request: Request) -> bool:
        return request in self._numbers

    @property
    def has_ready(self) -> bool:
        """True if a request waits that nothing but its place in the queue keeps from running."""
        return bool(self._entries)

    def add(self, request: Request, step: int) -> None:
        """Queue a request in this step: a new one, or one that has run."""
        request.queue.waiting_since = step
        if request.queue.arrival < 0:
            request.queue.arrival = self._arrivals
            self._arrivals += 1
        self._numbers[request] = self._count
        self._count += 1
        if self._policy.ages and not request.queue.aged:
            self._young[request] = None
        self._push(request)

    def remove(self, request: Request) -> None:
        """Remove a request. Raises KeyError if it does not wait."""
        del self._numbers[request]
        self._young.pop(request, None)
        cause = self._causes.pop(request, None)
        if cause is None:
            self._withdraw(request)
            return
        del self._parked[cause][request]
        if not self._parked[cause]:
            del self._parked[cause]

    def best(self, adapters: bool = True) -> Request | None:
        """The first of those that are ready; with `adapters` false, of those without an adapter. It stays."""
        heads: list[Entry] = []
        for kind, heap in list(self._heaps.items()):
            while heap and self._entries.get(heap[0][-1]) is not heap[0]:
                heapq.heappop(heap)
            if not heap:
                del self._heaps[kind]
            elif adapters or not kind[0]:
                heads.append(heap[0])
        return min(heads, key=self._before)[-1] if heads else None

    def first(self, count: int) -> list[Request]:
        """The first of those that are ready, the best first."""
        heads: list[Entry] = []
        for heap in self._heaps.values():
            near: list[Entry] = []
            while heap and len(near) < count:
                entry = heapq.heappop(heap)
                if self._entries.get(entry[-1]) is entry:
                    near.append(entry)
            for entry in near:
                heapq.heappush(heap, entry)
            heads += near
        return [entry[-1] for entry in heapq.nsmallest(count, heads, key=self._before)]

    def _before(self, entry: Entry) -> tuple[float, ...]:
        """The order between owners: the policy's, but what each has comes before turns and arrival."""
        return *entry[:2], *self._running.share(entry[-1]), *entry[2:5]

    def has_owners(self, owners: Iterable[str]) -> bool:
        """True if requests of several owners wait or run; those of `owners` do."""
        return len({*owners, *(owner for _, owner in self._heaps)}) > 1

    def park(self, request: Request, cause: Cause) -> None:
        """Pass over a request that is ready, until `wake` is called with this cause."""
        self._withdraw(request)
        self._causes[request] = cause
        self._parked.setdefault(cause, {})[request] = None
        if self.recorder is not None:
            self.recorder.parked(request, cause)

    def wake(self, cause: Cause) -> None:
        """Let those be ready that were parked for this."""
        for request in self._parked.pop(cause, ()):
            del self._causes[request]
            self._push(request)
            if self.recorder is not None:
                self.recorder.woken(request)

    def loaded(self, requests: Iterable[Request]) -> None:
        """Let those run that still wait for a load, or an image: it is there."""
        for request in list(requests):
            if request.state in (State.LOADING, State.ENCODING):
                request.state = State.WAITING
                self.wake(request)

    def wake_all(self) -> None:
        """Let everybody be ready."""
        for cause in list(self._parked):
            self.wake(cause)

    def age(self, step: int) -> None:
        """Let those go before all others that have waited for so many steps."""
        for request in list(islice(self._young, AGED)):
            if step - request.queue.waiting_since < self._aging_steps:
                break
            del self._young[request]
            request.queue.aged = True
            if request in self._entries:
                self._push(request)

    def refresh(self) -> None:
        """Compute some keys anew, if keys change."""
        if self._policy.fixed:
            return
        chosen = dict.fromkeys(islice(self._looked_at, LOOKS))
        for heap in self._heaps.values():
            heads = [heapq.heappop(heap) for _ in range(min(LOOKS, len(heap)))]
            chosen.update((entry[-1], None) for entry in heads if self._entries.get(entry[-1]) is entry)
        for request in chosen:
            self._push(request)

    def _push(self, request: Request) -> None:
        """Make a request ready, or give it another place."""
        entry = *self._policy.order(request, self._cache), self._numbers[request], request
        self._entries[request] = entry
        heap = self._heaps.setdefault(_kind(request), [])
        heapq.heappush(heap, entry)
        self._tidy(heap)
        if not self._policy.fixed:
            self._looked_at[request] = None
            self._looked_at.move_to_end(request)

    def _withdraw(self, request: Request) -> None:
        """Let a request be ready no more."""
        entry, heap = self._entries.pop(request), self._heaps[_kind(request)]
        if heap[0] is entry:
            heapq.heappop(heap)
        self._looked_at.pop(request, None)
        self._tidy(heap)

    def _tidy(self, heap: list[Entry]) -> None:
        """Keep dead entries few."""
        if len(heap) > 2 * len(self._entries) + LOOKS:
            heap[:] = [entry for entry in heap if self._entries.get(entry[-1]) is entry]
            heapq.heapify(heap)

    def check_integrity(self, cause: Callable[[Request], Cause | None]) -> None:
        """Raise AssertionError if somebody is lost, or is parked that could run; `cause` tells why one cannot."""
        assert self._numbers.keys() == self._entries.keys() | self._causes.keys(), "a waiting request is lost"
        assert not self._entries.keys() & self._causes.keys(), "a request is ready and parked"
        for request, entry in self._entries.items():
            assert entry in self._heaps[_kind(request)], "a request that is ready has no place"
        parked = {request: reason for reason, requests in self._parked.items() for request in requests}
        assert parked == self._causes and all(self._parked.values()), "who is parked for what does not add up"
        assert all(cause(request) is not None for request in parked), "a parked request could run"
        assert self._policy.fixed or self._looked_at.keys() == self._entries.keys()
        since = [request.queue.waiting_since for request in self._young]
        assert since == sorted(since), "requests do not age in the order in which they began to wait"


def _kind(request: Request) -> tuple[bool, str]:
    return request.adapter is not None, request.owner
