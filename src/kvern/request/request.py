"""What is asked of the engine, and each sequence of it with where it stands.

    RequestSpec   what a user asked with one prompt; never changes, and crosses the wire as it is
      Request     one sequence to generate, as the scheduler and the cache see it: the spec, and what steps change

    WAITING --admitted--> RUNNING --stop, length, abort--> FINISHED
       ^                     |
     | ^ +---preempted-------+      (its blocks are gone, its tokens stay and are computed again)
     v |
    LOADING                         (a tier brings more of its cached prefix, which it will then find in the tree)

`n` > 1 is several requests of one group: the first computes the prompt, the others then share its blocks. A beam search
is one request, from which others are forked when its prompt is computed.
"""

import enum
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec

from kvern.request.progress import AnswerProgress, DraftProgress, QueueProgress
from kvern.request.sampling_params import ResolvedParams

if TYPE_CHECKING:
    from kvern.cache.radix import Node

TOLD_AT_ONCE = 32
"""Tokens of an answer that is wanted whole. To hear of them costs little more than to hear of one."""


class PromptInput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A prompt as the model reads it: what texts, lists of token ids and conversations become."""

    token_ids: list[int]
    attachments: tuple[bytes, ...] = ()
    """What tokens stand for that is no text, in the form that the model's own code reads; opaque to all others."""
    block_keys: tuple[tuple[int, bytes], ...] = ()
    """(position, digest): the token there stands for content of this digest. Cached blocks are shared only where tokens
    and digests are the same. Positions ascend."""
    second_text: int | None = None
    """Where the second of two texts begins that an encoder reads together; None: it is one text."""

    def __len__(self) -> int:
        return len(self.token_ids)


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """What a request may ask for beside prompt and parameters. An API makes it, and `RequestSpec` has its fields."""

    priority: int = 0
    namespace: bytes = b""
    """Only requests of one namespace share cached blocks."""
    embed: bool = False
    """The last hidden state of the prompt is wanted; one token is sampled beside it and means nothing."""
    prediction: str | tuple[int, ...] = ""
    """What the client expects the answers to be. `RequestSpec.predicted` has its tokens."""
    whole: bool = False
    """The answers are wanted whole: tokens are told of several at a time, and tokens that an engine has not told when
    it dies are computed again."""
    owner: str = ""
    """The user who shares the engine with others: `kvern.engine.shares`."""


NO_OPTIONS = RequestOptions()


