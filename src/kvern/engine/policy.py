"""Who goes first: a policy gives each waiting or running request a key, and smaller keys go first.

A policy is registered in POLICIES under the name that `EngineConfig.policy` selects. Aging and ties (by turn, then
arrival) are the scheduler's, so that no policy can starve anybody.
"""

from collections.abc import Callable

from kvern.cache.manager import KVCacheManager
from kvern.request import Request, State

PolicyKey = Callable[[Request, KVCacheManager], float]


def first_come(request: Request, cache: KVCacheManager) -> float:
    """In the order of arrival."""
    return 0


def lowest_priority_number(request: Request, cache: KVCacheManager) -> float:
    """By the `priority` that came with the request; 0 is ordinary, negative is urgent."""
    return request.priority


def shortest_job(request: Request, cache: KVCacheManager) -> float:
    """By the tokens that prompt and answer can have in all."""
    return request.prompt_length + request.max_tokens


def longest_cached_prefix(request: Request, cache: KVCacheManager) -> float:
    """By the cached tokens that the request would reuse now, most first; running requests by what they did reuse."""
    return -(request.cached_tokens if request.state is State.RUNNING else cache.cached_tokens(request))


POLICIES: dict[str, PolicyKey] = {
    "fcfs": first_come,
    "priority": lowest_priority_number,
    "sjf": shortest_job,
    "prefix": longest_cached_prefix,
}
