"""What the prefix cache finds, copies, evicts and counts, in small cases."""

from kvern.cache.manager import KVCacheManager
from kvern.request.request import PromptInput, Request, RequestSpec
from kvern.request.sampling_params import ResolvedParams


def asking(tokens: list[int]) -> Request:
    return Request(RequestSpec("", PromptInput(tokens), ResolvedParams(), 1))


def finished_request(cache: KVCacheManager, tokens: list[int], step: int) -> None:
    """A request that computed all its tokens and left."""
    request = asking(tokens)
    assert cache.admit(request, step) is not None
    request.num_computed_tokens = len(tokens)
    cache.free(request, step)


def cached(cache: KVCacheManager, tokens: list[int]) -> int:
    return cache.cached_tokens(asking([*tokens, 9]))


def test_the_least_recently_used_leaf_goes_first() -> None:
    cache = KVCacheManager(6, 2)
    for step, tokens in enumerate(([1, 1, 1, 1], [2, 2, 2, 2], [3, 3, 3, 3])):
        finished_request(cache, tokens, step)
    finished_request(cache, [1, 1, 1, 1, 4], 9)  # evicts the end of the second, uses the first
    assert [cached(cache, [token] * 4) for token in (1, 2, 3)] == [4, 2, 4]
    cache.tree.evict(1)
    assert [cached(cache, [token] * 4) for token in (1, 2, 3)] == [4, 0, 4]
    cache.tree.evict(3)
    assert [cached(cache, [token] * 4) for token in (1, 2, 3)] == [4, 0, 0]


def test_the_head_of_a_block_is_copied_and_the_rest_computed() -> None:
    cache = KVCacheManager(8, 4)
    finished_request(cache, [1, 2, 3, 4, 5, 6, 7, 8], 1)
    request = asking([1, 2, 3, 4, 5, 6, 0, 0, 0])
    copies = cache.admit(request, 2)
    assert copies is not None and [copy.tokens for copy in copies] == [2]
    assert request.num_computed_tokens == 6 and copies[0].target == request.block_ids[1] != copies[0].source


def test_a_copy_never_reads_what_its_own_step_writes() -> None:
    cache = KVCacheManager(8, 4)
    leader = asking([1, 2, 3, 4, 5])
    assert cache.admit(leader, 7) is not None
    leader.num_computed_tokens = 5
    cache.publish(leader, 7)
    whole = asking([1, 2, 3, 4, 6])
    assert cache.admit(whole, 7) == [] and whole.num_computed_tokens == 4  # blocks are written before they are read
    head = asking([1, 2, 3, 0])
    assert cache.admit(head, 7) == [] and head.num_computed_tokens == 0
    later = asking([1, 2, 3, 0])
    copies = cache.admit(later, 8)
    assert copies is not None and later.num_computed_tokens == 3


def test_hits_are_counted_once_a_request() -> None:
    cache = KVCacheManager(8, 4)
    finished_request(cache, [1] * 8, 1)
    request = asking([1] * 12)
    assert cache.admit(request, 2) is not None
    cache.free(request, 2)
    request.queue.preemptions += 1
    assert cache.admit(request, 3) is not None
    assert (cache.statistics.hit_tokens, cache.statistics.queried_tokens) == (8, 20)


def test_a_request_that_was_looked_for_finds_what_has_changed_since() -> None:
    cache = KVCacheManager(8, 2)
    finished_request(cache, [1] * 4, 1)
    request, other = asking([1] * 9), asking([1, 1, 2])
    assert cache.cached_tokens(request) == 4
    finished_request(cache, [1] * 8, 2)
    assert cache.cached_tokens(request) == 8
    cache.tree.evict(3)
    assert cache.cached_tokens(request) == 2
    other.cache_namespace = request.cache_namespace = b"other"
    assert cache.cached_tokens(request) == 0
    assert cache.admit(other, 3) is not None
    other.num_computed_tokens = 3
    cache.free(other, 3)
    assert cache.cached_tokens(request) == 2
    request.cache_namespace = b""
    assert cache.cached_tokens(request) == 2
