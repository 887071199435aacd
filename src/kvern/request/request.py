"""Requests to the engine, and their sequences with their states.

    RequestSpec   a user's request with one prompt; immutable, and sent between processes unchanged
      Request     one sequence to generate, for scheduler and cache: the spec, and what steps change

    WAITING --admitted--> RUNNING --stop, length, abort--> FINISHED
       ^                     |
     | ^ +---preempted-------+      (its blocks are freed; its tokens are kept and computed again)
     v |
    LOADING                         (a tier loads more of its cached prefix into the prefix tree)
    ENCODING                        (an image of its next tokens is decoded and encoded)

With `n` > 1 there are several requests of one group: the first computes the prompt, the others then share its blocks. A
beam search begins as one request; others are forked from it when its prompt is computed.
"""

import enum
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from kvern.request.logprobs import LogprobRows, joined
from kvern.request.record import RequestRecord
from kvern.request.request_log import RequestLog
from kvern.request.sampling_params import ResolvedParams
from kvern.request.spans import Spans

if TYPE_CHECKING:
    from kvern.cache.radix import Node


FinishReason = Literal["stop", "length", "abort"]


@dataclass(slots=True)
class AnswerProgress:
    """The part of an answer that was reported, and its end.

    `gathers`: several tokens are reported at a time; `gathered`: log-probabilities that wait for that.
    `told`: reported tokens; -1 if this engine has reported nothing.
    `reported_prompt_logprobs`: tokens from `params.prompt_logprobs_from` on whose log-probabilities were reported.
    `cached_tokens`: prompt tokens that came from the prefix cache; `loaded_tokens`: as many of these as were loaded for
    the request, by the stores of the cache's tier; empty without a tier, and when it was reported.
    `log`: notes for its `record`, which is made when it ends; None if nobody keeps records, and then.
    """

    gathers: bool = False
    gathered: list[LogprobRows] = field(default_factory=list)
    told: int = -1
    reported_prompt_logprobs: int = 0
    cached_tokens: int = 0
    loaded_tokens: Mapping[str, int] = field(default_factory=dict)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    log: RequestLog | None = None
    record: RequestRecord | None = None

    def tell_loaded(self) -> Mapping[str, int]:
        """Returns `loaded_tokens` when it is first asked for."""
        loaded = self.loaded_tokens
        if loaded:
            self.loaded_tokens = {}
        return loaded


@dataclass(slots=True)
class QueueProgress:
    """The arrival of a request, and its times of waiting and running.

    `arrival` is the queue's sequence number, -1 before. `waiting_since` and `running_since` are steps; `arrived_at` and
    `begun_at` (its first step) are seconds of the monotonic clock. `aged`: it has waited so long that it goes first.
    `reached`: so many of its tokens were computed before it lost its row, or by an engine that had it before.
    """

    arrival: int = -1
    waiting_since: int = 0
    running_since: int = 0
    aged: bool = False
    preemptions: int = 0
    arrived_at: float = 0.0
    begun_at: float = 0.0
    reached: int = 0

    @property
    def seconds(self) -> float:
        """Seconds from the arrival to the first step."""
        return self.begun_at - self.arrived_at


@dataclass(slots=True)
class DraftProgress:
    """The drafts of a request.

    `token_ids`: a proposer's drafts after the known tokens. `in_flight`: tokens in flight that are not sampled if
    drafts are rejected. `guesses`: the number of drafts that the device has after the newest token when the steps in
    flight are done; `guessed_token_ids` are these, if the host has to pass them on (`ModelRunnerOutput.guessed`).
    `read_tokens`: the number of tokens that the drafter has computed; it computes the others before it drafts. `right`
    and `wrong` count accepted and rejected drafts; later ones have more weight.
    """

    token_ids: list[int] = field(default_factory=list)
    in_flight: int = 0
    guesses: int = 0
    guessed_token_ids: list[int] = field(default_factory=list)
    read_tokens: int = 0
    right: float = 0.0
    wrong: float = 0.0


