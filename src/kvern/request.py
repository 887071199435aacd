"""One sequence to generate, and where it stands.

    WAITING --admitted--> RUNNING --stop, length, abort--> FINISHED
       ^                     |
     | ^ +---preempted-------+      (its blocks are gone, its tokens stay and are computed again)
     v |
    LOADING                         (a tier brings more of its cached prefix, which it will then find in the tree)

`n` > 1 is several requests of one group: the first computes the prompt, the others then share its blocks. A beam search
is one request, from which others are forked when its prompt is computed.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from kvern.sampling_params import SamplingParams

if TYPE_CHECKING:
    from kvern.cache.radix import Node
    from kvern.engine.beams import BeamSearch

FinishReason = Literal["stop", "length", "abort"]


class State(enum.Enum):
    """Where a request stands; see the module's drawing."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """What scheduler, cache and runner know of one sequence. Only the engine core changes it.

    `num_computed_tokens` counts the tokens whose keys and values the steps scheduled so far will have written;
    `in_flight` the sampled tokens that the host has not seen yet. While drafts are verified, both count as if all were
    accepted; what was rejected is taken back when the step's result is there.
    """

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    """Tokens to generate at most; the engine has resolved None to what the context leaves."""
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    """Sampling one of these ends the request (end-of-sequence tokens included)."""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    priority: int = 0
    namespace: bytes = b""
    """Only requests of one namespace share cached blocks; see `cache_namespace`."""
    adapter: int | None = None
    """The key of the adapter that changes the model for it."""
    adapter_digest: bytes = b""
    """Names the adapter's content in every process; b"": unknown, its key names it in this one."""
    block_keys: Mapping[int, bytes] = field(default_factory=dict)
    """By position: what the token there stands for, if that is more than a token, as a part of an image is."""
    turn: int = 0
    """Among requests that the policy thinks equal, the lowest goes first: how several users share an engine."""
    grammar: str | None = None
    """Compiled; the answer follows it."""
    embed: bool = False
    """The last hidden state of the prompt is wanted; one token is sampled beside it and means nothing."""
    group: str | None = None
    leader: "Request | None" = None
    """The request of the group that computes the shared prompt; None for the leader itself."""
    arrival: int = 0
    """Sequence number, given by the scheduler."""
    beams: "BeamSearch | None" = None
    """The search that this is a beam of; the engine core makes it."""
    held: bool = False
    """A beam whose continuations are known, and which waits for those of the others."""

    prompt_length: int = field(init=False)
    state: State = State.WAITING
    slot: int = -1
    block_ids: list[int] = field(default_factory=list)
    nodes: "list[Node]" = field(default_factory=list)
    num_computed_tokens: int = 0
    cached_tokens: int = 0
    in_flight: int = 0
    drafts_in_flight: int = 0
    """Of the tokens in flight, those that are not sampled if drafts are rejected."""
    draft_token_ids: list[int] = field(default_factory=list)
    """What may follow `token_ids`, as a proposer guessed."""
    asked_tier: bool = False
    """Since it waits; blocks are loaded for it once at most."""
    waiting_since: int = 0
    aged: bool = False
    preemptions: int = 0
    reported_prompt_logprobs: int = 0
    """Tokens from `params.prompt_logprobs_from` on whose log-probabilities have been reported."""
    arrived_at: float = 0.0
    begun_at: float = 0.0
    """When it came and when its first step was planned, by the monotonic clock."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def __post_init__(self) -> None:
        self.prompt_length = len(self.token_ids)

    @property
    def output_length(self) -> int:
        """Generated tokens that the host knows."""
        return len(self.token_ids) - self.prompt_length

    @property
    def remaining_tokens(self) -> int:
        """Tokens still to be computed before the next one can be sampled.

        What follows a beam is chosen on the host: until then nothing remains.
        """
        sampled = self.in_flight if self.beams is None else 0
        return len(self.token_ids) + sampled - self.num_computed_tokens

    @property
    def unit(self) -> str:
        """What a user asked in one: the samples of a prompt, and the beams of a search, have this in common."""
        return self.group or self.request_id

    @property
    def answer_ids(self) -> list[str]:
        """Under which its answers are reported: its own id, or one for each of the best of its beams."""
        if self.params.beam_width is None:
            return [self.request_id]
        return [f"{self.request_id.removesuffix('#0')}#{index}" for index in range(self.params.n)]

    @property
    def cache_namespace(self) -> bytes:
        """Only requests of one namespace and one adapter share cached blocks."""
        if self.adapter is None:
            return self.namespace
        return b"adapter %s\0%s" % (self.adapter_digest.hex().encode() or b"%d" % self.adapter, self.namespace)

    @property
    def most_cached(self) -> int:
        """Tokens that may come from the prefix cache: all before the first one that has something to predict.

        That is the last token, which predicts the next, or one before a prompt token whose log-probabilities are to
        be reported still.
        """
        wanted = self.params.prompt_logprobs_from + self.reported_prompt_logprobs
        if self.params.prompt_logprobs is None or wanted >= self.prompt_length:
            return len(self.token_ids) - 1
        return wanted - 1

    @property
    def prompt_scheduled(self) -> bool:
        """All of the prompt has been given to a step, so that its blocks can be shared."""
        return self.state is State.FINISHED or self.num_computed_tokens >= self.prompt_length
