"""A worker whose batch lives on a GPU: linear layers and attention are timed, the largest steps are measured."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from kvern.attention.base import AttentionBackend
from kvern.attention.eight_bit import EightBit
from kvern.attention.groups import LayerGroups
from kvern.attention.memory import CacheOptions
from kvern.attention.paged import PagedAttention, Phases
from kvern.attention.selection import AttentionChoice, Shapes, choose
from kvern.attention.torch_sdpa import TorchAttention
from kvern.config import EngineConfig
from kvern.device.device_batch import DeviceBatch, DeviceRows
from kvern.device.measurements import Measurements
from kvern.device.rows import NO_WINDOWS, BatchRows
from kvern.device.timing import time_calls
from kvern.drafting.device.draft_graphs import MOST_ROWS
from kvern.drafting.device.drafter import Drafter, DrawingDrafter, ReadingDrafter
from kvern.drafting.models.head import DraftHead
from kvern.drafting.models.medusa_heads import MedusaHeads
from kvern.drafting.rejection import Drawn
from kvern.errors import ConfigError
from kvern.kernels import masks
from kvern.kernels.launch import capability
from kvern.layers.tuned_linear import TunedLinear
from kvern.layers.tuning import tune
from kvern.models.decoder import Decoder, LanguageModel
from kvern.models.weighted import WeightedModel
from kvern.runner.cached_model import CachedModel
from kvern.runner.device_drafters import drafting_bytes, make_drafter, medusa_drafter
from kvern.runner.device_runner import DeviceRunner
from kvern.runner.device_states import DeviceStateMemory
from kvern.runner.device_steps import GraphOptions, step_kinds
from kvern.runner.largest_steps import run_largest_steps
from kvern.runner.loaded_model import LoadedModel
from kvern.runner.memory import (
    DeviceMemory,
    bytes_noted,
    bytes_of_draft,
    bytes_of_state,
    bytes_of_token,
    cache_bytes,
    report_others,
)
from kvern.runner.plan import FreeMemory, Layout, Plan
from kvern.runner.startup import Startup
from kvern.runner.step_graphs import DeviceModel, GraphMemory, StepGraphs, StepKind
from kvern.runner.step_parts import StepTooLarge
from kvern.runner.windows import choose_groups
from kvern.spec.model import ModelSpec
from kvern.structured.masks import restrict


class KernelBackend:
    """The `StepBackend` of a worker with kernels."""

    def __init__(
        self, config: EngineConfig, spec: ModelSpec, plan: Plan, memory: DeviceMemory, startup: Startup
    ) -> None:
        self._config = config
        self._spec = spec
        self._plan = plan
        self._startup = startup
        self._memory, self._device = memory, memory.device
        self._dtype: torch.dtype = getattr(torch, plan.dtype)
        self._layers = list(spec.attentions)
        self.unquantized = TunedLinear(memory.device, plan.linear_backend)
        self._choice: AttentionChoice | None = None
        self.groups = LayerGroups.one_table(self._layers)

    @property
    def restrict(self) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]:
        return masks.restrict if "masks" in self._plan.kernels else restrict

    def prepare(self, decoder: WeightedModel) -> None:
        """Time how to multiply and who attends, or look it up."""
        config = self._config
        plan = self._plan
        device = self._device
        self.tune(decoder)
        measurements = Measurements(config.cache_folder, device)
        if plan.attention_backend != "torch_sdpa":
            with self._startup.stage("attention"), torch.inference_mode():
                longest = plan.max_model_len
                block_size = config.block_size if config.kv_cache == "paged" else longest
                cache_dtype = getattr(torch, plan.cache_dtype)
                requests = plan.max_batch_requests + 1
                hopper = "hopper" in plan.kernels and device.type == "cuda" and capability(device) == 90
                shapes = Shapes(self._layers, block_size, self._dtype, cache_dtype, device, requests, longest, hopper)
                self._choice = choose(plan.attention_backend, config, shapes, measurements)
                self._startup.report(self._choice.table)
        measurements.save()

    def tune(self, model: WeightedModel) -> None:
        """Time how to multiply, or look it up."""
        measurements = Measurements(self._config.cache_folder, self._device)
        if self._device.type == "cuda":
            with self._startup.stage("tuning"), torch.inference_mode():
                measurements.remember("linear", tune(model, time_calls, measurements.section("linear")))
        measurements.save()

    def room(self, loaded: LoadedModel) -> FreeMemory:
        """Measure the memory that is left, and who attends fastest. Compiles the kernels that serving needs."""
        with self._startup.stage("memory"):
            phases = {} if self._choice is None else self._choice.phases
            self.groups = choose_groups(self._config, self._spec, self._plan, phases.values())
            token_bytes = bytes_of_token(self._spec, getattr(torch, self._plan.cache_dtype), self.groups)
            if loaded.draft is not None:
                token_bytes += bytes_of_draft(loaded.draft.decoder.spec, self._plan, self.groups)
            state_bytes = bytes_of_state(self._spec, self._dtype)
            try:
                graphs = self._measure(loaded)
            except StepTooLarge as error:
                raise ConfigError(
                    f"a step of max_batch_tokens {self._plan.max_batch_tokens} tokens does not fit into the GPU memory "
                    f"that is left beside the weights {error}: lower max_batch_tokens or max_batch_requests, raise "
                    "gpu_memory_share, or free memory"
                ) from error
            if loaded.draft is not None:
                graphs += drafting_bytes(loaded.draft.decoder, self._config, self._plan)
            if self._config.has_drafts and loaded.ranks.stage.count > 1:  # of all steps on their way
                graphs += MOST_ROWS * bytes_noted(self._spec, self._dtype)
            room = cache_bytes(self._memory, token_bytes, graphs + state_bytes)  # of the row that pads batches
            report_others(self._memory)
        libraries = frozenset() if self._choice is None else frozenset(self._choice.libraries)
        return FreeMemory(
            room,
            token_bytes,
            phases,
            libraries,
            state_bytes=state_bytes,
            window=self.groups.window or 0,
            window_tables=self.groups.window_tables,
            whole=self.groups.whole,
        )

    def runner(self, loaded: LoadedModel, layout: Layout) -> DeviceRunner:
        """The runner over a KV cache of this layout, and one more block that pads batches."""
        config = self._config
        with self._startup.stage("cache"):
            dtype = getattr(torch, layout.dtype)
            groups = self.groups if layout.window_tables else None
            sizes = layout.blocks + 1, layout.block_size
            chosen = layout.attention
            decoder = loaded.decoder
            eight_bit = loaded.eight_bit
            attention = self._attention(*sizes, dtype, chosen, decoder, eight_bit, groups)
            table = -(-layout.max_model_len // layout.block_size)
            requests, longest = layout.max_batch_requests, layout.max_model_len
            windows = NO_WINDOWS if groups is None else groups.windows
            rows = DeviceRows(requests, longest, table, self._device, layout.blocks, windows)
        states = None
        if layout.states:
            states = DeviceStateMemory(self._spec, layout.states, requests + 1, self._dtype, self._device)
        model = CachedModel(_decoder(loaded), attention, rows, layout.block_size, loaded.adapters, states)
        draft = loaded.draft
        drafter = None if draft is None else draft.backend.drafter(draft.decoder, layout, rows)
        graphs: list[StepGraphs[Any, Any]] = []
        if config.cuda_graphs and attention.captures and self._device.type == "cuda":
            memory, options = GraphMemory(self._device), self._graph_options(drafter, layout.max_batch_tokens)
            graphs = [StepGraphs(kind, memory) for kind in step_kinds(model, options)]
        return DeviceRunner(model, loaded, drafter, graphs)

    def _graph_options(self, drafter: Drafter | None, tokens: int) -> GraphOptions:
        """The options of the graphs of the model, whose steps have so many tokens at most."""
        prefixes, drafts = self._config.shared_prefix_attention, self._config.has_drafts
        if drafter is None:
            return GraphOptions(tokens, prefixes, drafts)
        reader = drafter.reader if isinstance(drafter, ReadingDrafter) else None
        is_drawn = isinstance(drafter, DrawingDrafter) and drafter.drawn is not None
        verifies = not is_drawn and (reader is not None or drafter.inputs is None)
        return GraphOptions(tokens, prefixes, drafts, verifies, reader)

    def drafter(self, decoder: Decoder | DraftHead | MedusaHeads, layout: Layout, rows: BatchRows) -> Drafter:
        """The model or head of this backend as a drafter over another's blocks and rows."""
        assert isinstance(rows, DeviceRows), "the other's steps run elsewhere"
        drawn, size = Drawn() if self._config.acceptance == "rejection" else None, layout.block_size
        if isinstance(decoder, MedusaHeads):
            return medusa_drafter(decoder, rows, drawn)
        dtype = getattr(torch, self._plan.plain_cache_dtype)
        chosen = {} if self._choice is None else self._choice.phases
        attention = self._attention(layout.blocks + 1, size, dtype, chosen, decoder, None)
        tokens, captures = layout.max_batch_tokens, self._config.cuda_graphs
        return make_drafter(decoder, attention, rows, size, tokens, drawn=drawn, cuda_graphs=captures)

    def _attention(
        self,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        chosen: Mapping[str, str],
        decoder: LanguageModel | DraftHead,
        eight_bit: EightBit | None,
        groups: LayerGroups | None = None,
    ) -> AttentionBackend[DeviceBatch]:
        """The backend of attention: the libraries that are chosen for each phase, or PyTorch if none is."""
        sizes = blocks, block_size, dtype, self._device
        cache = CacheOptions(self._layers, *sizes, groups, eight_bit, decoder.sinks)
        if self._choice is None or not chosen:
            return TorchAttention(cache)
        phases = Phases(**{phase: self._choice.libraries[name] for phase, name in chosen.items()})
        triton, deterministic = self._choice.triton, self._config.deterministic
        return PagedAttention(cache, phases, triton, deterministic)

    def _measure(self, loaded: LoadedModel) -> int:
        """Run the largest steps of a GPU; returns the bytes that CUDA graphs take besides."""
        device = self._device
        longest = self._plan.max_model_len
        slots = self._plan.max_batch_requests
        if device.type != "cuda":
            return 0
        size, tokens = self._config.block_size, self._plan.max_batch_tokens
        rows = DeviceRows(slots, longest, -(-longest // size), device, scratch_block=0)
        dtype = getattr(torch, self._plan.cache_dtype)
        chosen = {} if self._choice is None else self._choice.phases
        attention = self._attention(1, size, dtype, chosen, loaded.decoder, loaded.eight_bit)
        states = DeviceStateMemory(self._spec, 0, slots + 1, self._dtype, device) if self._spec.recurrent else None
        model: DeviceModel = CachedModel(_decoder(loaded), attention, rows, size, None, states)
        kinds: list[StepKind[Any, Any]] = []
        if self._config.cuda_graphs and attention.captures:
            kinds = step_kinds(replace(model, adapters=loaded.adapters), self._graph_options(None, tokens))
        return run_largest_steps(DeviceRunner(model, loaded), tokens, kinds)


def _decoder(loaded: LoadedModel) -> Decoder:
    assert isinstance(loaded.decoder, Decoder), "models of transformers run on no GPU"
    return loaded.decoder
