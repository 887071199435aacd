"""Scheduling policies: a key for each waiting or running request; smaller keys go first.

A policy is registered in POLICIES under the name that `EngineConfig.policy` selects. Requests that have waited long go
before all others with any policy, so that none starves; equal ones are ordered by turn, then by arrival.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvern.cache.manager import KVCacheManager
from kvern.request.request import Request, State

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
