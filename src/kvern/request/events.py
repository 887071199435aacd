"""Reports of an engine: the token events of a step, and its counters."""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import msgspec
from msgspec.structs import replace

from kvern.request.logprobs import LogprobRows
from kvern.request.record import RequestRecord
from kvern.request.request import FinishReason
from kvern.request.store_figures import StoreFigures, summed


class TokenEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The result of one step for one answer. `token_ids` are empty if only prompt log-probabilities came.

    They are empty as well for an answer that ends without a token: a beam search found fewer answers than wanted.
    """

    request_id: str
    token_ids: list[int] = []
    logprobs: LogprobRows | None = None
    """The log-probabilities of each token, if wanted."""
    prompt_logprobs: LogprobRows | None = None
    cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    queue_seconds: float = 0.0
    """The seconds from arrival to the first step that computed some of it."""
    embedding: bytes | None = None
    """The last hidden state of the prompt, float32, if the request wants it."""
    cumulative_logprob: float | None = None
    """The log-probability of a whole answer of a beam search."""
    predicted_tokens: tuple[int, int] = (0, 0)
    """The accepted and the rejected drafts of the request's predicted output in this step."""
    loaded_tokens: Mapping[str, int] = {}
    """The part of `cached_tokens` that each store of the tier gave; reported once a request, if there is a tier."""
    record: RequestRecord | None = None
    """The record of the answer, with its last event, or in an event of its own if it was ended from outside."""
    stored_tokens: int = 0
    """The event tells only this: so many tokens of a prompt for another engine have pages in a store, and more will."""


CAUSES = (
    "weights",
    "keys",
    "products",
    "collectives",
    "step",
    "host",
    "blocks",
    "rows",
    "adapter",
    "batch",
    "tier",
    "images",
    "grammar",
    "idle",
)
"""The causes to which the seconds of an engine belong, each second to one (`engine/step_seconds.py`).

The first four are parts of steps, and `step` is a whole one on a machine of unknown speed. In `host` nothing ran
because the engine's process had not launched the next step. From `blocks` to `batch` weights were read for few requests
because another lacked this. Nothing ran while requests waited for a `tier`, `images` or a `grammar`, and in `idle`
there were none.
"""


class EngineSeconds(msgspec.Struct, array_like=True, gc=False):
    """The wall time of an engine by cause, and how fast the parts of its steps were."""

    seconds: tuple[float, ...] = ()
    """The seconds of each of `CAUSES`; empty if they are not counted."""
    reading: tuple[float, ...] = ()
    """The seconds in which weights and keys could have been read with the whole bandwidth, and those that it took."""
    computing: tuple[float, ...] = ()
    """The seconds in which products could have been computed at the whole rate, and those that it took."""
    bandwidth: float = 0.0
    """The bytes per second of a card; 0: nobody knows."""
    rate: float = 0.0
    """The operations per second of a card."""
    step_time_ratio: float = 0.0
    """The time of steps relative to what is usual for such steps; 0: that is not known."""
    recomputed_tokens: int = 0
    """Tokens that were computed before: of requests that lost their rows, or that another engine had."""


class CacheSize(EngineSeconds, array_like=True, gc=False):
    """The size of a KV cache that changes while the engine runs, in chunks of its memory, at present."""

    cache_chunks: int = 0
    """The chunks that it has; 0: it does not change."""
    cache_touched: int = 0
    """The chunks that were used since the cache has them: others have taken no memory of the machine so far."""
    cache_held: int = 0
    """The chunks that running requests would hold if their last ones were full."""
    cache_wanted: int = 0
    """The chunks that running and waiting requests will need until their ends, by a forecast."""
    cache_refused: int = 0
    """The chunks that it was last asked to have, if a GPU had no memory for as many; 0: it has what was asked."""


class EngineStatistics(CacheSize, array_like=True, gc=False):
    """Counters since the engine started; `running`, `waiting` and `kv_cache_usage` are current values."""

    requests: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    queried_tokens: int = 0
    prefill_tokens: int = 0
    """Tokens computed in prefills, that is with a query length above 1 without drafts."""
    steps: int = 0
    drafts_by_position: tuple[int, ...] = ()
    """Drafts that were verified as the 1st, 2nd, ... after a known token; `accepted_by_position` were accepted."""
    accepted_by_position: tuple[int, ...] = ()
    preemptions: int = 0
    running: int = 0
    waiting: int = 0
    kv_cache_usage: float = 0.0
    """The share of KV blocks that running requests hold."""
    target_itl: float = 0.0
    """The target for the seconds of steps with decodes; 0 is no target."""
    scheduled: int = 0
    """The sequences of all steps; each counts in every step that it takes part in."""
    decoded_images: int = 0
    encoded_images: int = 0
    image_rows_hit: int = 0
    """Rows of images that requests needed and that were there."""
    stores: dict[str, StoreFigures] = {}
    """The stores of the KV cache's tier by name; of several ranks those of the first."""

    def at_the_end(self) -> "EngineStatistics":
        """Returns the counters of an engine that has ended or sleeps, without its current values."""
        return replace(
            self,
            running=0,
            waiting=0,
            kv_cache_usage=0.0,
            target_itl=0.0,
            step_time_ratio=0.0,
            cache_chunks=0,
            cache_touched=0,
            cache_held=0,
            cache_wanted=0,
            cache_refused=0,
        )

    @property
    def prefix_cache_hit_rate(self) -> float:
        """The share of prompt tokens that came from the prefix cache."""
        return self.cached_tokens / self.queried_tokens if self.queried_tokens else 0.0

    @property
    def draft_tokens(self) -> int:
        """The number of verified drafts."""
        return sum(self.drafts_by_position)

    @property
    def accepted_tokens(self) -> int:
        """The number of accepted drafts."""
        return sum(self.accepted_by_position)


def all_together(each: Sequence[EngineStatistics]) -> EngineStatistics:
    """Merges statistics of several engines: sums of counters, and maxima of shares and times."""
    found: dict[str, Any] = {}
    for name in EngineStatistics.__struct_fields__:
        values = [getattr(one, name) for one in each]
        if name in ("kv_cache_usage", "target_itl", "step_time_ratio", "bandwidth", "rate"):
            found[name] = max(values)
        elif name == "stores":
            found[name] = summed(values)
        elif name in ("drafts_by_position", "accepted_by_position", "seconds", "reading", "computing"):
            found[name] = tuple(map(sum, zip_longest(*values, fillvalue=0)))
        else:
            found[name] = sum(values)
    return EngineStatistics(**found)
