"""What an engine says of its work: the token events of a step, and its counters."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import msgspec
from msgspec.structs import replace

from kvern.request.progress import FinishReason
from kvern.request.step import TokenLogprobs


class TokenEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one step did for one answer. `token_ids` are empty when only prompt log-probabilities came.

    Or when an answer ends without a token: a beam search found fewer answers than were asked for.
    """

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    """Of each of the tokens, if they were asked for; of the first ones they may come before, without the tokens."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    queue_seconds: float = 0.0
    """From arrival to the first step that computed something of it."""
    embedding: bytes | None = None
    """The last hidden state of the prompt, float32, of a request that asked for it."""
    cumulative_logprob: float | None = None
    """Of the whole answer, which a beam search found."""
    predicted_tokens: tuple[int, int] = (0, 0)
    """Drafts of the request's prediction that the step has verified: those that were right, and those that were not."""


MOST_TOLD = 1024
"""Log-probabilities that are told at once: who hears of them does other work in between."""


def in_parts(events: Sequence[TokenEvent]) -> Iterator[list[TokenEvent]]:
    """The same events, in lists of at most MOST_TOLD log-probabilities, or of one token's; one list at least."""
    part, told = list[TokenEvent](), 0
    for event in events:
        for name in ("prompt_logprobs", "logprobs"):
            tables, begun = getattr(event, name) or [], 0
            for place, table in enumerate(tables):
                told += len(table)
                if told > MOST_TOLD:
                    if place > begun:
                        part.append(replace(TokenEvent(event.request_id), **{name: tables[begun:place]}))
                    if part:
                        yield part
                    part, told, begun = [], len(table), place
            if begun:
                event = replace(event, **{name: tables[begun:]})
        part.append(event)
    yield part


class EngineStatistics(msgspec.Struct, array_like=True, gc=False):
    """Counted since the engine started; `running`, `waiting` and `kv_cache_usage` are of this moment."""

    requests: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    queried_tokens: int = 0
    prefill_tokens: int = 0
    """Computed in runs of more than one, but for drafts."""
    steps: int = 0
    drafts_by_position: tuple[int, ...] = ()
    """Drafts that were verified as the 1st, 2nd, ... behind a known token; `accepted_by_position` were right."""
    accepted_by_position: tuple[int, ...] = ()
    preemptions: int = 0
    running: int = 0
    waiting: int = 0
    kv_cache_usage: float = 0.0
    """Share of the KV blocks that running requests hold."""
    target_itl: float = 0.0
    """Seconds that steps with decodes should take; 0: there is no such limit."""
    scheduled: int = 0
    """Sequences of all steps, each counted in every step that it had a part in."""

    def at_the_end(self) -> "EngineStatistics":
        """What stays of them when the engine has ended: the counters, and nothing that was of its last moment."""
        return replace(self, running=0, waiting=0, kv_cache_usage=0.0, target_itl=0.0)

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Prompt tokens taken from the prefix cache, as a share of all prompt tokens."""
        return self.cached_tokens / self.queried_tokens if self.queried_tokens else 0.0

    @property
    def draft_tokens(self) -> int:
        """Drafts that were verified."""
        return sum(self.drafts_by_position)

    @property
    def accepted_tokens(self) -> int:
        """Drafts that were right."""
        return sum(self.accepted_by_position)


def all_together(each: Sequence[EngineStatistics]) -> EngineStatistics:
    """Of several engines: the sums of what is counted, and the largest of shares and times."""
    found: dict[str, Any] = {}
    for name in EngineStatistics.__struct_fields__:
        values = [getattr(one, name) for one in each]
        if name in ("kv_cache_usage", "target_itl"):
            found[name] = max(values)
        elif name in ("drafts_by_position", "accepted_by_position"):
            found[name] = tuple(map(sum, zip_longest(*values, fillvalue=0)))
        else:
            found[name] = sum(values)
    return EngineStatistics(**found)