class Breakers(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Behind which tokens DRY looks for no repetition.

    `tokens` has a bit for each token id, the lowest first: set if the token breaks alone; `sequences` break together.
    """

    tokens: bytes
    sequences: tuple[tuple[int, ...], ...]


class RequestSpec(RequestOptions, frozen=True, array_like=True, gc=False):
    """What is asked with one prompt: made once, valid, and the same for server, wire, scheduler and batch.

    A field of `RequestOptions` is a field of this, so that a new one is declared once.

    Its `n` samples, or its beam search, are the answers `request_id#0`, `request_id#1` ...
    """

    request_id: str
    prompt: PromptInput
    params: ResolvedParams
    max_tokens: int
    """Tokens to generate at most, within what the context leaves."""
    seed: int = 0
    """Of the first sample; `sample_seed` has those of the others."""
    stop_token_ids: frozenset[int] = frozenset()
    """Sampling one of these ends an answer (end-of-sequence tokens included)."""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    breakers: Breakers | None = None
    grammar: str | None = None
    """Compiled; the answers follow it."""
    adapter: int | None = None
    """The key of the adapter that changes the model for it."""
    turn: int = 0
    """Among requests that the policy thinks equal, the lowest goes first: how several users share an engine."""
    predicted: tuple[int, ...] = ()
    """The tokens of the prediction. Drafts are taken from it."""

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt.token_ids)

    @property
    def group(self) -> str | None:
        """What its sequences have in common if they are several: samples of a prompt, or beams of a search."""
        return self.request_id if self.params.sequences > 1 else None

    @property
    def answer_ids(self) -> list[str]:
        """Under which its answers are reported."""
        return [f"{self.request_id}#{index}" for index in range(self.params.n)]


class Progress(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How far an earlier engine brought a sample, or a beam search, which goes on from there."""

    index: int
    generated: list[int]
    reported_prompt_logprobs: int


MAX_SEED = 2**63


def sample_seed(seed: int, index: int) -> int:
    """The seed of a request's sample, at least 0 and below MAX_SEED.

    The first sample has the request's own. The others have a hash of it and their index, so that requests whose seeds
    are neighbours draw independently.
    """
    if index == 0:
        return seed % MAX_SEED
    digest = hashlib.blake2b(f"{seed} sample {index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) % MAX_SEED


class State(enum.Enum):
    """Where a request stands; see the module's drawing."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"


class Search(Protocol):
    """What scheduler and cache know of a beam search."""

    width: int
    name: str
    """The id of one of its requests, always."""
    answer_ids: list[str]
    held: "set[Request]"
    """The beams that wait for the continuations of others."""

    @property
    def requests(self) -> "list[Request]":
        """The requests of the beams."""
        ...


@dataclass(eq=False, slots=True, weakref_slot=True)
class Request:
    """What scheduler, cache and runner know of one sequence of a spec. Only the engine core changes it.

    `num_computed_tokens` counts the tokens whose keys and values the steps scheduled so far will have written;
    `in_flight` the sampled tokens that the host has not seen yet. While drafts are verified, both count as if all were
    accepted; what was rejected is taken back when the step's result is there.
    """

    spec: RequestSpec
    index: int = 0
    """Which of the samples it is."""
    leader: "Request | None" = None
    """The request of the group that computes the shared prompt; None for the leader itself."""

    request_id: str = field(init=False)
    token_ids: list[int] = field(init=False)
    params: ResolvedParams = field(init=False)
    """Those of the spec; only the first sequence reports log-probabilities of the prompt."""
    cache_namespace: bytes = field(init=False)
    """Opaque: only requests of one namespace and one adapter share cached blocks."""
    prompt_length: int = field(init=False)  # this and the next are read at every step: copied from the spec
    max_tokens: int = field(init=False)

    state: State = State.WAITING
    slot: int = -1
    """Its row of the batch."""
    block_ids: list[int] = field(default_factory=list)
    nodes: "list[Node]" = field(default_factory=list)
    """The nodes of its full blocks in the prefix tree."""
    num_computed_tokens: int = 0
    in_flight: int = 0
    search: "Search | None" = None
    """The beam search that it is a beam of; the engine core makes it."""
    drafts: DraftProgress = field(default_factory=DraftProgress)
    answer: AnswerProgress = field(default_factory=AnswerProgress)
    queue: QueueProgress = field(default_factory=QueueProgress)

    def __post_init__(self) -> None:
        spec, params = self.spec, self.spec.params
        self.request_id = f"{spec.request_id}#{self.index}"
        self.token_ids = list(spec.prompt.token_ids)
        reports = self.index == 0 or params.prompt_logprobs is None
        self.params = params if reports else params.replace(prompt_logprobs=None)
        self.cache_namespace = cache_namespace(spec)
        self.prompt_length = spec.prompt_length
        self.max_tokens = spec.max_tokens
        asks = params.logprobs is not None or params.stop_strings or spec.predicted or params.beam_width
        self.answer.gathers = spec.whole and not asks

    @property
    def seed(self) -> int:
        """The seed of its draws."""
        return sample_seed(self.spec.seed, self.index)

    @property
    def group(self) -> str | None:
        """The same as `RequestSpec.group`."""
        return self.spec.group

    @property
    def adapter(self) -> int | None:
        """The key of the adapter that changes the model for it."""
        return self.spec.adapter

    @property
    def is_held(self) -> bool:
        """Whether it is a beam whose continuations are known, and which waits for those of the other beams."""
        return self.search is not None and self in self.search.held

    @property
    def output_length(self) -> int:
        """Generated tokens that the host knows."""
        return len(self.token_ids) - self.prompt_length

    def until_stop(self, token_ids: list[int]) -> list[int]:
        """New tokens as far as the first that ends the request."""
        for count, token_id in enumerate(token_ids, 1):
            if token_id in self.spec.stop_token_ids and self.output_length + count > self.params.min_tokens:
                return token_ids[:count]
        return token_ids

    def untold(self, token_ids: list[int]) -> list[int] | None:
        """What is to be told now that it has grown by these tokens; None: nothing, until there are more.

        The first are told at once, since they say that it has begun, and the last when it has ended.
        """
        answer = self.answer
        if not answer.gathers:
            return token_ids
        if answer.told >= 0:
            if answer.finish_reason is None and self.output_length - answer.told < TOLD_AT_ONCE:
                return None
            token_ids = self.token_ids[self.prompt_length + answer.told :]
        answer.told = self.output_length
        return token_ids

    @property
    def remaining_tokens(self) -> int:
        """Tokens still to be computed before the next one can be sampled.

        What follows a beam is chosen on the host: until then nothing remains.
        """
        sampled = self.in_flight if self.search is None else 0
        return len(self.token_ids) + sampled - self.num_computed_tokens

    @property
    def owner(self) -> str:
        """Who asked."""
        return self.spec.owner

    @property
    def unit(self) -> str:
        """What a user asked in one: the samples of a prompt, and the beams of a search, have this in common."""
        return self.spec.request_id

    @property
    def answer_ids(self) -> list[str]:
        """Under which its answers are reported: its own id, or one for each of the best of its beams."""
        return [self.request_id] if self.params.beam_width is None else self.spec.answer_ids

    @property
    def most_cached(self) -> int:
        """Tokens that may come from the prefix cache: all before the first one that has something to predict.

        That is the last token, which predicts the next, or one before a prompt token whose log-probabilities are to
        be reported still.
        """
        wanted = self.params.prompt_logprobs_from + self.answer.reported_prompt_logprobs
        if self.params.prompt_logprobs is None or wanted >= self.prompt_length:
            return len(self.token_ids) - 1
        return wanted - 1

    @property
    def prompt_scheduled(self) -> bool:
        """All of the prompt has been given to a step, so that its blocks can be shared."""
        return self.state is State.FINISHED or self.num_computed_tokens >= self.prompt_length


def cache_namespace(spec: RequestSpec, adapter_digest: bytes = b"") -> bytes:
    """Only requests of one namespace and one adapter share cached blocks.

    `adapter_digest` names the adapter's content in every process; where it is unknown, its key names it in this one.
    """
    if spec.adapter is None:
        return spec.namespace
    return b"adapter %s\0%s" % (adapter_digest.hex().encode() or b"%d" % spec.adapter, spec.namespace)


def requests_of(spec: RequestSpec, progress: Sequence[Progress] = ()) -> list[Request]:
    """The sequences of a spec: its samples, the one that computes the prompt first, or one for all beams.

    With `progress` those that are named there, each alone: the others may have ended.
    """
    if progress:
        return [_continued(spec, one) for one in progress]
    leader = Request(spec)
    samples = spec.params.n if spec.params.beam_width is None else 1
    return [leader, *(Request(spec, index, leader) for index in range(1, samples))]


def _continued(spec: RequestSpec, progress: Progress) -> Request:
    """The sample, or the search, that an earlier engine has begun."""
    request = Request(spec, progress.index)
    request.token_ids += progress.generated
    request.answer.reported_prompt_logprobs = progress.reported_prompt_logprobs
    return request
