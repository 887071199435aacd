"""How many drafts of a request are guessed and verified, so that nobody waits for them.

    step N: to_guess --> the device writes k drafts behind what it samples     step N + 1: to_verify --> 1 + k tokens

Step N + 1 may be planned while N is in flight: the host knows how many drafts there are, not which, nor where. Those
that the host guesses are known when it plans the step that verifies them.
"""

from collections.abc import Callable

from kvern.cache.manager import KVCacheManager
from kvern.request.request import Request, State

Wanted = Callable[[Request], int]
"""How many drafts the device should guess of a request."""


def to_guess(request: Request, cache: KVCacheManager, others: int, wanted: int, count: int, sampled: int) -> int:
    """How many drafts the device is to write behind a step that computes `count` tokens of a request.

    Those that are `wanted`, as far as the step behind it has room. Of a part of a prompt: 1 if some are.
    """
    room = _room(request, cache, others, count, sampled) if wanted and sampled else 0
    request.drafts.guesses = max(0, min(wanted, room))
    guesses = request.drafts.guesses if sampled else min(wanted, 1)
    if guesses:
        request.drafts.read_tokens = request.num_computed_tokens + count
    return guesses


def to_verify(request: Request, cache: KVCacheManager, others: int, spare: int) -> tuple[int, list[int]]:
    """How many drafts are verified behind a decode's next token, at most `spare`, and which, if they are the host's.

    While others are verified nobody knows where the host's would go; those of the device are in their places.
    """
    if request.state is not State.RUNNING:
        return 0, []
    drafts = request.drafts.token_ids
    if drafts and not request.drafts.in_flight:
        room = min(spare, _room(request, cache, others))
        known = drafts[request.in_flight :][: max(0, room)]  # the first are guesses at tokens sampled meanwhile
        return len(known), known
    return max(0, min(request.drafts.guesses, spare)), []


def _room(request: Request, cache: KVCacheManager, others: int, count: int = 0, sampled: int = 0) -> int:
    """How many drafts have room behind `count` more tokens of a running request, some of which are sampled behind.

    They leave a block to each of the `others`, and end where the request does; below 1: none.
    """
    blocks = len(request.block_ids) + max(0, cache.growth_count - others)
    return min(
        request.max_tokens - request.output_length - request.in_flight - sampled - 1,
        blocks * cache.block_size - request.num_computed_tokens - count - 1,
    )
