"""What the engine tells the runner to do in one step, as differences, and what comes back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import msgspec

from kvern.request.request import RequestSpec
from kvern.request.sampling_params import ResolvedParams


class Logprob(msgspec.Struct, frozen=True, gc=False):
    """The log-probability (natural logarithm) of one token and its rank among all (1: the most probable)."""

    logprob: float
    rank: int
    token: str | None = None


TokenLogprobs = dict[int, Logprob]
"""By token id: the token at this place and, after it, the most probable ones."""


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
    """Those of the spec, of which only the first sequence reports log-probabilities of the prompt."""
    seed: int
    token_ids: list[int]
    block_ids: list[int]
    adapter_index: int = -1
    """The place on the device of the adapter that it uses; -1: it uses none."""
    num_computed_tokens: int = 0
    """Its tokens whose keys and values its blocks hold, or are given in the same step."""

    def shareable_blocks(self, block_size: int) -> list[int]:
        """Those that all rows forked from this one have, too."""
        if self.params.beam_width is None:
            return self.block_ids
        return self.block_ids[: self.spec.prompt_length // block_size]


class ScheduledTokens(msgspec.Struct, frozen=True, gc=False):
    """Compute `count` tokens of row `slot` from position `start`, and sample what follows the last `sampled` of them.

    0: a part of a prompt. 1: the last token is known, or sampled by a step before. More: all but the first of these
    tokens are drafts, which `SchedulerOutput.drafts` brings, or a step before has left in the row. The tokens sampled
    are kept as far as the drafts agree with them, and one more.
    """

    slot: int
    start: int
    count: int
    sampled: int
    uncertain: bool = False
    """A step with drafts of this row is in flight: `start` is where it begins if all of them are accepted."""
    guesses: int = 0
    """Drafts that the device is to write behind the token sampled last, for the row's next step to verify.

    Of a part of a prompt: more than none if some will be wanted behind its end.
    """


class Fork(msgspec.Struct, frozen=True, gc=False):
    """Row `slot` goes on behind the first `length` tokens of row `source`, which may be itself, with another token."""

    slot: int
    source: int
    length: int
    token_id: int


class BlockCopy(msgspec.Struct, frozen=True, gc=False):
    """Copy the keys and values of the first `tokens` positions of block `source` to block `target`."""

    source: int
    target: int
    tokens: int


class ExtensionMessage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What an extension of the KV cache tells its worker's side with a step; can be sent as msgpack."""

    extension: ClassVar[str]
    """The name of the extension."""

    def by_name(self) -> "dict[str, ExtensionMessage]":
        """The message as the only one of a step: `SchedulerOutput.extensions`."""
        return {self.extension: self}


Message = TypeVar("Message", bound=ExtensionMessage)


@dataclass
class SchedulerOutput:
    """One step: load adapters, copy blocks, let rows fork, then join and grow, then compute tokens.

    A step may have nothing to compute when an extension of the KV cache has a message.
    Rows that left need no message: their slot is simply given to another request.
    """

    step: int
    adapters: list[tuple[int, int]] = field(default_factory=list)
    """(index, key) of adapters to be loaded into their places before anything is computed."""
    copies: list[BlockCopy] = field(default_factory=list)
    forked: list[Fork] = field(default_factory=list)
    """All sources are meant as they were before the step."""
    joined: list[NewRequest] = field(default_factory=list)
    grown: list[tuple[int, int, list[int]]] = field(default_factory=list)
    """(slot, index of the first new entry in its block table, block ids)."""
    drafts: list[tuple[int, int, list[int]]] = field(default_factory=list)
    """(slot, first position, token ids) that a row's tokens go on with, unless sampling says otherwise."""
    known: list[tuple[int, int, list[int]]] = field(default_factory=list)
    """(slot, first position, token ids) that a later stage has sampled or guessed: the first goes on with them."""
    kept: list[list[int]] = field(default_factory=list)
    """How many tokens the last stage has kept of each row whose drafts it verified, in their order, for each such step
    that has come back since the step before was submitted: the states of other stages see them before all else."""
    scheduled: list[ScheduledTokens] = field(default_factory=list)
    request_ids: list[str] = field(default_factory=list)
    """The request of each entry of `scheduled`."""
    extensions: dict[str, Any] = field(default_factory=dict)
    """The messages of extensions of the KV cache, by their names: ExtensionMessage, or what msgpack made of it."""

    def message(self, kind: type[Message]) -> Message | None:
        """The message of this kind, if there is one."""
        found = self.extensions.get(kind.extension)
        return found if found is None or isinstance(found, kind) else msgspec.convert(found, kind)

    @property
    def token_count(self) -> int:
        """Tokens that the step computes."""
        return sum(item.count for item in self.scheduled)

    @property
    def changes_rows(self) -> bool:
        """Whether something is to be done before tokens are computed: in most steps of decodes nothing is."""
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
    """Given the beam, under the logits as constraints and penalties have left them."""
    entry: Callable[[int], TokenLogprobs] | None = None
    """What is reported of the candidate at a place, if log-probabilities were asked for."""


OUT_OF_TOKENS = ""


@dataclass
class ModelRunnerOutput:
    """The sampled tokens of one step, one entry for each entry of `scheduled`."""

    token_ids: list[list[int]]
    """Those that are kept; none where the step only computed a part of the prompt."""
    logprobs: list[list[TokenLogprobs] | None]
    """Of each of them; None where none were asked for."""
    prompt_logprobs: list[list[TokenLogprobs] | None]
    """Of the prompt tokens that the step's tokens predict, in their order."""
    broken: dict[int, str] = field(default_factory=dict)
    """By slot: why a request cannot go on, through its grammar or logits processor; its last token means nothing.

    OUT_OF_TOKENS: its form was brought to an end, since its tokens run out.
    """
    embeddings: dict[int, bytes] = field(default_factory=dict)
    """By slot: the last hidden state as float32, little-endian, for requests that asked for it."""
    candidates: dict[int, BeamCandidates] = field(default_factory=dict)
    """By slot, of beams; their sampled token means nothing."""
    reports: dict[str, object] = field(default_factory=dict)
    """What the worker's sides of extensions of the KV cache answer, by their names."""
    guessed: dict[int, list[int]] = field(default_factory=dict)
    """By slot: the drafts that were written behind the newest token, which the first of several stages has to know."""
    drafting_seconds: float = 0.0
    """What it took to guess what follows, as far as the host knows."""


class StepLost(Exception):
    """A step has to be undone and planned anew, through no request's fault; the cause says why."""


class StepResult(Protocol):
    """What a step will have computed; a Future is one."""

    def result(self) -> ModelRunnerOutput:
        """Wait for it. Raises what the step raised."""
        ...
