"""The record of one answer in an engine, without its text. Metrics, traces and explanations are made of it.

An engine makes it from the arrival of the request on and sends it with the answer's last event. Times are seconds after
that arrival; a request that another engine continued has a record of each engine that ended it.
"""

from collections.abc import Mapping
from typing import Literal, get_args

import msgspec

Lack = Literal["rows", "blocks", "budget", "adapter", "batch"]
"""A thing that the best waiting request lacks: a row, blocks of the KV cache, tokens or time of the step, a place of
its adapter, or an open static batch."""
Wait = Lack | Literal["queue", "grammar", "load", "images", "turn", "trial"]
"""A reason why a request waits.

Those in the queue wait for what the first of it lacks, or, if it lacks nothing, for the next step (`queue`). Others
wait for their grammar, a load from a tier, their images, the prompt of the sample that leads them (`turn`), or for
others that run apart because a step failed (`trial`).
"""
WAITS: tuple[Wait, ...] = (*get_args(Lack), *get_args(get_args(Wait)[1]))
Loss = Literal["preempted", "undone", "weights"]
"""A way of losing a row: to others, because a step failed, or because the weights of the model changed."""
MOST_CHUNKS = 32


class Chunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A part of the prompt that one step computed, or of the tokens that it computed again after it lost its row."""

    began: float
    """The time at which the step was submitted."""
    ended: float
    """The time at which its result came."""
    start: int
    """The position of the first token."""
    tokens: int


class OwnWait(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A time for which a request waited for something of its own, such as a load from a tier."""

    cause: Wait
    began: float
    ended: float


class Gap(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The time between two tokens."""

    seconds: float
    began: float
    cause: Literal["prefill", "step"] | Loss
    """The thing that came between: parts of prompts in the steps, the loss of its row, or nothing but a step that took
    so long."""


class Drafts(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The drafts of an answer: how many were verified, and how many of these accepted."""

    verified: int = 0
    accepted: int = 0


class RequestRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The record of one answer in one engine; a beam search has one for all of its answers.

    Of a search, a wait is time in which none of its beams has a row, and a step counts once for all beams in it.
    """

    request_id: str
    arrived: float
    """The time at which the engine got it, in seconds since 1970."""
    prompt_tokens: int
    answer_tokens: int
    """The tokens that this engine added to it."""
    finish_reason: str
    ended: float
    first_step: float | None = None
    """The time at which the first step that computed some of it was planned; None: none was."""
    first_token: float | None = None
    waits: Mapping[Wait, float] = {}
    """The seconds for which it had no row, by cause; those after a preemption are included. Their sum is all of them.

    It counts as `load` or `images` while it could not run for that, also if others were before it in the queue."""
    cached: Mapping[str, int] = {}
    """The prompt tokens that were not computed, by source: `device`, or the name of a store."""
    chunks: tuple[Chunk, ...] = ()
    """The first MOST_CHUNKS parts of the prompt that steps computed."""
    chunk_count: int = 0
    preemptions: tuple[float, ...] = ()
    """The times at which it lost its row to others; the first MOST_CHUNKS."""
    preemption_count: int = 0
    undone: int = 0
    """The number of times it lost its row because a step failed, its own or one before it, or the weights changed."""
    steps: int = 0
    """The number of steps that computed some of it."""
    company: float = 0.0
    """The mean number of other sequences in these steps."""
    longest_gap: Gap | None = None
    """The longest time between two of its tokens."""
    drafts: Drafts = Drafts()
    own_waits: tuple[OwnWait, ...] = ()
    """The first MOST_CHUNKS times for which it waited for something of its own; they are in `waits`, too."""
