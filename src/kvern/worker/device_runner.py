"""Runs steps on a GPU without waiting for it: the host sends differences and reads tokens one step late.

differences --> rows on the device --> tokens, positions, slot mapping read on the device
                                         |
             a step of decodes alone: one CUDA graph, from embedding to sampled token; or to the hidden states, where
             more than filters and a draw is asked for (log-probabilities, penalties, grammars, beams, ...)
             any other step: eager, decodes first, then runs of prompt tokens
                                         |
sampled tokens <-- copied to the host behind the step, which an event marks as done
"""

import enum
from collections.abc import Sequence

import torch

from kvern.attention.base import AttentionBackend
from kvern.device.device_batch import DeviceBatch, DeviceRows, build_device_batch
from kvern.device.input_batch import sampled_tokens
from kvern.kernels.batch import write_sampled
from kvern.kernels.sampling import sample as sample_tokens
from kvern.layers.attention import NO_ADAPTERS
from kvern.models.decoder import Decoder
from kvern.sample.beams import DeviceCandidates
from kvern.sample.constraints import changes_logits, constrain
from kvern.sample.drafts import verify
from kvern.sample.logprobs import token_logprobs
from kvern.sample.sampler import GREEDY_BELOW, needs_sorting, sample
from kvern.step import NewRequest, ScheduledTokens, SchedulerOutput
from kvern.structured.masks import GrammarRows
from kvern.worker.adapters import Adapters
from kvern.worker.cuda_graph import DecodedStates, DecodeGraphs
from kvern.worker.processor_rows import ProcessorRows
from kvern.worker.result import PendingStep, PromptLogprobs, embeddings, prompt_logprobs, prompt_runs, tokens_wanted
from kvern.worker.step_parts import StepTooLarge


class Needs(enum.IntFlag):
    """What a request asks of sampling beyond the temperature."""

    NOTHING = 0
    FILTERS = 1
    """top_k, top_p or min_p."""
    CONSTRAINTS = 2
    """Penalties, biases and bans: they change the logits."""
    LOGPROBS = 4
    SORTING = 8
    """typical_p and rare filters look at all probabilities; PyTorch does that."""
    EMBEDDING = 16
    """The hidden state is wanted beside the token."""
    GRAMMAR = 32
    """The host says which tokens may follow, when it knows the last one."""
    BEAMS = 64
    """The most probable tokens are wanted, not one; the host chooses."""
    PROCESSORS = 128
    """Custom code changes the logits."""


CHANGED_LOGITS = Needs.CONSTRAINTS | Needs.PROCESSORS | Needs.GRAMMAR


def needs_of(request: NewRequest) -> Needs:
    """What sampling for this request takes."""
    params = request.params
    needs = Needs.NOTHING
    if changes_logits(request):
        needs |= Needs.CONSTRAINTS
    if params.logprobs is not None:
        needs |= Needs.LOGPROBS
    if request.spec.grammar is not None:
        needs |= Needs.GRAMMAR
    if params.logits_processors:
        needs |= Needs.PROCESSORS
    if request.spec.embed:
        needs |= Needs.EMBEDDING
    if params.beam_width is not None:
        needs |= Needs.BEAMS
    if params.temperature >= GREEDY_BELOW:
        if needs_sorting(params):
            needs |= Needs.SORTING
        if params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0:
            needs |= Needs.FILTERS
    return needs


