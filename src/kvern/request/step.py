"""Messages of one step: from the engine to the runner, as differences, and the results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import msgspec
from msgspec import field

from kvern.request.logprobs import LogprobRows
from kvern.request.request import RequestSpec
from kvern.request.sampling_params import ResolvedParams
from kvern.request.spans import Spans


class GrownTable(msgspec.Struct, frozen=True, gc=False):
    """New blocks of row `slot` in a block table of layers with a window, from its entry `first` on."""

    slot: int
    table: int
    first: int
    block_ids: list[int]


@dataclass(frozen=True)
class NewRequest:
    """A request that joins the batch in row `slot`, with all its tokens."""

    slot: int
    spec: RequestSpec
    params: ResolvedParams
    """The spec's parameters; only the first sequence reports log-probabilities of the prompt."""
    seed: int
    token_ids: list[int]
    block_ids: list[int]
    adapter_index: int = -1
    """The slot of its adapter on the device; -1 without an adapter."""
    num_computed_tokens: int = 0
    """The number of its tokens whose keys and values are in its blocks, or are written in this step."""

    def shareable_blocks(self, block_size: int) -> list[int]:
        """Returns the blocks that all rows forked from this one share."""
        if self.params.beam_width is None:
            return self.block_ids
        return self.block_ids[: self.spec.prompt_length // block_size]


class ScheduledTokens(msgspec.Struct, frozen=True, gc=False):
    """Computes `count` tokens of row `slot` from position `start`, and samples after the last `sampled` of them.

    `sampled` 0: a part of a prompt. 1: the last token is known, or was sampled by an earlier step. More: all but the
    first of these tokens are drafts, in `SchedulerOutput.drafts` or left in the row by an earlier step. Sampled tokens
    are kept as far as the drafts agree with them, and one more.
    """

    slot: int
    start: int
    count: int
    sampled: int
    uncertain: bool = False
    """A step with drafts of this row is in flight: `start` is its position if all of them are accepted."""
    guesses: int = 0
    """The number of drafts that the device writes after the token sampled last, for the row's next step to verify.

    For a part of a prompt it is above 0 if drafts are wanted after its end.
    """
    spans: Spans = ()
    """The spans of the prompt that these tokens have, see `PromptInput.spans`."""


class Fork(msgspec.Struct, frozen=True, gc=False):
    """Row `slot` continues the first `length` tokens of row `source`, which may be itself, with another token."""

    slot: int
    source: int
    length: int
    token_id: int


class BlockCopy(msgspec.Struct, frozen=True, gc=False):
    """A copy of the keys and values of the first `tokens` positions of block `source` to block `target`."""

    source: int
    target: int
    tokens: int


class ExtensionMessage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A message of an extension of the KV cache to its worker's side with a step; it can be encoded as msgpack."""

    extension: ClassVar[str]
    """The name of the extension."""

    def by_name(self) -> "dict[str, ExtensionMessage]":
        """Returns the message as the only one of a step: `SchedulerOutput.extensions`."""
        return {self.extension: self}


Message = TypeVar("Message", bound=ExtensionMessage)


class SchedulerOutput(msgspec.Struct):
    """One step. Its parts are carried out in order: adapters, block copies, forks, joins and growth, then tokens.

    A step may have nothing to compute when an extension of the KV cache has a message. Rows that left need no message:
    their slot is given to another request.
    """

    step: int
    adapters: list[tuple[int, int]] = field(default_factory=list)
    """(index, key) of adapters that are loaded into their slots before anything is computed."""
    copies: list[BlockCopy] = field(default_factory=list)
    forked: list[Fork] = field(default_factory=list)
    """Forks of rows; all sources are as they were before the step."""
    joined: list[NewRequest] = field(default_factory=list)
    grown: list[tuple[int, int, list[int]]] = field(default_factory=list)
    """(slot, index of the first new entry in its block table, block ids)."""
    drafts: list[tuple[int, int, list[int]]] = field(default_factory=list)
    """(slot, first position, token ids) of drafts that continue a row's tokens."""
    known: list[tuple[int, int, list[int]]] = field(default_factory=list)
    """(slot, first position, token ids) that a later pipeline stage has sampled or drafted, for the first stage."""
    kept: list[list[int]] = field(default_factory=list)
    """The numbers of tokens that the last pipeline stage kept of rows with drafts, in order, for each such step that
    has ended since the step before was submitted. The states of other stages are corrected by them first."""
    scheduled: list[ScheduledTokens] = field(default_factory=list)
    encoding: float = 0.0
    """The computing of the KV cache's extensions, as a number of tokens that would take as long."""
    request_ids: list[str] = field(default_factory=list)
    """The request of each entry of `scheduled`."""
    extensions: dict[str, Any] = field(default_factory=dict)
    """The messages of extensions of the KV cache by name: ExtensionMessage, or its decoded msgpack."""

    def message(self, kind: type[Message]) -> Message | None:
        """Returns the message of this kind, or None."""
        found = self.extensions.get(kind.extension)
        return found if found is None or isinstance(found, kind) else msgspec.convert(found, kind)

    @property
    def token_count(self) -> int:
        """The number of tokens that the step computes."""
        return sum(item.count for item in self.scheduled)

    @property
    def changes_rows(self) -> bool:
        """True if rows change before tokens are computed; in most decode steps they do not."""
        return bool(
            self.joined
            or self.grown
            or self.copies
            or self.forked
            or self.drafts
            or self.known
            or self.kept
            or self.adapters
            or self.extensions
        )


class BeamCandidates(NamedTuple):
    """The most probable next tokens of a beam, best first."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """The log-probabilities given the beam, after constraints and penalties."""
    entry: Callable[[int], LogprobRows] | None = None
    """Returns the reported row of a candidate, if log-probabilities are wanted."""


OUT_OF_TOKENS = ""


class ModelRunnerOutput(msgspec.Struct):
    """The sampled tokens of one step, one entry for each entry of `scheduled`."""

    token_ids: list[list[int]]
    """The tokens that are kept; none if the step only computed a part of the prompt."""
    logprobs: list[LogprobRows | None]
    """The log-probabilities of each token, None if not wanted."""
    prompt_logprobs: list[LogprobRows | None]
    """The log-probabilities of the prompt tokens that the step's tokens predict, in order."""
    broken: dict[int, str] = field(default_factory=dict)
    """Reasons by slot why a grammar or logits processor ends a request, whose last token is invalid.

    OUT_OF_TOKENS: its structured answer was completed early, because its tokens run out.
    """
    embeddings: dict[int, bytes] = field(default_factory=dict)
    """Last hidden states by slot as float32, little-endian, if wanted."""
    candidates: dict[int, BeamCandidates] = field(default_factory=dict)
    """Candidates of beams by slot; their sampled token is invalid."""
    reports: dict[str, object] = field(default_factory=dict)
    """The replies of the worker's sides of extensions of the KV cache, by name."""
    guessed: dict[int, list[int]] = field(default_factory=dict)
    """Drafts by slot that were written after the newest token, for the first of several pipeline stages."""
    drafting_seconds: float = 0.0
    """The seconds of drafting, as far as the host knows."""


class StepLost(Exception):
    """A step must be undone and planned again, through no fault of a request; the cause has the reason."""


class StepTooLarge(Exception):
    """A device ran out of memory while it computed a step whose differences have come; the cause says where.

    `final`: what it has changed already cannot be computed again.
    """

    def __init__(self, message: str, *, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


class StepResult(Protocol):
    """The future result of a step; a Future is one."""

    def done(self) -> bool:
        """Returns whether `result` has nothing to wait for."""

    def result(self) -> ModelRunnerOutput:
        """Waits for the result. Raises what the step raised."""