TOLD_AT_ONCE = 32
"""Tokens of an answer that are reported at once if it is wanted whole; that costs little more than reporting one."""


class PromptInput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A prompt for the model, made of a text, a list of token ids or a conversation."""

    token_ids: list[int]
    attachments: tuple[bytes, ...] = ()
    """Content other than text that tokens stand for, in the format of the model's code; opaque to all other code."""
    block_keys: tuple[tuple[int, bytes], ...] = ()
    """(position, digest): the token there stands for content with this digest. Blocks are shared only if tokens and
    digests are equal. Positions ascend."""
    second_text: int | None = None
    """The position of the second of two texts that an encoder reads together; None for one text."""
    spans: Spans = ()
    """(first, end) of tokens that see each other, later ones too: one step computes all of them. Positions ascend."""
    turn: tuple[int, int] = (0, 0)
    """(first, shift): tokens from the position `first` on count as `shift` positions later for rotary embeddings. It is
    what follows images whose tokens have positions by row and column, and the shift is at most 0."""

    def __len__(self) -> int:
        return len(self.token_ids)


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """Options of a request beside prompt and parameters, made by an API. `RequestSpec` has the same fields."""

    priority: int = 0
    namespace: bytes = b""
    """Requests share cached blocks only within one namespace."""
    embed: bool = False
    """The last hidden state of the prompt is wanted; one token is sampled with it and ignored."""
    prediction: str | tuple[int, ...] = ""
    """Predicted output: a text that the client expects in the answers. `RequestSpec.predicted` has its tokens."""
    whole: bool = False
    """The answers are wanted whole: several tokens are reported at a time, and tokens that an engine has not reported
    when it dies are computed again."""
    owner: str = ""
    """The user, for fair sharing of the engine: `kvern.engine.shares`."""


NO_OPTIONS = RequestOptions()


