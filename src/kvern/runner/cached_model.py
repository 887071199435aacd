"""A model with its KV cache and the rows of its batch: what steps run on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from kvern.attention.base import AttentionBackend
from kvern.cache.messages import ImageMessage
from kvern.device.input_batch import InputBatch
from kvern.device.rows import BatchRows
from kvern.request.step import Fork, NewRequest, ScheduledTokens, SchedulerOutput

if TYPE_CHECKING:
    from kvern.adapters.bank import AdapterBank


class StateStack(NamedTuple):
    """The states of like layers: their numbers among the layers that have states, and tensors [layers, states, ...]."""

    layers: Sequence[int]
    tensors: Sequence[Tensor]


class RowStates(Protocol):
    """The states of the layers of a model, of each row of the batch."""

    @property
    def stacks(self) -> "Sequence[StateStack]":
        """The memory of all layers that have states."""

    def prepare(self, output: SchedulerOutput) -> None:
        """Zero and copy states, and give rows theirs, as a step says."""

    def defer(self) -> None:
        """Keep what the drafts of the step that was planned last are to write until `SchedulerOutput.kept` tells."""


class StepEmbeddings(NamedTuple):
    """The rows of images in a step of T tokens.

    source     [T] the index of the row of each token; -1: the token has its id alone
    rows       [N, hidden] on the device, N <= T, as of `EmbeddedTokens`; None: all tokens have ids alone
    positions  [T, 3] int64 on the host, by which rotary embeddings turn; None: those in the text
    """

    source: Sequence[int]
    rows: Tensor | None
    positions: Tensor | None = None


class EmbeddingSource(Protocol):
    """A source of rows of embeddings for tokens of prompts, such as the parts of an image."""

    def rehearse(self) -> None:
        """Take the most memory that a step needs for rows, which PyTorch keeps for later ones."""

    def fork(self, forked: Sequence[Fork]) -> None:
        """Rows of the batch go on from others."""

    def join(self, joined: Sequence[NewRequest]) -> None:
        """Rows of the batch have new requests."""

    def prepare(self, message: ImageMessage) -> list[tuple[int, str]]:
        """Encode what a step says; returns the numbers of what has ended, and what went wrong with each."""

    def abandon(self) -> None:
        """Forget what steps have begun to encode: they have failed."""

    def rows(self, scheduled: Sequence[ScheduledTokens]) -> StepEmbeddings | None:
        """The rows for a step, whose requests are in their rows of the batch; None: all its tokens have ids alone."""


Network = TypeVar("Network")
Batch = TypeVar("Batch", bound=InputBatch)
Rows = TypeVar("Rows", bound=BatchRows)
States = TypeVar("States", bound=RowStates)


@dataclass(frozen=True)
class CachedModel(Generic[Network, Batch, Rows, States]):
    """A model, or a draft head, with a KV cache for its layers.

    decoder     the model
    attention   the owner of the KV cache, and attention over it
    rows        the rows of the batch, which a draft model shares with the model that it drafts for
    block_size  tokens of a block of the cache
    adapters    None: the engine has no place for adapters
    states      None: no layer of the model keeps states
    embeddings  None: all tokens of prompts are given by their ids
    """

    decoder: Network
    attention: AttentionBackend[Batch]
    rows: Rows
    block_size: int
    adapters: "AdapterBank | None" = None
    states: States | None = None
    embeddings: EmbeddingSource | None = None

    def is_adapted(self, scheduled: Sequence[ScheduledTokens]) -> bool:
        """Returns whether a request of a step uses an adapter."""
        if self.adapters is None:
            return False
        return max(self.rows.adapter_indices([item.slot for item in scheduled]), default=-1) >= 0
