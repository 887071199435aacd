"""A worker whose batch lives on a GPU: linear layers and attention are timed, the largest steps are measured."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from kvern.attention.base import AttentionBackend
from kvern.attention.eight_bit import EightBit
from kvern.attention.groups import LayerGroups
from kvern.attention.paged import PagedAttention, Phases
from kvern.attention.selection import AttentionChoice, Shapes, choose
from kvern.attention.torch_sdpa import TorchAttention
from kvern.config import EngineConfig
from kvern.device.device_batch import DeviceBatch, DeviceRows, build_device_batch
from kvern.device.measurements import Measurements
from kvern.device.rows import NO_WINDOWS, BatchRows
from kvern.device.timing import time_calls
from kvern.drafting.device.device_draft_model import DeviceDraftModel
from kvern.drafting.device.draft_graphs import MOST_ROWS, DraftGraphs, ModelGraphs, ModelSteps, draft_runs, padded_rows
from kvern.drafting.device.drafter import Drafter
from kvern.drafting.device.head_drafter import HeadDrafter
from kvern.drafting.device.head_graphs import HeadGraphs, HeadSteps
from kvern.drafting.device.medusa_drafter import MedusaDrafter
from kvern.drafting.models.head import DraftHead
from kvern.drafting.models.medusa_heads import MedusaHeads
from kvern.drafting.rejection import Drawn
from kvern.errors import ConfigError
from kvern.kernel_list import Inputs
from kvern.kernels import masks
from kvern.kernels.batch import write_sampled
from kvern.kernels.sampling import sample
from kvern.layers.tuned_format import TunedLinear
from kvern.layers.tuning import tune
from kvern.models.decoder import Decoder, LanguageModel
from kvern.models.weighted import WeightedModel
from kvern.request.request import PromptInput, RequestSpec
from kvern.request.sampling_params import ResolvedParams
from kvern.request.step import NewRequest, ScheduledTokens, SchedulerOutput
from kvern.runner.contents import Contents
from kvern.runner.device_runner import DeviceRunner
from kvern.runner.device_states import DeviceStateMemory
from kvern.runner.graph_captures import captures
from kvern.runner.memory import (
    GRAPH_BYTES,
    DeviceMemory,
    bytes_noted,
    bytes_of_draft,
    bytes_of_drafting,
    bytes_of_reading,
    bytes_of_state,
    bytes_of_token,
    cache_bytes,
    report_others,
)
from kvern.runner.plan import Layout, Plan, Room
from kvern.runner.prompt_graphs import PromptGraphs, prompt_steps, reading_steps
from kvern.runner.startup import Startup
from kvern.runner.step_parts import StepTooLarge
from kvern.runner.verify_graphs import verify_steps
from kvern.runner.windows import choose_groups
from kvern.spec.model import ModelSpec
from kvern.structured.masks import restrict


class KernelParts:
    """The `Parts` of a worker with kernels."""

    def __init__(
        self, config: EngineConfig, spec: ModelSpec, plan: Plan, memory: DeviceMemory, startup: Startup
    ) -> None:
        self._config, self._spec, self._plan, self._startup = config, spec, plan, startup
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
        config, plan, device = self._config, self._plan, self._device
        self.tune(decoder)
        measurements = Measurements(config.cache_folder, device)
        if plan.attention_backend != "torch_sdpa":
            with self._startup.stage("attention"), torch.inference_mode():
                longest = plan.max_model_len
                block_size = config.block_size if config.kv_cache == "paged" else longest
                cache_dtype = getattr(torch, plan.cache_dtype)
                requests = plan.max_batch_requests + 1
                hopper = "hopper" in plan.kernels and device.type == "cuda" and Inputs(device, self._dtype).hopper
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

    def room(self, contents: Contents) -> Room:
        """What the device's memory has left, and who attends fastest. Compiles the kernels that serving needs."""
        with self._startup.stage("memory"):
            phases = {} if self._choice is None else self._choice.phases
            self.groups = choose_groups(self._config, self._spec, self._plan, phases.values())
            token_bytes = bytes_of_token(self._spec, getattr(torch, self._plan.cache_dtype), self.groups)
            if contents.draft is not None:
                token_bytes += bytes_of_draft(contents.draft.decoder.spec, self._plan, self.groups)
            state_bytes = bytes_of_state(self._spec, self._dtype)
            try:
                graphs = self._run_largest_steps(contents)
            except StepTooLarge as error:
                raise ConfigError(
                    f"a step of max_batch_tokens {self._plan.max_batch_tokens} tokens does not fit into the GPU memory "
                    f"that is left beside the weights {error}: lower max_batch_tokens or max_batch_requests, raise "
                    "gpu_memory_share, or free memory"
                ) from error
            if contents.draft is not None:
                graphs += self._drafting_bytes(contents.draft.decoder)
            if self._config.has_drafts and contents.ranks.stage.count > 1:  # of all steps on their way
                graphs += MOST_ROWS * bytes_noted(self._spec, self._dtype)
            room = cache_bytes(self._memory, token_bytes, graphs + state_bytes)  # of the row that pads batches
            report_others(self._memory)
        libraries = frozenset() if self._choice is None else frozenset(self._choice.libraries)
        return Room(
            room,
            token_bytes,
            phases,
            libraries,
            state_bytes=state_bytes,
            window=self.groups.window or 0,
            window_tables=self.groups.window_tables,
            whole=self.groups.whole,
        )

    def runner(self, contents: Contents, layout: Layout) -> DeviceRunner:
        """The runner over a KV cache of this layout, and one more block that pads batches."""
        config = self._config
        with self._startup.stage("cache"):
            dtype = getattr(torch, layout.dtype)
            groups = self.groups if layout.window_tables else None
            sizes = layout.blocks + 1, layout.block_size
            chosen, decoder, eight_bit = layout.attention, contents.decoder, contents.eight_bit
            attention = self._attention(*sizes, dtype, chosen, decoder, eight_bit, groups)
            table = -(-layout.max_model_len // layout.block_size)
            requests, longest = layout.max_batch_requests, layout.max_model_len
            windows = NO_WINDOWS if groups is None else groups.windows
            rows = DeviceRows(requests, longest, table, self._device, layout.blocks, windows)
        states = None
        if layout.states:
            states = DeviceStateMemory(self._spec, layout.states, requests + 1, self._dtype, self._device)
        return DeviceRunner(
            _decoder(contents),
            attention,
            rows,
            layout.block_size,
            contents.grammars,
            contents.processors,
            config.cuda_graphs,
            config.shared_prefix_attention,
            contents.adapters,
            layout.max_batch_tokens,
            states,
            None if contents.draft is None else contents.draft.parts.drafter(contents.draft.decoder, layout, rows),
            config.has_drafts,
        )

    def drafter(self, decoder: Decoder | DraftHead | MedusaHeads, layout: Layout, rows: BatchRows) -> Drafter:
        """The model or head of these parts as a drafter over another's blocks and rows."""
        assert isinstance(rows, DeviceRows), "the other's steps run elsewhere"
        drawn = Drawn() if self._config.acceptance == "rejection" else None
        if isinstance(decoder, MedusaHeads):
            return MedusaDrafter(decoder, rows, partial(_draw, rows), drawn)
        dtype = getattr(torch, self._plan.plain_cache_dtype)
        chosen = {} if self._choice is None else self._choice.phases
        attention = self._attention(layout.blocks + 1, layout.block_size, dtype, chosen, decoder, None)
        captures = drawn is None and self._config.cuda_graphs and attention.captures and self._device.type == "cuda"
        size = layout.block_size
        if isinstance(decoder, DraftHead):
            graphs = HeadGraphs(HeadSteps(decoder, attention, rows, size), rows) if captures else None
            build, draw = partial(_build_batch, rows, size), partial(_draw, rows)
            return HeadDrafter(decoder, attention, rows, build, draw, graphs, drawn=drawn)
        most, model_graphs = layout.max_batch_tokens, None
        if captures:
            drafts = DraftGraphs(ModelSteps(decoder, attention, rows, size), rows)
            reads = 0 if attention.deterministic or not attention.reads_device_starts else most
            assert drafts.stream is not None, "of a GPU"
            of_drafts = drafts.pool, drafts.stream
            prompts = PromptGraphs(decoder, attention, rows, size, reads, *of_drafts, samples=False)
            model_graphs = ModelGraphs(drafts, prompts)
        return DeviceDraftModel(decoder, attention, rows, size, most, model_graphs, drawn)

    def _drafting_bytes(self, draft: Decoder | DraftHead | MedusaHeads) -> int:
        """What the steps of a draft model or head take beside those of the model."""
        rows = padded_rows(min(self._plan.max_batch_requests, MOST_ROWS))
        captured = self._config.cuda_graphs and not isinstance(draft, MedusaHeads)
        steps = sum(run.steps for run in draft_runs(rows)) if captured else 0
        drawn = MOST_ROWS if self._config.acceptance == "rejection" else 0
        size = self._dtype.itemsize
        taken = bytes_of_drafting(draft.spec, size, rows, steps, drawn)
        if captured and isinstance(draft, Decoder):
            reading = reading_steps(self._plan.max_batch_tokens, self._plan.max_model_len)
            taken += bytes_of_reading(draft.spec, size, [step.tokens for step in reading])
        if isinstance(draft, DraftHead) and draft.layer_inputs() is not None:
            taken += 2 * self._plan.max_batch_tokens * draft.head.state_size * size  # of two steps, kept and joined
        return taken

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
        """By those who are chosen for each phase, or through PyTorch if nobody is."""
        sinks = decoder.sinks
        if self._choice is None or not chosen:
            return TorchAttention(self._layers, blocks, block_size, dtype, self._device, eight_bit, sinks, groups)
        phases = Phases(**{phase: self._choice.libraries[name] for phase, name in chosen.items()})
        triton, deterministic = self._choice.triton, self._config.deterministic
        sizes = blocks, block_size, dtype, self._device
        return PagedAttention(self._layers, *sizes, phases, triton, deterministic, eight_bit, sinks, groups)

    def _run_largest_steps(self, contents: Contents) -> int:
        """Run the largest steps, over a cache of one block: PyTorch keeps their memory for the steps to come.

        Returns what CUDA graphs take besides.
        """
        device, longest, slots = self._device, self._plan.max_model_len, self._plan.max_batch_requests
        if device.type != "cuda":
            return 0
        tokens = min(self._plan.max_batch_tokens, longest * slots)
        length = min(longest - 1, tokens)
        requests = min(slots, -(-tokens // length))
        size = self._config.block_size
        rows = DeviceRows(slots, longest, -(-longest // size), device, scratch_block=0)
        dtype = getattr(torch, self._plan.cache_dtype)
        chosen = {} if self._choice is None else self._choice.phases
        attention = self._attention(1, size, dtype, chosen, contents.decoder, contents.eight_bit)
        decoder, grammars, processors = _decoder(contents), contents.grammars, contents.processors
        states = DeviceStateMemory(self._spec, 0, slots + 1, self._dtype, device) if self._spec.recurrent else None
        parts = decoder, attention, rows, size, grammars, processors
        runner = DeviceRunner(*parts, cuda_graphs=False, states=states)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(device)
        params = ResolvedParams(temperature=1.0, top_p=0.9, presence_penalty=0.1, logprobs=0)
        asked = RequestSpec("", PromptInput([0]), params, 1)
        joined = [NewRequest(slot, asked, asked.params, 0, [0], []) for slot in range(slots)]
        prompts = [ScheduledTokens(slot, 0, min(length, tokens - slot * length), 1) for slot in range(requests)]
        decodes = [ScheduledTokens(slot, 0, 1, 1) for slot in range(slots)]
        runner.execute(SchedulerOutput(0, joined=joined, scheduled=prompts)).result()
        torch.cuda.reset_peak_memory_stats(device)
        runner.execute(SchedulerOutput(1, scheduled=decodes)).result()
        if not (self._config.cuda_graphs and attention.captures):
            return 0
        adapts, stage = contents.adapters is not None and contents.adapters.bank.captures, contents.ranks.stage
        graphs = sum(1 for _ in captures(slots, attention.prefix_members > 0, adapts, stage.is_last))
        if stage.count > 1:
            return torch.cuda.max_memory_allocated(device) - before + graphs * GRAPH_BYTES
        if attention.reads_device_starts and not attention.deterministic:
            mixed = prompt_steps(slots, self._plan.max_batch_tokens, longest)
            graphs += len(mixed)
            if mixed:  # all graphs share the memory of the largest: a prompt beside decodes, as many tokens in all
                largest = max(mixed, key=sum)
                others = min(largest.decodes, slots - 1)
                prompt = ScheduledTokens(others, 0, min(sum(largest) - others, longest - 1), 1)
                runner.execute(SchedulerOutput(2, scheduled=[*decodes[:others], prompt])).result()
        if self._config.has_drafts and attention.reads_device_starts:
            drafted = list(verify_steps(slots, self._plan.max_batch_tokens, longest, adapts))
            graphs += len(drafted) if contents.ranks.dp_attention is None else 0  # these launch kernel by kernel
            if drafted:
                count = min(-(-max(step.tokens for step in drafted) // slots), longest - 1)
                verified = [ScheduledTokens(slot, 0, count, count) for slot in range(slots)]
                runner.execute(SchedulerOutput(3, scheduled=verified)).result()
        return torch.cuda.max_memory_allocated(device) - before + graphs * GRAPH_BYTES


def _decoder(contents: Contents) -> Decoder:
    assert isinstance(contents.decoder, Decoder), "models of transformers run on no GPU"
    return contents.decoder


def _build_batch(
    rows: DeviceRows, block_size: int, scheduled: Sequence[ScheduledTokens], starts: torch.Tensor
) -> DeviceBatch:
    return build_device_batch(rows, scheduled, block_size, starts)


def _draw(
    rows: DeviceRows, logits: torch.Tensor, slots: Sequence[int], index: torch.Tensor, positions: torch.Tensor
) -> None:
    write_sampled(rows.tokens, index, positions, sample(logits, None, index, positions, rows))
