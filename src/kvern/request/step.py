"""What the engine tells the runner to do in one step, as differences, and what comes back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from kvern.request.request import RequestSpec
from kvern.request.sampling_params import ResolvedParams

if TYPE_CHECKING:
    from kvern.request.request import Request


class Logprob(msgspec.Struct, frozen=True, gc=False):
    """The log-probability (natural logarithm) of one token and its rank among all (1: the most probable)."""

    logprob: float
    rank: int
    token: str | None = None


TokenLogprobs = dict[int, Logprob]
"""By token id: the token at this place and, after it, the most probable ones."""


class GrownTable(msgspec.Struct, frozen=True, gc=False):
    """Blocks behind those that row `slot` has in a block table of layers with a window, from its entry `first` on."""

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
    state_index: int = -1
    """Where its state is, if the model has recurrent layers."""
    windowed: tuple[GrownTable, ...] = ()
    """What it has in the block tables of layers with a window, if they have some of their own."""
    num_computed_tokens: int = 0
    """Its tokens whose keys and values its blocks hold, or are given in the same step."""

    @classmethod
    def of(cls, request: "Request", adapter_index: int) -> "NewRequest":
        """A request that has a slot and blocks."""
        token_ids, block_ids = list(request.token_ids), list(request.block_ids)
        spec, params, seed, state = request.spec, request.params, request.seed, request.state_index
        first, tables = request.window_start, enumerate(zip(*request.windowed, strict=True))
        windowed = tuple(GrownTable(request.slot, table, first, list(blocks)) for table, blocks in tables)
        computed = request.num_computed_tokens
        return cls(request.slot, spec, params, seed, token_ids, block_ids, adapter_index, state, windowed, computed)

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
    state_index: int = -1
    """Where the row's state is, if the model has recurrent layers."""


class BlockCopy(msgspec.Struct, frozen=True, gc=False):
    """Copy the keys and values of the first `tokens` positions of block `source` to block `target`."""

    source: int
    target: int
    tokens: int


@dataclass(frozen=True)
class BlockSave:
    """Keep the keys and values of `block` under `key`."""

    block: int
    key: bytes


@dataclass(frozen=True)
class BlockLoad:
    """Write what is kept under `key` to `block`; one of the blocks of the load of this number, in their order."""

    load: int
    key: bytes
    block: int


@dataclass
class SchedulerOutput:
    """One step: load adapters, save and copy blocks, let rows fork, then join and grow, compute tokens, load blocks.

    A step may have nothing to compute when it has blocks to load.
    Rows that left need no message: their slot is simply given to another request.
    """

    step: int
    adapters: list[tuple[int, int]] = field(default_factory=list)
    """(index, key) of adapters to be loaded into their places before anything is computed."""
    saves: list[BlockSave] = field(default_factory=list)
    """Blocks to be kept elsewhere before anything overwrites them."""
    copies: list[BlockCopy] = field(default_factory=list)
    state_copies: list[tuple[int, int]] = field(default_factory=list)
    """(source, target) of states, by their indices, in this order; a source of -1 means zeros."""
    forked: list[Fork] = field(default_factory=list)
    """All sources are meant as they were before the step."""
    joined: list[NewRequest] = field(default_factory=list)
    grown: list[tuple[int, int, list[int]]] = field(default_factory=list)
    """(slot, index of the first new entry in its block table, block ids)."""
    grown_windows: list[GrownTable] = field(default_factory=list)
    drafts: list[tuple[int, int, list[int]]] = field(default_factory=list)
    """(slot, first position, token ids) that a row's tokens go on with, unless sampling says otherwise."""
    known: list[tuple[int, int, list[int]]] = field(default_factory=list)
    """(slot, first position, token ids) that a later stage has sampled or guessed: the first goes on with them."""
    kept: list[list[int]] = field(default_factory=list)
    """How many tokens the last stage has kept of each row whose drafts it verified, in their order, for each such step
    that has come back since the step before was submitted: the states of other stages see them before all else."""
    scheduled: list[ScheduledTokens] = field(default_factory=list)
    loads: list[BlockLoad] = field(default_factory=list)
    """Blocks to be loaded behind all else, or later: nobody uses them before `EngineCore.loaded` was told."""
    request_ids: list[str] = field(default_factory=list)
    """The request of each entry of `scheduled`."""

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
            or self.grown_windows
            or self.copies
            or self.forked
            or self.drafts
            or self.known
            or self.kept
            or self.adapters
            or self.state_copies
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
    loaded: list[tuple[int, int]] = field(default_factory=list)
    """(number of a load, how many of its blocks, from the first one on, have arrived), each load once."""
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
