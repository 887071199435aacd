"""A worker whose steps run through PyTorch: on CPUs, beside their kernels, and on GPUs where Triton does not work."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import torch
from torch import nn

from kvern.attention.base import AttentionBackend
from kvern.attention.compiled import CompiledAttention
from kvern.attention.eight_bit import EightBit
from kvern.attention.memory import CacheOptions
from kvern.config import EngineConfig
from kvern.cpu import sampling as cpu
from kvern.cpu.library import DTYPES
from kvern.device.input_batch import InputBatch, build_input_batch
from kvern.device.rows import NO_WINDOWS, BatchRows, ListedRows
from kvern.layers.unquantized import Unquantized
from kvern.models.decoder import Decoder, LanguageModel
from kvern.request.step import ScheduledTokens
from kvern.runner.cached_model import CachedModel
from kvern.runner.captured_decodes import CapturedDecodes
from kvern.runner.loaded_model import LoadedModel
from kvern.runner.memory import DeviceMemory, bytes_of_draft, bytes_of_state, bytes_of_token, cache_bytes, choose_groups
from kvern.runner.needs import SamplingNeeds
from kvern.runner.plan import RANK_KERNELS, FreeMemory, Layout, Plan
from kvern.runner.runner import ModelRunner
from kvern.runner.sampling import CompiledSampling, Sampling
from kvern.spec.model import ModelSpec

if TYPE_CHECKING:
    from kvern.drafting.device.drafter import Drafter
    from kvern.drafting.device.head_drafter import Choose
    from kvern.drafting.models.head import DraftHead
    from kvern.drafting.models.medusa_heads import MedusaHeads
    from kvern.drafting.rejection import Drawn


class TorchBackend:
    """The `StepBackend` of a worker without kernels for GPUs."""

    def __init__(self, config: EngineConfig, spec: ModelSpec, plan: Plan, memory: DeviceMemory) -> None:
        self._spec = spec
        self._plan = plan
        self._memory = memory
        self.unquantized = Unquantized()
        self.groups = choose_groups(config, spec, plan)
        self._compiled = "cpu_sampling" in plan.kernels
        # What ranks say to each other without kernels would be missing when a captured step is run again.
        self._captures = self._compiled and (config.tensor_parallel_size == 1 or plan.kernels >= RANK_KERNELS)
        self._rejection = config.acceptance == "rejection"

    @property
    def restrict(self) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]:
        """The function that masks logits, imported for the first grammar."""
        if self._compiled:
            return cpu.restrict
        from kvern.structured.masks import restrict

        return restrict

    def prepare(self, decoder: nn.Module) -> None:
        """Nothing is chosen."""

    def tune(self, model: nn.Module) -> None:
        """Nothing is chosen."""

    def room(self, loaded: LoadedModel) -> FreeMemory:
        """Compute the memory that is left."""
        token_bytes = bytes_of_token(self._spec, getattr(torch, self._plan.cache_dtype), self.groups)
        if loaded.draft is not None:
            token_bytes += bytes_of_draft(loaded.draft.decoder.spec, self._plan, self.groups)
        state_bytes = bytes_of_state(self._spec, getattr(torch, self._plan.dtype))
        return FreeMemory(
            cache_bytes(self._memory, token_bytes, None, state_bytes),
            token_bytes,
            state_bytes=state_bytes,
            window=self.groups.window or 0,
            window_tables=self.groups.window_tables,
            whole=self.groups.whole,
        )

    def runner(self, loaded: LoadedModel, layout: Layout) -> ModelRunner:
        """The runner over a KV cache of this layout."""
        size = layout.block_size
        slots = layout.max_batch_requests
        device = self._memory.device
        attention = self._attention(loaded.decoder, loaded.eight_bit, layout)
        states = None
        if layout.states:
            from kvern.runner.state_memory import StateMemory

            states = StateMemory(self._spec, layout.states, slots, getattr(torch, self._plan.dtype), device)
        make_rows = ListedRows if self._compiled else BatchRows
        windows = self.groups.windows if layout.window_tables else NO_WINDOWS
        rows = make_rows(slots, layout.max_model_len, -(-layout.max_model_len // size), device, windows)
        decoder = loaded.decoder
        captured = None
        draft = loaded.draft
        drafter = None if draft is None else draft.backend.drafter(draft.decoder, layout, rows)
        captures = self._captures and states is None and loaded.ranks.stage.count == 1
        captures &= loaded.ranks.dp_attention is None  # a captured step gathers as many rows each time
        if captures and isinstance(attention, CompiledAttention):
            inputs = None if drafter is None else drafter.inputs
            captured = CapturedDecodes(decoder, attention, rows, size, inputs) if isinstance(decoder, Decoder) else None
        images = None if loaded.images is None else loaded.images(slots)
        model = CachedModel(decoder, attention, rows, size, loaded.adapters, states, images)
        return ModelRunner(model, loaded, self._sampling(rows), captured, drafter)

    def drafter(self, decoder: "Decoder | DraftHead | MedusaHeads", layout: Layout, rows: BatchRows) -> "Drafter":
        """The model or head of this backend as a drafter over another's blocks and rows."""
        from kvern.drafting.device.draft_model import DraftModel, HostDraftModel

        sampling = self._sampling(rows)
        drawn = None
        if self._rejection:
            from kvern.drafting.rejection import Drawn

            drawn = Drawn()
        if not isinstance(decoder, Decoder):
            return self._head_drafter(decoder, layout, rows, partial(_draw, sampling), drawn)
        layout = msgspec.structs.replace(layout, dtype=self._plan.plain_cache_dtype, window_tables=0)
        attention, size = self._attention(decoder, None, layout), layout.block_size
        captured = None
        if self._captures and isinstance(attention, CompiledAttention):
            captured = CapturedDecodes(decoder, attention, rows, size, steps="decodes of the draft model")
        model: HostDraftModel = CachedModel(decoder, attention, rows, size)
        return DraftModel(model, layout.max_batch_tokens, sampling, captured, drawn)

    def _head_drafter(
        self,
        decoder: "DraftHead | MedusaHeads",
        layout: Layout,
        rows: BatchRows,
        draw: "Choose",
        drawn: "Drawn | None",
    ) -> "Drafter":
        """A head that drafts, or Medusa heads."""
        from kvern.drafting.device.captured_head import CapturedHead
        from kvern.drafting.device.head_drafter import HeadDrafter, MedusaDrafter
        from kvern.drafting.models.medusa_heads import MedusaHeads

        if isinstance(decoder, MedusaHeads):
            return MedusaDrafter(decoder, rows, draw, drawn)
        layout = msgspec.structs.replace(layout, dtype=self._plan.plain_cache_dtype, window_tables=0)
        attention, size = self._attention(decoder, None, layout), layout.block_size
        captured = None
        if self._captures and isinstance(attention, CompiledAttention):
            captured = CapturedHead(decoder, attention, rows, size)
        build = partial(_build_batch, rows, size)
        return HeadDrafter(CachedModel(decoder, attention, rows, size), build, draw, captured=captured, drawn=drawn)

    def _sampling(self, rows: BatchRows) -> Sampling:
        if self._compiled:
            return CompiledSampling(rows)
        from kvern.runner.torch_sampling import TorchSampling

        return TorchSampling(rows)

    def _attention(
        self, decoder: "LanguageModel | DraftHead", eight_bit: EightBit | None, layout: Layout
    ) -> AttentionBackend[InputBatch]:
        dtype = getattr(torch, layout.dtype)
        cache = CacheOptions(
            self._spec.attentions,
            layout.blocks,
            layout.block_size,
            dtype,
            self._memory.device,
            self.groups if layout.window_tables else None,
            eight_bit,
            decoder.sinks,
        )
        if "cpu_attention" in self._plan.kernels and dtype in DTYPES:
            return CompiledAttention(cache, getattr(torch, self._plan.dtype))
        from kvern.attention.torch_sdpa import TorchAttention

        return TorchAttention(cache)


def _build_batch(
    rows: BatchRows, block_size: int, scheduled: Sequence[ScheduledTokens], starts: torch.Tensor
) -> InputBatch:
    """Build a batch of requests that begin at `starts` [R]."""
    exact = [
        ScheduledTokens(item.slot, start, item.count, item.sampled)
        for item, start in zip(scheduled, starts.tolist(), strict=True)
    ]
    return build_input_batch(rows, exact, block_size)


def _draw(
    sampling: Sampling, logits: torch.Tensor, slots: Sequence[int], index: torch.Tensor, positions: torch.Tensor
) -> None:
    chosen = sampling.sample(logits.contiguous(), slots, index, positions, SamplingNeeds.NOTHING)
    sampling.write(index, positions, chosen)
