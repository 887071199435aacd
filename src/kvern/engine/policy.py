"""Who goes first: a policy gives each waiting or running request a key, and smaller keys go first.

A policy is registered in POLICIES under the name that `EngineConfig.policy` selects. Requests that have waited for long
go before all others, whatever the policy says, so that none can starve anybody; ties go by turn, then by arrival.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvern.cache.manager import KVCacheManager
from kvern.request.request import Request, State

Order = tuple[bool, float, int, int]
"""Smaller goes first."""


@dataclass(frozen=True)
class Policy:
    """How requests are ordered. The key of a running request never changes."""

    key: Callable[[Request, KVCacheManager], float]
    fixed: bool = True
    """The key of a waiting request does not change either."""
    ages: bool = True
    """Somebody could wait for ever, if it were not for aging."""

    def order(self, request: Request, cache: KVCacheManager) -> Order:
        """Aged requests first, then by the key, then by turn, then by arrival."""
        key = 0 if request.queue.aged else self.key(request, cache)
        return not request.queue.aged, key, request.spec.turn, request.queue.arrival


def first_come(request: Request, cache: KVCacheManager) -> float:
    """In the order of arrival."""
    return 0


def lowest_priority_number(request: Request, cache: KVCacheManager) -> float:
    """By the `priority` that came with the request; 0 is ordinary, negative is urgent."""
    return request.spec.priority


def shortest_job(request: Request, cache: KVCacheManager) -> float:
    """By the tokens that prompt and answer can have in all."""
    return request.prompt_length + request.max_tokens


def longest_cached_prefix(request: Request, cache: KVCacheManager) -> float:
    """By the cached tokens that the request would reuse now, most first; running requests by what they did reuse."""
    return -(request.answer.cached_tokens if request.state is State.RUNNING else cache.cached_tokens(request))


POLICIES = {
    "fcfs": Policy(first_come, ages=False),
    "priority": Policy(lowest_priority_number),
    "sjf": Policy(shortest_job),
    "prefix": Policy(longest_cached_prefix, fixed=False),
}
