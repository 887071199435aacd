"""The loaded model of a worker, and the protocols of what runs its steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import nn

from kvern.attention.eight_bit import EightBit
from kvern.attention.groups import LayerGroups
from kvern.device.rows import BatchRows
from kvern.layers.linear_format import LinearFormat, LinearMethods
from kvern.models.decoder import Decoder, LanguageModel
from kvern.ranks.ranks import ALONE, Ranks
from kvern.request.step import SchedulerOutput, StepResult
from kvern.runner.plan import FreeMemory, Layout
from kvern.spec.model import ModelSpec

if TYPE_CHECKING:
    from kvern.adapters.bank import AdapterBank, AdapterStore
    from kvern.drafting.device.drafter import Drafter
    from kvern.drafting.models.head import DraftHead
    from kvern.drafting.models.medusa_heads import MedusaHeads
    from kvern.runner.cached_model import EmbeddingSource, RowStates
    from kvern.runner.layer_times import StepClock
    from kvern.runner.processor_rows import ProcessorRows
    from kvern.spec.vision import VisionSpec
    from kvern.structured.masks import GrammarRows


@dataclass(frozen=True)
class Draft:
    """A draft model or head, and the backend that runs its steps; Medusa heads have that of the model.

    `most`: the most drafts of a request in a step; None: it makes any number.
    """

    decoder: "Decoder | DraftHead | MedusaHeads"
    backend: "StepBackend"
    most: int | None = None


@dataclass(frozen=True)
class LoadedModel:
    """Model and state of rows, of which every runner makes use."""

    decoder: LanguageModel
    grammars: "Callable[[], GrammarRows]"
    """The matchers of rows, made when a request first has a grammar."""
    processors: "ProcessorRows | None"
    """None: the operator has enabled none."""
    adapters: "AdapterBank | None"
    """None: the engine has no place for any."""
    adapter_store: "AdapterStore | None" = None
    """The weights that steps load to places of `adapters`."""
    eight_bit: EightBit | None = None
    """The scales of a KV cache in 8 bits."""
    draft: Draft | None = None
    """None: no model guesses what another goes on with."""
    ranks: Ranks = ALONE
    """The ranks that compute the model together."""
    images: "Callable[[int], EmbeddingSource] | None" = None
    """Makes the source of rows of images for a batch of so many rows; None: the model reads none here."""
    times: "StepClock | None" = None
    """Measures the parts of some steps; None: nobody asks, or another rank does."""


class Runner(Protocol):
    """Runs steps on a device; the result may still be on its way."""

    caches: list[torch.Tensor]
    """Keys and values of each layer, [2, blocks, block_size, kv_heads, head_dim]."""
    pools: list[torch.Tensor]
    """The memory behind them, as of `AttentionBackend`."""
    embeddings: "EmbeddingSource | None"
    """The source of rows of embeddings for tokens; None: all tokens have ids alone."""

    @property
    def graph_tokens(self) -> int:
        """The most tokens of prompts of a step that a graph has; 0: no graph has any."""

    @property
    def draft_caches(self) -> Sequence[torch.Tensor]:
        """The caches of the layers of a draft model or head."""

    @property
    def states(self) -> "RowStates | None":
        """The states of layers; None: no layer keeps any."""

    def execute(self, output: SchedulerOutput) -> StepResult:
        """Start one step. Raises StepTooLarge if its differences have come, but it does not fit into memory."""

    def size(self, output: SchedulerOutput) -> tuple[int, int, bool] | None:
        """The decodes and tokens of prompts that a graph for this step needs room for; None: there can be no graph.

        And whether it has to be one of decodes alone, whatever other ranks have beside.
        """

    def idle(self) -> bool:
        """Make one thing that steps would run faster with, while none runs; whether there are more."""

    def forget_blocks(self, blocks: range) -> None:
        """Name blocks no longer, which no request has: they have no memory, and kernels may look at what rows name."""

    def assist(self) -> None:
        """Take part in a step of ranks in DP attention, in which this rank has no rows."""

    def abandon(self) -> None:
        """Wait for the device, then forget all steps: every request joins anew. Raises if the device is broken."""


class StepBackend(Protocol):
    """The backend that runs the steps of a worker: PyTorch, or kernels with the batch on the device."""

    groups: LayerGroups
    """Block tables of the model's layers, once there is `room`."""

    @property
    def unquantized(self) -> LinearFormat:
        """The way to multiply plain weights."""

    @property
    def restrict(self) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]:
        """The function that masks logits: `structured.masks.restrict`, or a kernel like it."""

    def prepare(self, decoder: nn.Module) -> None:
        """Choose what fits these weights and this device best."""

    def tune(self, model: nn.Module) -> None:
        """Choose how weights are multiplied; `prepare` does this, too."""

    def room(self, loaded: LoadedModel) -> FreeMemory:
        """Measure the memory that is left beside weights and the largest steps."""

    def runner(self, loaded: LoadedModel, layout: Layout) -> Runner:
        """The runner over a KV cache of this layout."""

    def drafter(self, decoder: "Decoder | DraftHead | MedusaHeads", layout: Layout, rows: BatchRows) -> "Drafter":
        """A drafter of the model or head of this backend, with a cache over the blocks of another model's layout.

        Medusa heads have no cache.
        """


VISION_KERNELS = frozenset({"rotary", "norm"})
"""The kernels of a GPU that an encoder of images may use."""


class Stored(NamedTuple):
    """A model as its steps multiply: what it is made of, how its weights are stored, and who shares it.

    `has_head`: a draft head guesses beside it. `vision`: the encoder of images beside it.
    """

    spec: ModelSpec
    methods: LinearMethods
    ranks: Ranks = ALONE
    has_head: bool = False
    vision: "VisionSpec | None" = None