class Breakers(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens after which DRY searches for no repetition.

    `tokens` has a bit for each token id, lowest first: set if the token breaks alone. Tokens of `sequences` break
    together.
    """

    tokens: bytes
    sequences: tuple[tuple[int, ...], ...]


class RequestSpec(RequestOptions, frozen=True, array_like=True, gc=False):
    """A request with one prompt: valid, immutable, and the same for server, scheduler and batch.

    It has the fields of `RequestOptions`, so that a new field is declared once. The answers of its `n` samples, or of
    its beam search, are `request_id#0`, `request_id#1` ...
    """

    request_id: str
    prompt: PromptInput
    params: ResolvedParams
    max_tokens: int
    """The most tokens to generate, within the context."""
    seed: int = 0
    """The seed of the first sample; `sample_seed` gives those of the others."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end an answer, end-of-sequence tokens included."""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    breakers: Breakers | None = None
    grammar: str | None = None
    """The compiled grammar of the answers."""
    adapter: int | None = None
    """The key of its adapter."""
    turn: int = 0
    """The order among requests that the policy ranks equal, lowest first: users share an engine by it."""
    predicted: tuple[int, ...] = ()
    """The tokens of the predicted output, from which drafts are taken."""
    hands_over: bool = False
    """Another engine answers: this one computes the prompt, and its end is reported once a store of the tier has it."""
    tells_parts: bool = False
    """It is reported as well how much of the prompt a store has so far, for the other engine to load meanwhile."""

    def prompt_alone(self, *, tells_parts: bool = False) -> "RequestSpec":
        """Returns the request for an engine that hands the prompt over: one token is sampled, which nobody uses."""
        return msgspec.structs.replace(
            self,
            params=ResolvedParams(temperature=0.0, max_tokens=1),
            max_tokens=1,
            stop_token_ids=frozenset(),
            bad_word_ids=(),
            breakers=None,
            grammar=None,
            predicted=(),
            whole=True,
            hands_over=True,
            tells_parts=tells_parts and not self.prompt.attachments,
        )

    @property
    def bans_or_biases(self) -> bool:
        """True if tokens are banned, or more or less probable than the model says."""
        params = self.params
        return bool(params.allowed_token_ids or params.logit_bias or self.bad_word_ids or params.min_tokens)

    @property
    def prompt_length(self) -> int:
        """The number of tokens of the prompt."""
        return len(self.prompt.token_ids)

    @property
    def group(self) -> str | None:
        """The name that its sequences share if there are several: samples of a prompt, or beams of a search."""
        return self.request_id if self.params.sequences > 1 else None

    @property
    def answer_ids(self) -> list[str]:
        """The ids under which its answers are reported."""
        return [f"{self.request_id}#{index}" for index in range(self.params.n)]


class Progress(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The progress of a sample or beam search in an earlier engine, from which it continues."""

    index: int
    generated: list[int]
    reported_prompt_logprobs: int


MAX_SEED = 2**63


def sample_seed(seed: int, index: int) -> int:
    """Returns the seed of a request's sample, at least 0 and below MAX_SEED.

    The first sample has the request's own. The others have a hash of it and their index, so that requests with adjacent
    seeds sample independently.
    """
    if index == 0:
        return seed % MAX_SEED
    digest = hashlib.blake2b(f"{seed} sample {index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) % MAX_SEED


class State(enum.Enum):
    """The state of a request; see the drawing at the top of this module."""

    WAITING = "waiting"
    LOADING = "loading"
    ENCODING = "encoding"
    RUNNING = "running"
    FINISHED = "finished"


class Search(Protocol):
    """The interface of a beam search for scheduler and cache."""

    width: int
    name: str
    """The id of one of its requests, at any time."""
    answer_ids: list[str]
    held: "set[Request]"
    """The beams that wait for the continuations of others."""

    @property
    def requests(self) -> "list[Request]":
        """The requests of the beams."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class Request:
    """One sequence of a spec, for scheduler, cache and runner. Only the engine core changes it.

    `num_computed_tokens` counts the tokens whose keys and values are written when the scheduled steps are done,
    `in_flight` the sampled tokens that the host has not seen yet. While drafts are verified, both count as if all were
    accepted; the counts are corrected by the step's result.
    """

    spec: RequestSpec
    index: int = 0
    """The number of the sample."""
    leader: "Request | None" = None
    """The request of the group that computes the shared prompt; None for the leader itself."""

    request_id: str = field(init=False)
    token_ids: list[int] = field(init=False)
    params: ResolvedParams = field(init=False)
    """The spec's parameters; only the first sequence reports log-probabilities of the prompt."""
    cache_namespace: bytes = field(init=False)
    """Requests share cached blocks only within one namespace and adapter."""
    prompt_length: int = field(init=False)  # this and the next are read at every step: copied from the spec
    max_tokens: int = field(init=False)

    state: State = State.WAITING
    slot: int = -1
    """Its row of the batch."""
    block_ids: list[int] = field(default_factory=list)
    nodes: "list[Node]" = field(default_factory=list)
    """The nodes of its full blocks in the prefix tree."""
    cached_path: "list[Node]" = field(default_factory=list)
    """The nodes of its first full blocks that the prefix tree had when it was last asked; some may be gone."""
    num_computed_tokens: int = 0
    in_flight: int = 0
    search: "Search | None" = None
    """Its beam search, made by the engine core."""
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
        asks = params.stop_strings or spec.predicted or params.beam_width
        self.answer.gathers = spec.whole and not asks

    @property
    def seed(self) -> int:
        """The seed of its sampling."""
        return sample_seed(self.spec.seed, self.index)

    @property
    def group(self) -> str | None:
        """The group of its spec."""
        return self.spec.group

    @property
    def adapter(self) -> int | None:
        """The key of its adapter."""
        return self.spec.adapter

    @property
    def is_held(self) -> bool:
        """True for a beam whose continuations are known, and which waits for those of other beams."""
        return self.search is not None and self in self.search.held

    @property
    def output_length(self) -> int:
        """The number of generated tokens that the host knows."""
        return len(self.token_ids) - self.prompt_length

    def until_stop(self, token_ids: list[int]) -> list[int]:
        """Returns the new tokens up to the first that ends the request."""
        for count, token_id in enumerate(token_ids, 1):
            if token_id in self.spec.stop_token_ids and self.output_length + count > self.params.min_tokens:
                return token_ids[:count]
        return token_ids

    def untold(self, token_ids: list[int], logprobs: LogprobRows | None) -> tuple[list[int], LogprobRows | None] | None:
        """Returns the tokens to report after it has grown by these tokens, and their log-probabilities; None to wait.

        The first are reported at once, to show that it has started, and the last when it has ended.
        """
        answer = self.answer
        if not answer.gathers:
            return token_ids, logprobs
        length = len(self.token_ids) - self.prompt_length
        if answer.told >= 0:
            if logprobs is not None:
                answer.gathered.append(logprobs)
            if answer.finish_reason is None and length - answer.told < TOLD_AT_ONCE:
                return None
            token_ids = self.token_ids[self.prompt_length + answer.told :]
            logprobs, answer.gathered = joined(answer.gathered), []
        answer.told = length
        return token_ids, logprobs

    @property
    def remaining_tokens(self) -> int:
        """The number of tokens to compute before the next can be sampled.

        The host chooses the next token of a beam: until then nothing remains.
        """
        sampled = self.in_flight if self.search is None else 0
        return len(self.token_ids) + sampled - self.num_computed_tokens

    @property
    def is_before_image(self) -> bool:
        """True if a token of its prompt that is not computed may be an image's."""
        return bool(self.spec.prompt.attachments) and self.num_computed_tokens < self.prompt_length

    @property
    def owner(self) -> str:
        """The user who made the request."""
        return self.spec.owner

    @property
    def unit(self) -> str:
        """The name that all sequences of one user's request share: samples of a prompt, and beams of a search."""
        return self.spec.request_id

    @property
    def answer_ids(self) -> list[str]:
        """The ids under which its answers are reported: its own, or one for each of the best beams."""
        return [self.request_id] if self.params.beam_width is None else self.spec.answer_ids

    @property
    def most_cached(self) -> int:
        """The most tokens that may come from the prefix cache: those before the first token that must predict
        something.

        That is the last token, which predicts the next, or the one before a prompt token whose log-probabilities are
        still to be reported.
        """
        wanted = self.params.prompt_logprobs_from + self.answer.reported_prompt_logprobs
        if self.params.prompt_logprobs is None or wanted >= self.prompt_length:
            return len(self.token_ids) - 1
        return wanted - 1

    @property
    def prompt_scheduled(self) -> bool:
        """True if all of the prompt is scheduled, so that its blocks can be shared."""
        return self.state is State.FINISHED or self.num_computed_tokens >= self.prompt_length


def cache_namespace(spec: RequestSpec, adapter_digest: bytes = b"") -> bytes:
    """Returns the namespace of a request's cached blocks, which includes its adapter.

    `adapter_digest` names the adapter's content in every process; without it, the adapter's key names it in this one.
    """
    if spec.adapter is None:
        return spec.namespace
    return b"adapter %s\0%s" % (adapter_digest.hex().encode() or b"%d" % spec.adapter, spec.namespace)


def requests_of(spec: RequestSpec, progress: Sequence[Progress] = ()) -> list[Request]:
    """Returns the sequences of a spec: its samples, of which the first computes the prompt, or one for all beams.

    With `progress` only the sequences named there are returned, as others may have ended.
    """
    if progress:
        return [_continued(spec, one) for one in progress]
    leader = Request(spec)
    samples = spec.params.n if spec.params.beam_width is None else 1
    return [leader, *(Request(spec, index, leader) for index in range(1, samples))]


def _continued(spec: RequestSpec, progress: Progress) -> Request:
    """Returns a sample or search that an earlier engine has started."""
    request = Request(spec, progress.index)
    request.token_ids += progress.generated
    request.queue.reached = len(request.token_ids) - 1 if progress.generated else 0
    request.answer.reported_prompt_logprobs = progress.reported_prompt_logprobs
    return request
