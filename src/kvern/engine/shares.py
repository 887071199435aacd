"""Fair shares of rows and blocks between owners: the order of admission, and preemption.

An owner is an API key, a client without one, or batches. Owners with fewer running requests go first; of equal ones,
the one that started a request longest ago. A request without room preempts one of another owner, as long as that owner
then still has more running requests than its own. An owner with nothing running also takes the only row of another
owner, once that has run for QUANTUM steps, and twice as many after each preemption: so every owner gets its turn, and
long requests end at last. Beams of a search with fewer rows than beams take turns in these rows. All this holds among
requests that the policy ranks equal or worse; with one owner nothing of it happens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvern.cache.manager import KVCacheManager
from kvern.engine.queues import Policy, RunningRequests
from kvern.request.request import Request, State

QUANTUM = 32
"""The least steps that a request runs before an owner with nothing running takes the only row of its owner."""
MOST_DOUBLED = 16


@dataclass(frozen=True)
class Lacking:
    """The resources that the best waiting request lacked: rows, blocks, or a slot for its adapter."""

    request: Request
    rows: int = 0
    blocks: int = 0
    adapter: bool = False


class Shares:
    """Chooses the running requests to preempt; the scheduler preempts them."""

    def __init__(self, running: RunningRequests, policy: Policy, cache: KVCacheManager) -> None:
        self._running = running
        self._policy = policy
        self._cache = cache
        self._lacking: dict[Request, Lacking] = {}  # best first

    def is_new(self, request: Request) -> bool:
        """True if its owner has nothing running, and it has not run either."""
        return not request.queue.preemptions and not self._running.rows[request.owner]

    def lacks(self, lacking: Lacking) -> None:
        """Notes a lack of resources, for which requests may be preempted in the next step."""
        self._lacking[lacking.request] = lacking

    @property
    def has_lacking(self) -> bool:
        """True if requests lacked something in the last step, for which others may give way."""
        return bool(self._lacking)

    def giving_way(self, step: int) -> Iterator[Request]:
        """Yields the requests to preempt for those without room. The caller preempts each before it takes the next."""
        all_lacking, self._lacking = list(self._lacking.values()), {}
        for lacking in all_lacking:
            if lacking.request.state is not State.WAITING:
                continue
            if lacking.adapter:
                yield from self._users(lacking.request, step)
            else:
                yield from self._victims(lacking, step)

    def _victims(self, lacking: Lacking, step: int) -> Iterator[Request]:
        """Yields requests whose rows and blocks are enough, or all that can be preempted."""
        rows, blocks = lacking.rows, lacking.blocks
        while rows > 0 or blocks > 0:
            victim = self._victim(lacking.request, step)
            if victim is None:
                return
            rows, blocks = rows - 1, blocks - len(victim.block_ids)
            yield victim

    def _users(self, request: Request, step: int) -> Sequence[Request]:
        """Returns all users of an adapter whose slot the request may take.

        Users that lost such a slot before keep theirs for QUANTUM steps at least, and twice as many each time.
        """
        places: dict[int, list[Request]] = {}
        for other in self._running if self._concerns(request) else ():
            if other.adapter is not None:
                places.setdefault(other.adapter, []).append(other)

        def leaves(other: Request) -> bool:
            rests = step - other.queue.running_since >= _longest(other) // 2 if other.queue.preemptions else True
            return rests and self._gives_way(other, request, step)

        return max((users for users in places.values() if all(map(leaves, users))), key=len, default=())

    def worst(self, scheduled: set[int]) -> Request:
        """Returns the request that loses its blocks to a running one: the last without a row in `scheduled`, of the
        owner with the most rows, among those that the policy ranks worst."""
        left = [other for other in reversed(list(self._running)) if other.slot not in scheduled]
        if len(self._running.rows) == 1:
            return left[0]
        return max(left, key=lambda other: (self._rank(other), self._running.rows[other.owner]))

    def _victim(self, request: Request, step: int) -> Request | None:
        """Returns the worst request of the owner with the most rows that can be preempted; of beams, one that only
        waits.

        A beam takes the row of a waiting beam of its own search: if other requests have the rest of the rows, all beams
        would wait for ever.
        """
        if not self._concerns(request):
            return None
        counts, backwards = self._running.rows, list(reversed(self._running))
        if request.search is not None and request.output_length:
            own = [other for other in backwards if other.is_held and other.search is request.search]
            if own:
                return own[0]
        able = [other for other in backwards if self._gives_way(other, request, step)]
        return max(able, key=lambda other: (self._rank(other), counts[other.owner], other.is_held), default=None)

    def _concerns(self, request: Request) -> bool:
        """True if requests of other owners run."""
        return len(self._running.rows) > (request.owner in self._running.rows)

    def _gives_way(self, other: Request, request: Request, step: int) -> bool:
        """True if a running request can be preempted for a request of another owner."""
        if other.owner == request.owner or self._rank(other) < self._rank(request):
            return False
        counts = self._running.rows
        mine = counts[request.owner]
        return counts[other.owner] > mine + 1 or (not mine and step - other.queue.running_since >= _longest(other))

    def _rank(self, request: Request) -> tuple[bool, float]:
        """Returns the policy's rank without turns; smaller is better."""
        return self._policy.order(request, self._cache)[:2]


def _longest(request: Request) -> int:
    """Returns the steps for which a request keeps the only row of its owner."""
    return QUANTUM << min(request.queue.preemptions, MOST_DOUBLED)


def by_owners(requests: Sequence[Request], step: int) -> Sequence[Request]:
    """Returns the requests grouped by owner; the owners take turns at being first, step by step."""
    if len(requests) < 2:
        return requests
    owners = list(dict.fromkeys(request.owner for request in requests))
    if len(owners) < 2:
        return requests
    places = {owner: (place - step) % len(owners) for place, owner in enumerate(owners)}
    return sorted(requests, key=lambda request: places[request.owner])
