"""Numbers of drafts of a request that are made and verified without waiting for them.

    step N: to_guess --> the device writes k drafts behind what it samples     step N + 1: to_verify --> 1 + k tokens

Step N + 1 may be planned while N is in flight: the host knows how many drafts there are, not which, nor where. Those
that the host guesses are known when it plans the step that verifies them.
"""

from collections.abc import Callable

from kvern.cache.manager import KVCacheManager
from kvern.request.request import Request, State

Wanted = Callable[[Request], int]
"""The number of drafts of a request that the device should make."""


def to_guess(request: Request, cache: KVCacheManager, others: int, wanted: int, count: int, sampled: int) -> int:
    """Returns how many drafts the device writes after a step that computes `count` tokens of a request.

    These are the `wanted` ones, as far as the next step has room; for a part of a prompt 1 if any are wanted.
    """
    room = _room(request, cache, others, count, sampled) if wanted and sampled else 0
    request.drafts.guesses = max(0, min(wanted, room))
    guesses = request.drafts.guesses if sampled else min(wanted, 1)
    if guesses:
        request.drafts.read_tokens = request.num_computed_tokens + count
    return guesses


def to_verify(request: Request, cache: KVCacheManager, others: int, spare: int) -> tuple[int, list[int]]:
    """Returns how many drafts are verified after a decode's next token, at most `spare`, and the host's drafts among
    them.

    While drafts are in flight the position of the host's is unknown; those of the device are at their positions.
    """
    if request.state is not State.RUNNING:
        return 0, []
    drafts = request.drafts.token_ids
    if drafts and not request.drafts.in_flight:
        room = min(spare, _room(request, cache, others))
        known = drafts[request.in_flight :][: max(0, room)]  # the first stand for tokens sampled meanwhile
        return len(known), known
    return max(0, min(request.drafts.guesses, spare)), []


def _room(request: Request, cache: KVCacheManager, others: int, count: int = 0, sampled: int = 0) -> int:
    """Returns how many drafts have room after `count` more tokens of a running request; below 1 for none.

    `sampled` tokens are sampled after these. A block is left to each of the `others`, and drafts end with the request.
    """
    blocks = len(request.block_ids) + max(0, cache.growth_count - others)
    return min(
        request.max_tokens - request.output_length - request.in_flight - sampled - 1,
        blocks * cache.block_size - request.num_computed_tokens - count - 1,
    )
