"""The demands of requests on sampling."""

from collections.abc import Iterable, Sequence
from functools import reduce
from operator import or_

from kvern.request.step import Fork, NewRequest


class SamplingNeeds:
    """Bit flags of what a request asks of sampling beyond the temperature; each step reads them."""

    NOTHING = 0
    FILTERS = 1
    """top_k, top_p, min_p or typical_p."""
    CONSTRAINTS = 2
    """Penalties, biases and bans of tokens: they change the logits."""
    LOGPROBS = 4
    RARE_FILTERS = 8
    """The filters of `sample/rare_filters.py`: PyTorch computes them, after the graph."""
    EMBEDDING = 16
    """The hidden state is wanted beside the token."""
    GRAMMAR = 32
    """The host says which tokens may follow, when it knows the last one."""
    BEAMS = 64
    """The most probable tokens are wanted, not one; the host chooses."""
    PROCESSORS = 128
    """Custom code changes the logits."""
    REPETITIONS = 256
    """DRY changes the logits; PyTorch does that."""


def needs_of(request: NewRequest) -> int:
    """The demands of this request."""
    params = request.params
    drawn = not params.is_greedy
    asked = {
        SamplingNeeds.FILTERS: drawn and params.has_common_filters,
        SamplingNeeds.CONSTRAINTS: request.spec.bans_or_biases or params.penalizes_tokens,
        SamplingNeeds.LOGPROBS: params.logprobs is not None,
        SamplingNeeds.RARE_FILTERS: drawn and params.has_rare_filters,
        SamplingNeeds.EMBEDDING: request.spec.embed,
        SamplingNeeds.GRAMMAR: request.spec.grammar is not None,
        SamplingNeeds.BEAMS: params.beam_width is not None,
        SamplingNeeds.PROCESSORS: bool(params.logits_processors),
        SamplingNeeds.REPETITIONS: params.penalizes_repetitions,
    }
    return reduce(or_, (need for need, wanted in asked.items() if wanted), SamplingNeeds.NOTHING)


class RowNeeds(list[int]):
    """The demands of the request in each row."""

    def __init__(self, slots: int) -> None:
        super().__init__([0] * slots)

    def fork(self, forked: Sequence[Fork]) -> None:
        """Let rows go on behind others, all as they were before."""
        for slot, needs in [(fork.slot, self[fork.source]) for fork in forked]:
            self[slot] = needs

    def join(self, joined: Iterable[NewRequest]) -> None:
        """Let requests take their rows."""
        for request in joined:
            self[request.slot] = needs_of(request)
