"""How the requests of several owners share the rows of a batch and the blocks: who goes first, and who gives way.

An owner is whoever the server tells apart: an API key, a client without one, or batches. Owners with fewer running
requests go first, and of equal ones the one that began a request longest ago. A request that finds no room takes the
place of another owner's, as long as that one keeps more requests than its own owner has then. An owner with nothing
running also takes the only place of another, once that was used for QUANTUM steps, and twice as many after each
preemption: so everybody's turn comes, and whatever takes long is done at last. Beams of a search that has fewer rows
than beams take turns in those. All this is among requests that the policy thinks equal or worse; with one owner nothing
of it happens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvern.cache.manager import KVCacheManager
from kvern.engine.policy import Policy
from kvern.engine.running import RunningRequests
from kvern.request.request import Request, State

QUANTUM = 32
"""Steps that a request runs at least before an owner with nothing running takes the only place of its owner."""
MOST_DOUBLED = 16


@dataclass(frozen=True)
class Lacking:
    """What the best of the waiting requests did not find: rows, blocks, or a place for its adapter."""

    request: Request
    rows: int = 0
    blocks: int = 0
    adapter: bool = False


class Shares:
    """Chooses among the running requests; the scheduler preempts."""

    def __init__(self, running: RunningRequests, policy: Policy, cache: KVCacheManager) -> None:
        self._running, self._policy, self._cache = running, policy, cache
        self._lacking: dict[Request, Lacking] = {}  # best first

    def is_new(self, request: Request) -> bool:
        """Nothing of its owner runs, and it has not run either."""
        return not request.queue.preemptions and not self._running.rows[request.owner]

    def lacks(self, lacking: Lacking) -> None:
        """Make room in the next step, if anybody has to give way."""
        self._lacking[lacking.request] = lacking

    def giving_way(self, step: int) -> Iterator[Request]:
        """Who is to be preempted for those that found no room. The caller does so before it asks for the next."""
        all_lacking, self._lacking = list(self._lacking.values()), {}
        for lacking in all_lacking:
            if lacking.request.state is not State.WAITING:
                continue
            if lacking.adapter:
                yield from self._users(lacking.request, step)
            else:
                yield from self._victims(lacking, step)

    def _victims(self, lacking: Lacking, step: int) -> Iterator[Request]:
        """Those whose rows and blocks are enough, or all that give way."""
        rows, blocks = lacking.rows, lacking.blocks
        while rows > 0 or blocks > 0:
            victim = self._victim(lacking.request, step)
            if victim is None:
                return
            rows, blocks = rows - 1, blocks - len(victim.block_ids)
            yield victim

    def _users(self, request: Request, step: int) -> Sequence[Request]:
        """All who use an adapter whose place the request may have.

        Those that lost such a place before use theirs for QUANTUM steps at least, and twice as many each time.
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
        """Who loses its blocks to one that runs: the last one whose row is not in `scheduled`, of those with most rows.

        Those that the policy thinks better stay, however many rows their owners have.
        """
        left = [other for other in reversed(list(self._running)) if other.slot not in scheduled]
        if len(self._running.rows) == 1:
            return left[0]
        return max(left, key=lambda other: (self._rank(other), self._running.rows[other.owner]))

    def _victim(self, request: Request, step: int) -> Request | None:
        """The worst of the owner with the most rows, of those that have to give way; of beams one that only waits.

        A beam takes the row of one of its own search that waits for it, as all would wait for ever where others have
        the rest of the rows.
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
        """Whether requests of other owners run."""
        return len(self._running.rows) > (request.owner in self._running.rows)

    def _gives_way(self, other: Request, request: Request, step: int) -> bool:
        """Whether one that runs does so for a request of another owner."""
        if other.owner == request.owner or self._rank(other) < self._rank(request):
            return False
        counts = self._running.rows
        mine = counts[request.owner]
        return counts[other.owner] > mine + 1 or (not mine and step - other.queue.running_since >= _longest(other))

    def _rank(self, request: Request) -> tuple[bool, float]:
        """What the policy says, without turns; smaller is better."""
        return self._policy.order(request, self._cache)[:2]


def _longest(request: Request) -> int:
    """Steps that it keeps the only place of its owner."""
    return QUANTUM << min(request.queue.preemptions, MOST_DOUBLED)


def by_owners(requests: Sequence[Request], step: int) -> Sequence[Request]:
    """The same requests, those of each owner together; the owners take turns at being the first, step by step."""
    owners = list(dict.fromkeys(request.owner for request in requests))
    if len(owners) < 2:
        return requests
    places = {owner: (place - step) % len(owners) for place, owner in enumerate(owners)}
    return sorted(requests, key=lambda request: places[request.owner])
