"""How the requests of several owners share the rows of a batch and the blocks: who goes first, and who gives way.

An owner is whoever the server tells apart: an API key, or the batches of one. Owners with fewer running requests go
first, and of equal ones the one that began a request longest ago. A request that finds no room takes the place of
another owner's, as long as that one keeps more requests than its own owner has then. An owner with nothing running
also takes the only place of another, once that was used for QUANTUM steps, and twice as many after each preemption: so
everybody's turn comes, and whatever takes long is done at last. All this is among requests that the policy thinks
equal or worse; with one owner nothing of it happens.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvern.cache.manager import KVCacheManager
from kvern.engine.policy import Policy
from kvern.engine.running import RunningRequests
from kvern.request import Request, State

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
        self._lacking: Lacking | None = None

    def is_new(self, request: Request) -> bool:
        """Nothing of its owner runs, and it has not run either."""
        return not request.preemptions and not self._running.rows[request.owner]

    def lacks(self, lacking: Lacking) -> None:
        """Make room in the next step, if anybody has to give way."""
        self._lacking = lacking

    def giving_way(self, step: int) -> Iterator[Request]:
        """Who is to be preempted for the one that found no room. The caller does so before it asks for the next."""
        lacking, self._lacking = self._lacking, None
        if lacking is None or lacking.request.state is not State.WAITING:
            return
        if lacking.adapter:
            users = [other for other in self._running if other.adapter is not None]
            victim = self._victim(lacking.request, users, step)
            if victim is not None:
                yield from [other for other in users if other.adapter == victim.adapter]
            return
        rows, blocks = lacking.rows, lacking.blocks
        while rows > 0 or blocks > 0:
            victim = self._victim(lacking.request, self._running, step)
            if victim is None:
                return
            rows, blocks = rows - 1, blocks - len(victim.block_ids)
            yield victim

    def worst(self, scheduled: set[int]) -> Request:
        """Who loses its blocks to one that runs: the last one whose row is not in `scheduled`, of those with most rows.

        Those that the policy thinks better stay, however many rows their owners have.
        """
        left = [other for other in reversed(list(self._running)) if other.slot not in scheduled]
        if len(self._running.rows) == 1:
            return left[0]
        return max(left, key=lambda other: (self._rank(other), self._running.rows[other.owner]))

    def _victim(self, request: Request, running: Iterable[Request], step: int) -> Request | None:
        """The worst of the owner with the most rows, of those that have to give way."""
        counts = self._running.rows
        if len(counts) <= (request.owner in counts):
            return None
        rank, mine = self._rank(request), self._running.share(request)[0]

        def gives_way(other: Request) -> bool:
            if other.owner == request.owner or self._rank(other) < rank:
                return False
            longest = QUANTUM << min(other.preemptions, MOST_DOUBLED)
            return counts[other.owner] > mine + 1 or (not mine and step - other.running_since >= longest)

        able = [other for other in reversed(list(running)) if gives_way(other)]
        return max(able, key=lambda other: (self._rank(other), counts[other.owner]), default=None)

    def _rank(self, request: Request) -> tuple[bool, float]:
        """What the policy says, without turns; smaller is better."""
        return self._policy.order(request, self._cache)[:2]


def by_owners(requests: Sequence[Request], step: int) -> Sequence[Request]:
    """The same requests, those of each owner together; the owners take turns at being the first, step by step."""
    owners = list(dict.fromkeys(request.owner for request in requests))
    if len(owners) < 2:
        return requests
    places = {owner: (place - step) % len(owners) for place, owner in enumerate(owners)}
    return sorted(requests, key=lambda request: places[request.owner])