class DeviceRunner:
    """Holds the model, its rows and its KV cache on a device; `execute` starts one step."""

    def __init__(
        self,
        decoder: Decoder,
        attention: AttentionBackend[DeviceBatch],
        rows: DeviceRows,
        block_size: int,
        grammars: GrammarRows,
        processors: ProcessorRows,
        cuda_graphs: bool = True,
        shared_prefix_attention: bool = True,
        adapters: Adapters | None = None,
    ) -> None:
        self._decoder = decoder
        self._attention = attention
        self.caches = attention.caches
        self._rows = rows
        self._block_size = block_size
        self._grammars = grammars
        self._processors = processors
        self._adapters = adapters
        self._needs = [0] * rows.scratch
        self._graphs = None
        if cuda_graphs and attention.captures and rows.device.type == "cuda":
            members = attention.prefix_members if shared_prefix_attention else 0
            bank = None if adapters is None else adapters.bank
            self._graphs = DecodeGraphs(decoder, attention, rows, block_size, members, bank)

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> PendingStep:
        """Start computing the scheduled tokens, and sampling where the scheduler says so. Raises StepTooLarge."""
        if self._adapters is not None:
            self._adapters.load(output.adapters)
        self._attention.copy_blocks(output.copies)
        self._rows.fork(output.forked)
        self._grammars.fork(output.forked)
        self._processors.fork(output.forked, self._rows)
        forked = [(fork.slot, self._needs[fork.source]) for fork in output.forked]
        for slot, needs in forked:
            self._needs[slot] = needs
        self._rows.join(output.joined)
        self._grammars.join(output.joined)
        self._processors.join(output.joined)
        self._rows.grow(output.grown)
        self._rows.draft(output.drafts)
        for request in output.joined:
            self._needs[request.slot] = int(needs_of(request))
        try:
            return self._start(output.scheduled)
        except torch.OutOfMemoryError as error:
            device = self._rows.device
            free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
            torch.cuda.empty_cache()
            raise StepTooLarge(f"({free / 2**20:.0f} MiB free)") from error

    def abandon(self) -> None:
        """Wait for the device and forget the steps on their way. Raises if the device is broken."""
        self._grammars.abandon()
        if self._graphs is not None:
            self._graphs.forget_inputs()
        if self._rows.device.type == "cuda":
            torch.cuda.synchronize(self._rows.device)

    def _start(self, scheduled: Sequence[ScheduledTokens]) -> PendingStep:
        needs = 0
        decodes, uncertain = True, False
        for item in scheduled:
            needs |= self._needs[item.slot]
            decodes = decodes and item.count == item.sampled == 1
            uncertain = uncertain or item.uncertain
        if uncertain and not self._attention.reads_device_starts:
            scheduled = self._rows.certain(scheduled)
        wanted = Needs(needs)
        slots = [item.slot for item in scheduled]
        adapted = self._adapters is not None and max(self._adapters.indices(self._rows, slots)) >= 0
        if decodes and self._graphs is not None and (not adapted or self._graphs.captures_adapters):
            starts = [item.start for item in scheduled]
            exact = self._rows.starts(scheduled) if uncertain else None
            if not wanted & ~Needs.FILTERS:
                sampled = self._graphs.run(slots, starts, bool(wanted & Needs.FILTERS), adapted, exact)
                if exact is not None:
                    self._rows.advance(scheduled, exact)
                return PendingStep(scheduled, sampled)
            decoded = self._graphs.run_to_states(slots, starts, adapted, exact)
            return self._sample(scheduled, slots, decoded, wanted, None, exact)
        batch = build_device_batch(self._rows, scheduled, self._block_size)
        runs = prompt_runs(self._rows, batch)
        states = tokens_wanted(batch, runs)
        adapters = NO_ADAPTERS
        if self._adapters is not None:
            adapters = self._adapters.select(self._rows, batch, states is not None)
        hidden = self._decoder(batch.token_ids, batch.positions, self._attention.plan(batch), states, adapters)
        prompts = prompt_logprobs(self._decoder, batch, runs, hidden)
        if not batch.sample_slots:
            return PendingStep(scheduled, None, prompt_logprobs=prompts)
        if len(batch.sample_slots) != hidden.shape[0]:
            hidden = hidden.index_select(0, batch.logits_indices)
        decoded = DecodedStates(hidden, batch.device_sample_slots, batch.sample_positions, None)
        counted = uncertain or any(item.sampled > 1 for item in scheduled)
        exact = batch.device_starts if counted else None
        return self._sample(scheduled, batch.sample_slots, decoded, wanted, prompts, exact)

    def _sample(
        self,
        scheduled: Sequence[ScheduledTokens],
        slots: Sequence[int],
        decoded: DecodedStates,
        needs: Needs,
        prompts: PromptLogprobs | None,
        starts: torch.Tensor | None,
    ) -> PendingStep:
        """Sample and write what `slots` [S] go on with. `starts` [R] int32: of a step with drafts, or behind them."""
        rows = self._rows
        computing = needs & ~(Needs.FILTERS | Needs.EMBEDDING | Needs.GRAMMAR)
        logits = self._decoder.logits(decoded.hidden, upcast=bool(computing))
        counts: list[int | None] = []
        original = logits
        if needs & Needs.LOGPROBS:
            counts = [rows.request(slot).params.logprobs for slot in slots]
            original = logits.clone() if needs & CHANGED_LOGITS else logits
        positions = sampled_tokens(scheduled).positions if needs & (Needs.CONSTRAINTS | Needs.PROCESSORS) else []
        if needs & Needs.CONSTRAINTS:
            constrain(logits, rows, slots, positions, None if starts is None else decoded.positions)
        verdict = self._processors.apply(logits, rows.tokens, slots, positions) if needs & Needs.PROCESSORS else None
        broken: dict[int, str] = {}
        if needs & Needs.GRAMMAR:
            broken = self._grammars.restrict(logits, slots)
        chosen = self._choose(logits, slots, decoded, needs)
        logprobs = None
        if needs & Needs.LOGPROBS:
            most = max(count for count in counts if count is not None)
            logprobs = token_logprobs(original, chosen, most)
        states = embeddings(rows, slots, decoded.hidden) if needs & Needs.EMBEDDING else None
        candidates = DeviceCandidates(logits, original, rows, slots) if needs & Needs.BEAMS else None
        kept = None  # rows change behind all that takes much memory: a step that runs out of it is run again
        if starts is not None:
            kept = verify(rows, scheduled, starts, decoded.slots, decoded.positions, chosen)
        write_sampled(rows.tokens, decoded.slots, decoded.positions, chosen, decoded.starts)
        step = PendingStep(scheduled, chosen, counts, logprobs, prompts, states, broken, candidates, verdict, kept)
        if needs & Needs.GRAMMAR:
            self._grammars.expect(rows.sampled_slots(scheduled), step)
        return step

    def _choose(self, logits: torch.Tensor, slots: Sequence[int], decoded: DecodedStates, needs: Needs) -> torch.Tensor:
        """One token [S] int64 for each row of logits [S, vocabulary]."""
        rows = self._rows
        if needs & Needs.SORTING:
            return sample(logits, rows, slots, decoded.positions)
        return sample_tokens(
            logits,
            decoded.slots,
            decoded.positions,
            rows.temperature,
            rows.top_k,
            rows.top_p,
            rows.min_p,
            rows.seeds,
            filtered=bool(needs & Needs.FILTERS),
        )
