"""A worker whose batch lives on a GPU: linear layers and attention are timed, the largest steps are measured.

The kinds of steps that are captured as CUDA graphs are registered in `STEP_KINDS`.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from kvern.attention.base import AttentionBackend
from kvern.attention.eight_bit import EightBit
from kvern.attention.groups import LayerGroups
from kvern.attention.memory import CacheOptions
from kvern.attention.paged import PagedAttention, Phases
from kvern.attention.selection import AttentionChoice, Shapes, choose
from kvern.attention.torch_sdpa import TorchAttention
from kvern.config import EngineConfig
from kvern.cpu.cores import available_memory
from kvern.device.device_batch import DeviceBatch, DeviceRows, build_device_batch
from kvern.device.measurements import Measurements
from kvern.device.rows import NO_WINDOWS, BatchRows
from kvern.device.timing import time_calls
from kvern.drafting.device.device_draft_model import DeviceDraftModel
from kvern.drafting.device.draft_graphs import MOST_ROWS, DraftGraphs, ModelSteps, draft_runs, padded_rows
from kvern.drafting.device.drafter import Drafter, DrawingDrafter, ReadingDrafter, StepReader
from kvern.drafting.device.head_drafter import HeadDrafter, MedusaDrafter
from kvern.drafting.device.head_graphs import DeviceHead, HeadGraphs
from kvern.drafting.models.head import DraftHead
from kvern.drafting.models.medusa_heads import MedusaHeads
from kvern.drafting.rejection import Drawn
from kvern.errors import ConfigError, in_a_line
from kvern.kernels import masks
from kvern.kernels.batch import write_sampled
from kvern.kernels.launch import capability, is_amd
from kvern.kernels.sampling import sample
from kvern.layers.tuned_linear import TunedLinear
from kvern.layers.tuning import tune
from kvern.models.decoder import Decoder, DeviceLanguageModel, LanguageModel
from kvern.ranks.ranks import Ranks
from kvern.request.request import PromptInput, RequestSpec
from kvern.request.sampling_params import ResolvedParams
from kvern.request.step import NewRequest, ScheduledTokens, SchedulerOutput, StepTooLarge
from kvern.runner.cached_model import CachedModel
from kvern.runner.decode_graphs import DecodeKind
from kvern.runner.device_runner import DeviceRunner
from kvern.runner.device_states import DeviceStateMemory
from kvern.runner.first_products import FirstProducts
from kvern.runner.loaded_model import LoadedModel
from kvern.runner.memory import (
    GRAPH_BYTES,
    STAGE_BYTES,
    STAGES,
    STEPS_STAGE_BYTES,
    DeviceMemory,
    bytes_noted,
    bytes_of_draft,
    bytes_of_drafting,
    bytes_of_packed,
    bytes_of_reading,
    bytes_of_state,
    bytes_of_token,
    cache_bytes,
    changing_cache,
    choose_groups,
    report_others,
)
from kvern.runner.plan import ChangingCache, FreeMemory, Layout, Plan, is_elastic
from kvern.runner.prompt_graphs import PromptKind, reading_shapes
from kvern.runner.startup import Startup
from kvern.runner.step_graphs import DeviceModel, GraphMemory, StepGraphs, StepKind
from kvern.runner.timed_graphs import MOST_GRAPHS, DeviceClock
from kvern.runner.verify_graphs import VerifyKind
from kvern.spec.model import ModelSpec
from kvern.structured.masks import restrict


def run_largest_steps(runner: DeviceRunner, max_tokens: int, kinds: Sequence[StepKind[Any, Any]]) -> int:
    """Run the largest steps through a cache of one block: PyTorch keeps their memory for the steps to come.

    `max_tokens`: of a step; `kinds`: those that are captured. Returns the bytes that their graphs take besides.
    """
    rows = runner.model.rows
    device = rows.device
    slots = rows.scratch
    longest = rows.tokens.shape[1] - 1
    tokens = min(max_tokens, longest * slots)
    length = min(longest - 1, tokens)
    requests = min(slots, -(-tokens // length))
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    params = ResolvedParams(temperature=1.0, top_p=0.9, presence_penalty=0.1, logprobs=0)
    asked = RequestSpec("", PromptInput([0]), params, 1)
    joined = [NewRequest(slot, asked, params, 0, [0], []) for slot in range(slots)]
    prompts = [ScheduledTokens(slot, 0, min(length, tokens - slot * length), 1) for slot in range(requests)]
    decodes = [ScheduledTokens(slot, 0, 1, 1) for slot in range(slots)]
    runner.execute(SchedulerOutput(0, joined=joined, scheduled=prompts)).result()
    torch.cuda.reset_peak_memory_stats(device)
    for number, step in enumerate([decodes, *(kind.largest_step() for kind in kinds)]):
        if step:
            runner.execute(SchedulerOutput(1 + number, scheduled=step)).result()
    if not kinds:
        return 0
    graphs = sum(len(kind.shapes) for kind in kinds)
    return torch.cuda.max_memory_allocated(device) - before + graphs * GRAPH_BYTES


logger = logging.getLogger("kvern")


class GraphOptions(NamedTuple):
    """The steps that graphs are made for.

    max_tokens       the most tokens of a step
    shares_prefixes  attention reads common prefixes of decodes once
    drafts           steps may verify drafts
    verifies         steps that do are captured; their drafter can go on after graphs
    reader           reads steps within the graphs that verify drafts
    """

    max_tokens: int
    shares_prefixes: bool = True
    drafts: bool = False
    verifies: bool = True
    reader: StepReader | None = None


MakeKind = Callable[[DeviceModel, GraphOptions], StepKind[Any, Any] | None]
"""Makes a kind of step for a model; None: the model, or its backend of attention, cannot have it."""


def _decodes(model: DeviceModel, options: GraphOptions) -> DecodeKind:
    return DecodeKind(model, model.attention.prefix_members if options.shares_prefixes else 0)


def _prompts(model: DeviceModel, options: GraphOptions) -> PromptKind | None:
    is_possible = model.attention.reads_device_starts and not model.attention.deterministic
    return PromptKind(model, options.max_tokens) if is_possible and _is_one_stage(model) else None


def _verified_drafts(model: DeviceModel, options: GraphOptions) -> VerifyKind | None:
    if not (options.drafts and model.attention.reads_device_starts and _is_one_stage(model)):
        return None
    captures = options.verifies and model.decoder.build.ranks.dp_attention is None
    return VerifyKind(model, options.max_tokens, options.reader, captures=captures)


def _is_one_stage(model: DeviceModel) -> bool:
    """Returns whether the model is no pipeline stage: graphs receive rows of another stage for decodes alone."""
    return model.decoder.build.ranks.stage.count == 1


STEP_KINDS: list[MakeKind] = [_decodes, _verified_drafts, _prompts]
"""The kinds in the order in which they are tried for a step."""


def step_kinds(model: DeviceModel, options: GraphOptions) -> list[StepKind[Any, Any]]:
    """The kinds of steps of a model whose backend of attention can be captured."""
    made = (make(model, options) for make in STEP_KINDS)
    return [kind for kind in made if kind is not None]


def medusa_drafter(heads: MedusaHeads, rows: DeviceRows, drawn: Drawn | None) -> MedusaDrafter:
    """Medusa heads as a drafter over the rows of a model. `drawn`: as of `Drafter`s that draw."""
    return MedusaDrafter(heads, rows, partial(_draw, rows), drawn)


def make_drafter(
    decoder: Decoder | DraftHead,
    attention: AttentionBackend[DeviceBatch],
    rows: DeviceRows,
    block_size: int,
    max_tokens: int,
    *,
    drawn: Drawn | None,
    cuda_graphs: bool,
) -> Drafter:
    """A draft model or head as a drafter over the rows of a model, with a cache of its own.

    `max_tokens`: of a step that reads prompts. `cuda_graphs`: it drafts in graphs, unless what it draws from is kept.
    """
    captures = drawn is None and cuda_graphs and attention.captures and rows.device.type == "cuda"
    if isinstance(decoder, DraftHead):
        head: DeviceHead = CachedModel(decoder, attention, rows, block_size)
        in_graphs = HeadGraphs(head, GraphMemory(rows.device)) if captures else None
        return HeadDrafter(head, partial(_build_batch, rows, block_size), partial(_draw, rows), in_graphs, drawn=drawn)
    model: DeviceModel = CachedModel(decoder, attention, rows, block_size)
    if not captures:
        return DeviceDraftModel(model, max_tokens, drawn=drawn)
    memory = GraphMemory(rows.device)
    drafts, prompts = DraftGraphs(ModelSteps(model), rows, memory), None
    if attention.reads_device_starts and not attention.deterministic:
        prompts = StepGraphs(PromptKind(model, max_tokens, samples=False), memory)
    return DeviceDraftModel(model, max_tokens, drafts, prompts)


def drafting_bytes(draft: Decoder | DraftHead | MedusaHeads, config: EngineConfig, plan: Plan) -> int:
    """Bytes that the steps of a draft model or head take beside those of the model."""
    rows = padded_rows(min(plan.max_batch_requests, MOST_ROWS))
    captured = config.cuda_graphs and not isinstance(draft, MedusaHeads)
    steps = sum(run.steps for run in draft_runs(rows)) if captured else 0
    drawn = MOST_ROWS if config.acceptance == "rejection" else 0
    size = getattr(torch, plan.dtype).itemsize
    taken = bytes_of_drafting(draft.spec, size, rows, steps, drawn)
    if captured and isinstance(draft, Decoder):
        reading = reading_shapes(plan.max_batch_tokens, plan.max_model_len)
        taken += bytes_of_reading(draft.spec, size, [shape.prompts for shape in reading])
    if isinstance(draft, DraftHead) and draft.layer_inputs() is not None:
        taken += 2 * plan.max_batch_tokens * draft.head.state_size * size  # of two steps, kept and joined
    return taken


def _build_batch(
    rows: DeviceRows, block_size: int, scheduled: Sequence[ScheduledTokens], starts: Tensor
) -> DeviceBatch:
    return build_device_batch(rows, scheduled, block_size, starts)


def _draw(rows: DeviceRows, logits: Tensor, slots: Sequence[int], index: Tensor, positions: Tensor) -> None:
    write_sampled(rows.tokens, index, positions, sample(logits, None, index, positions, rows))


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

    def prepare(self, decoder: nn.Module) -> None:
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
                free = self._memory.free_and_total()[0] if device.type == "cuda" else available_memory()
                self._choice = choose(plan.attention_backend, config, shapes, measurements, free)
                self._startup.report(self._choice.table)
        measurements.save()

    def tune(self, model: nn.Module) -> None:
        """Time how to multiply, or look it up."""
        measurements = Measurements(self._config.cache_folder, self._device)
        if self._device.type == "cuda":
            with self._startup.stage("tuning"), torch.inference_mode():
                known = measurements.section("linear")
                measurements.remember("linear", tune(model, time_calls, known, compare=is_amd(self._device)))
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
            if self._config.kv_tier:
                graphs += bytes_of_packed(self._plan, token_bytes, state_bytes)
                graphs += STAGES * STAGE_BYTES + STEPS_STAGE_BYTES
            reserved = graphs + state_bytes  # of the row that pads batches
            changing = self._changing(loaded, reserved)
            room = cache_bytes(self._memory, token_bytes, reserved) if changing is None else changing.own_bytes
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
            changing=changing,
        )

    def _changing(self, loaded: LoadedModel, reserved: int) -> ChangingCache | None:
        """The bounds of a cache that changes. Layers with windows have a fixed one: all of it is theirs."""
        if self.groups.window_tables or not is_elastic(self._config):
            return None
        kinds = [(self._spec, getattr(torch, self._plan.cache_dtype))]
        if loaded.draft is not None:
            kinds.append((loaded.draft.decoder.spec, getattr(torch, self._plan.plain_cache_dtype)))
        return changing_cache(self._memory, reserved, kinds, self._config.block_size)

    def runner(self, loaded: LoadedModel, layout: Layout) -> DeviceRunner:
        """The runner over a KV cache of this layout, and one more block that pads batches."""
        config = self._config
        with self._startup.stage("cache"):
            dtype = getattr(torch, layout.dtype)
            groups = self.groups if layout.window_tables else None
            chunked = self._memory.chunked
            sizes = layout.blocks + 1 if chunked is None else chunked.all_blocks, layout.block_size
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
        images = None if loaded.images is None else loaded.images(requests + 1)
        model = CachedModel(_decoder(loaded), attention, rows, layout.block_size, loaded.adapters, states, images)
        draft = loaded.draft
        drafter = None if draft is None else draft.backend.drafter(draft.decoder, layout, rows)
        graphs: list[StepGraphs[Any, Any]] = []
        if config.cuda_graphs and model.decoder.captures and attention.captures and self._device.type == "cuda":
            memory, options = GraphMemory(self._device), self._graph_options(drafter, layout.max_batch_tokens)
            graphs = [StepGraphs(kind, memory) for kind in step_kinds(model, options)]
            if isinstance(loaded.times, DeviceClock):
                loaded.times.memory = memory
                loaded.times.on_all = partial(_on_all, loaded.ranks.of_own_stage(), self._device)
                loaded.times.expect(graphs[0])
        others = [FirstProducts(loaded, layout)] if self._device.type == "cuda" else []
        return DeviceRunner(model, loaded, drafter, graphs, others)

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
        chunked = self._memory.chunked
        blocks = layout.blocks + 1 if chunked is None else chunked.all_blocks
        attention = self._attention(blocks, size, dtype, chosen, decoder, None)
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
        cache = CacheOptions(self._layers, *sizes, groups, eight_bit, decoder.sinks, self._memory.chunked)
        try:
            if self._choice is None or not chosen:
                return TorchAttention(cache)
            phases = Phases(**{phase: self._choice.libraries[name] for phase, name in chosen.items()})
            return PagedAttention(cache, phases, self._choice.triton, self._config.deterministic)
        except torch.OutOfMemoryError as error:
            count = blocks if cache.chunked is None else cache.chunked.least
            raise ConfigError(
                f"the GPU has no memory for the KV cache of {count * block_size} tokens beside what others have: lower "
                f"max_model_len or kv_cache_tokens, or free memory ({in_a_line(error)})"
            ) from error

    def _measure(self, loaded: LoadedModel) -> int:
        """Run the largest steps of a GPU; returns the bytes that CUDA graphs take besides."""
        device = self._device
        longest = self._plan.max_model_len
        slots = self._plan.max_batch_requests
        if device.type != "cuda":
            return 0
        size, tokens = self._config.block_size, self._plan.max_batch_tokens
        rows = DeviceRows(slots, longest, -(-longest // size), device, scratch_block=0)
        if loaded.images is not None:
            try:
                loaded.images(0).rehearse()
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                logger.warning("the largest images do not fit into the GPU memory beside the weights: they will fail")
        dtype = getattr(torch, self._plan.cache_dtype)
        chosen = {} if self._choice is None else self._choice.phases
        attention = self._attention(1, size, dtype, chosen, loaded.decoder, loaded.eight_bit)
        states = DeviceStateMemory(self._spec, 0, slots + 1, self._dtype, device) if self._spec.recurrent else None
        model: DeviceModel = CachedModel(_decoder(loaded), attention, rows, size, None, states)
        kinds: list[StepKind[Any, Any]] = []
        if self._config.cuda_graphs and model.decoder.captures and attention.captures:
            kinds = step_kinds(replace(model, adapters=loaded.adapters), self._graph_options(None, tokens))
        timed = MOST_GRAPHS * GRAPH_BYTES if kinds and loaded.times is not None else 0
        return run_largest_steps(DeviceRunner(model, loaded), tokens, kinds) + timed


def _on_all(ranks: Ranks, device: torch.device, here: bool) -> bool:
    """Returns whether this is so on all of these ranks, which ask at the same time."""
    return bool(ranks.least(torch.tensor([here], dtype=torch.int32, device=device)).item())


def _decoder(loaded: LoadedModel) -> DeviceLanguageModel:
    return cast("DeviceLanguageModel", loaded.decoder)
