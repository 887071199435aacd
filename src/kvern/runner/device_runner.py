"""Runs steps on a GPU without waiting for it: the host sends differences and reads tokens one step late.

differences --> rows on the device --> tokens, positions, slot mapping read on the device
                                         |
             a step of decodes alone: one CUDA graph, from embedding to sampled token and its log-probabilities; behind
             it sampling again, where more is asked for (grammars, beams, embeddings, custom code, rare filters)
             a step that verifies drafts: a graph as well, to the tokens that are kept
             small steps with prompts: graphs as well, up to the tokens sampled with a temperature alone
             any other step, and on stages all but decodes alone: eager, decodes first, then runs of prompt tokens
                                         |
sampled tokens <-- copied to the host behind the step, which an event marks as done
"""

from collections.abc import Callable, Sequence

import torch

from kvern.attention.base import AttentionBackend
from kvern.cache.windows import WindowMessage
from kvern.device.device_batch import DeviceBatch, DeviceRows, build_device_batch
from kvern.device.input_batch import sampled_tokens
from kvern.drafting.device.drafted_steps import draft_behind
from kvern.drafting.device.drafter import Captures, ComputedStep, Drafter, GuardedDrafter
from kvern.drafting.rejection import accept
from kvern.drafting.verification import read_drafts
from kvern.kernels.constraints import change
from kvern.kernels.sampling import sample as sample_tokens
from kvern.layers.step_context import NO_ADAPTERS
from kvern.models.decoder import Decoder
from kvern.request.step import ScheduledTokens, SchedulerOutput
from kvern.runner.adapters import Adapters
from kvern.runner.cuda_graph import DecodedStates, DecodeGraphs
from kvern.runner.device_logprobs import listed, reported
from kvern.runner.device_sampling import sample_plain, write_chosen
from kvern.runner.device_states import DeviceStateMemory
from kvern.runner.graph_captures import give_up
from kvern.runner.needs import Needs, RowNeeds
from kvern.runner.processor_rows import ProcessorRows
from kvern.runner.prompt_graphs import PromptGraphs, PromptStep, room_of, room_of_step
from kvern.runner.ranks.rank_choice import CHOSEN_BY_FIRST, change_choices, chosen_by_first
from kvern.runner.result import (
    Interval,
    PendingStep,
    PromptLogprobs,
    embeddings,
    prompt_logprobs,
    prompt_runs,
    tokens_wanted,
)
from kvern.runner.step_parts import StepTooLarge
from kvern.runner.verify_graphs import VerifyGraphs
from kvern.sample.beams import DeviceCandidates
from kvern.sample.dry import penalize_repetitions
from kvern.sample.sampler import sample
from kvern.structured.masks import GrammarRows, Restricted

IN_KERNELS = Needs.FILTERS | Needs.CONSTRAINTS | Needs.LOGPROBS
"""What is done to each row as it asks, inside the graph."""


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
        max_batch_tokens: int = 0,
        states: DeviceStateMemory | None = None,
        drafter: Drafter | None = None,
        drafts: bool = False,
    ) -> None:
        """Steps with prompts, of at most `max_batch_tokens`, are captured up to that many; with `drafts` such steps."""
        self._decoder, self._ranks = decoder, decoder.build.ranks
        self._attention = attention
        self.caches = attention.caches
        self._rows, self._block_size = rows, block_size
        self._grammars, self._processors = grammars, processors
        self._adapters, self._states = adapters, states
        self._needs = RowNeeds(rows.scratch)
        self._drafter = GuardedDrafter(drafter, ranks=decoder.build.ranks)
        self._drafted: Interval | None = None
        self._graphs, self._prompt_graphs, self._verify_graphs = None, None, None
        self._on_gpu = rows.device.type == "cuda"
        if cuda_graphs and attention.captures and self._on_gpu:
            members = attention.prefix_members if shared_prefix_attention else 0
            bank = None if adapters is None else adapters.bank
            self._graphs = DecodeGraphs(decoder, attention, rows, block_size, members, bank, states)
            sizes = block_size, max_batch_tokens, self._graphs.pool, self._graphs.stream
            one_stage = self._ranks.stage.count == 1  # rows between stages are received for decodes alone
            if attention.reads_device_starts and not attention.deterministic and one_stage:
                self._prompt_graphs = PromptGraphs(decoder, attention, rows, *sizes, states)
            reader = self._drafter.reader
            drafts = drafts and self._drafter.drawn is None and (reader is not None or self._drafter.inputs is None)
            if drafts and attention.reads_device_starts and one_stage and self._ranks.dp_attention is None:
                self._verify_graphs = VerifyGraphs(decoder, attention, rows, *sizes, bank, states, reader)

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> PendingStep:
        """Start computing the scheduled tokens, and sampling where the scheduler says so. Raises StepTooLarge."""
        if self._adapters is not None:
            self._adapters.load(output.adapters)
        self._attention.copy_blocks(output.copies)
        if self._states is not None:
            self._states.prepare(output)
        self._rows.fork(output.forked)
        self._rows.join(output.joined)
        change_choices(self._ranks, output, self._rows, self._grammars, self._processors, self._needs)
        if self._ranks.stage.is_first:
            self._rows.draft(output.known)
        self._rows.grow(output.grown)
        windows = output.message(WindowMessage)
        self._rows.grow_windows([] if windows is None else windows.grown)
        self._rows.draft(output.drafts)
        self._drafter.prepare(output)
        try:
            step, computed = self._start(output.scheduled)
        except torch.OutOfMemoryError as error:
            free = torch.cuda.mem_get_info(self._rows.device)[0] if self._on_gpu else 0
            torch.cuda.empty_cache()
            # Some layers' states have gone on already.
            raise StepTooLarge(f"({free / 2**20:.0f} MiB free)", final=self._states is not None) from error
        step.drafted, self._drafted = self._drafted, None
        if computed is not None and self._drafter.is_asked(computed.scheduled):
            self._drafted = draft_behind(step, computed, self._drafter, self._rows, self._ranks.stage)
        return step

    @torch.inference_mode()
    def assist(self) -> None:
        """Take part in a step of other ranks: in a graph of rows that pad, or with experts alone."""
        room, graphs, prompt_graphs = self._room_of_all([]), self._graphs, self._prompt_graphs
        if room is not None and room.is_plain and graphs is not None and graphs.can_run(room.decodes, adapted=False):
            graphs.run([], [], options=False, size=room.decodes)
        elif prompt_graphs is None or room is None or room.is_plain or prompt_graphs.run([], room) is None:
            self._decoder.assist()

    def room(self, output: SchedulerOutput) -> tuple[int, int, bool] | None:
        """As a `Runner` says: behind a step in graphs of all ranks no drafter guesses."""
        if self._drafter.is_asked(output.scheduled):
            return None
        adapts = None if self._adapters is None else self._adapters.bank.captures
        return room_of_step(self._prompt_graphs, output, self._rows, adapts=adapts)

    def _room_of_all(self, scheduled: Sequence[ScheduledTokens]) -> PromptStep | None:
        """What a graph needs room for, of rows that have joined; of ranks in DP attention, what they agreed on."""
        if (dp_attention := self._ranks.dp_attention) is None:
            return room_of(self._prompt_graphs, scheduled, self._rows.request)
        return None if dp_attention.room is None else PromptStep(*dp_attention.room)

    @torch.inference_mode()
    def idle(self) -> bool:
        """Capture one graph; whether there are more. Plain decodes come first, then drafts, then prompts.

        Where there is no memory for it, steps run without. Raises what `give_up` does.
        """
        decodes = self._graphs
        if decodes is None:
            return False
        all_kinds: tuple[Captures | None, ...] = self._verify_graphs, self._drafter.graphs, self._prompt_graphs, decodes
        kinds = [kind for kind in all_kinds if kind is not None]
        plain = bool(decodes.missing) and not any(decodes.missing[0][1:])
        graphs: Captures | None = decodes if plain else next((kind for kind in kinds if kind.missing), None)
        if graphs is None:
            return False
        try:
            graphs.capture_next()
        except RuntimeError as error:
            give_up(graphs.missing, error, is_alone=self._ranks.processes == 1)
        return any(kind.missing for kind in kinds)

    def abandon(self) -> None:
        """Wait for the device and forget the steps on their way. Raises if the device is broken."""
        self._grammars.abandon()
        if self._graphs is not None:
            self._graphs.forget_inputs()
        if self._on_gpu:
            torch.cuda.synchronize(self._rows.device)

    def _start(self, scheduled: Sequence[ScheduledTokens]) -> tuple[PendingStep, ComputedStep | None]:
        """Compute and sample; what a drafter is told, if it is to guess what follows."""
        wanted = 0
        uncertain = any(item.uncertain for item in scheduled)
        for item in scheduled:
            if item.sampled:
                wanted |= self._needs[item.slot]
        if uncertain and (wanted & Needs.PROCESSORS or not self._attention.reads_device_starts):
            scheduled = self._rows.certain(scheduled)
        drafts = None
        if wanted & Needs.GRAMMAR and any(item.sampled > 1 for item in scheduled):
            drafts = read_drafts(self._rows, scheduled)  # before the model, which is not waited for
        slots = [item.slot for item in scheduled]
        adapted = self._adapters is not None and max(self._adapters.indices(self._rows, slots)) >= 0
        drafting = self._drafter.is_asked(scheduled)
        decodes = (room := self._room_of_all(scheduled)) is not None and room.is_plain
        if room is not None and decodes and not drafting:
            if self._graphs is not None and self._graphs.can_run(room.decodes, adapted):
                return self._replay_decodes(self._graphs, scheduled, wanted, adapted, uncertain, room.decodes), None
        elif (verified := self._replay_drafts(scheduled, wanted, adapted)) is not None:
            return verified
        is_read = drafting and self._drafter.reads_hidden
        if self._prompt_graphs is not None and not (decodes or adapted or uncertain or is_read):
            step = self._replay_prompts(self._prompt_graphs, scheduled, wanted, room)
            if step is not None:
                return step, self._behind_prompts(scheduled) if drafting else None
        batch = build_device_batch(self._rows, scheduled, self._block_size)
        is_last = self._ranks.stage.is_last
        runs = prompt_runs(self._rows, batch) if is_last else []
        positions = None if self._drafter.reads_hidden or not self._ranks.drops_rows else tokens_wanted(batch, runs)
        adapters = NO_ADAPTERS
        if self._adapters is not None:
            adapters = self._adapters.select(self._rows, batch, positions is not None)
        states = None if self._states is None else self._states.plan(batch)
        attend = self._attention.plan(batch)
        inputs = self._drafter.inputs
        hidden = self._decoder(batch.token_ids, batch.positions, attend, positions, adapters, states, inputs)
        if not is_last:
            if self._states is not None:
                self._states.defer()
            return PendingStep(scheduled, None, on_gpu=self._on_gpu), None
        prompts = prompt_logprobs(self._decoder, batch, runs, hidden, reported)
        if not batch.sample_slots:
            # A GPU is waited for, or a long prompt's steps would all be launched at once.
            step = PendingStep(scheduled, None, prompt_logprobs=prompts, on_gpu=self._on_gpu)
            if drafting:
                self._rows.advance(scheduled, batch.device_starts)
        else:
            sampled = len(batch.sample_slots) == hidden.shape[0]
            last = hidden if sampled else hidden.index_select(0, batch.logits_indices)
            decoded = DecodedStates(last, batch.device_sample_slots, batch.sample_positions)
            counted = uncertain or drafting or any(item.sampled > 1 for item in scheduled)
            exact = batch.device_starts if counted else None
            step = self._sample(scheduled, batch.sample_slots, decoded, wanted, prompts, exact, drafts)
        if not drafting:
            return step, None
        told = hidden if inputs is None else inputs.rows()
        return step, ComputedStep(scheduled, batch.device_starts, step.kept, None if positions is not None else told)

    def _replay_decodes(
        self,
        graphs: DecodeGraphs,
        scheduled: Sequence[ScheduledTokens],
        wanted: int,
        adapted: bool,
        uncertain: bool,
        size: int,
    ) -> PendingStep:
        """A step of plain decodes, for which there is a graph of `size` rows or more."""
        slots = [item.slot for item in scheduled]
        starts = [item.start for item in scheduled]
        if not self._ranks.stage.is_last:
            graphs.hand_on(slots, starts, adapted)
            return PendingStep(scheduled, None, on_gpu=self._on_gpu)
        exact = self._rows.starts(scheduled) if uncertain else None
        if not wanted & ~IN_KERNELS and graphs.can_run(size, adapted, bool(wanted)):
            sampled = graphs.run(slots, starts, bool(wanted), adapted, exact, size)
            if exact is not None:
                self._rows.advance(scheduled, exact)
            if not wanted & Needs.LOGPROBS:
                return PendingStep(scheduled, sampled)
            counts = [self._rows.request(slot).params.logprobs for slot in slots]
            most = max(count for count in counts if count is not None)
            return PendingStep(scheduled, sampled, counts, graphs.logprobs(len(slots), most))
        decoded = graphs.run_to_states(slots, starts, adapted, exact, size)
        return self._sample(scheduled, slots, decoded, wanted, None, exact)

    def _replay_drafts(
        self, scheduled: Sequence[ScheduledTokens], needs: int, adapted: bool
    ) -> tuple[PendingStep, ComputedStep] | None:
        """A step that verifies drafts, if there is a graph for it."""
        if (graphs := self._verify_graphs) is None or needs & ~IN_KERNELS:
            return None
        if (verified := graphs.run(scheduled, bool(needs), adapted)) is None:
            return None
        sampled, kept = verified.sampled, verified.kept
        computed = ComputedStep(scheduled, verified.starts, kept, verified.hidden, graphs.reader is not None)
        if not needs & Needs.LOGPROBS:
            return PendingStep(scheduled, sampled, kept=kept), computed
        counts = [self._rows.request(item.slot).params.logprobs for item in scheduled for _ in range(item.sampled)]
        found = graphs.logprobs(len(sampled), max(count for count in counts if count is not None))
        return PendingStep(scheduled, sampled, counts, found, kept=kept), computed

    def _replay_prompts(
        self, graphs: PromptGraphs, scheduled: Sequence[ScheduledTokens], needs: int, room: PromptStep | None
    ) -> PendingStep | None:
        """A small step with prompts, if there is a graph with this room."""
        if (replayed := graphs.run(scheduled, room)) is None:
            return None
        graph, count = replayed
        outputs = graph.outputs
        if not count:
            return PendingStep(scheduled, None, on_gpu=self._on_gpu)
        assert outputs is not None, "a model's graphs sample"
        if not needs:
            return PendingStep(scheduled, outputs.sampled[:count])
        logits = self._decoder.whole_logits(outputs.logits[:count])
        decoded = DecodedStates(outputs.hidden[:count], graph.slots[:count], outputs.positions[:count], logits)
        return self._sample(scheduled, sampled_tokens(scheduled).slots, decoded, needs, None, None)

    def _behind_prompts(self, scheduled: Sequence[ScheduledTokens]) -> ComputedStep:
        """What a drafter is told of a step that was replayed, and that began where the host said."""
        starts = self._rows.starts(scheduled)
        self._rows.advance(scheduled, starts)
        return ComputedStep(scheduled, starts, None, None)

    def _sample(
        self,
        scheduled: Sequence[ScheduledTokens],
        slots: Sequence[int],
        decoded: DecodedStates,
        needs: int,
        prompts: PromptLogprobs | None,
        starts: torch.Tensor | None,
        drafts: Callable[[], list[int]] | None = None,
    ) -> PendingStep:
        """Sample and write what `slots` [S] go on with.

        `starts` [R] int32: of a step with drafts, or behind them. `drafts`: see `read_drafts`, if grammars follow them.
        """
        rows = self._rows
        drawn = None if self._drafter.drawn is None else self._drafter.drawn.of(scheduled)
        if not needs and drawn is None and decoded.logits is None:
            _, chosen = sample_plain(self._decoder, decoded.hidden, decoded.slots, decoded.positions, rows)
            kept = write_chosen(rows, scheduled, decoded.slots, decoded.positions, chosen, starts, self._states)
            return PendingStep(scheduled, chosen, prompt_logprobs=prompts, kept=kept)
        logits = self._decoder.logits(decoded.hidden, upcast=False) if decoded.logits is None else decoded.logits
        scores = self._scores(logits, scheduled, slots, decoded, needs, starts is not None, drawn is not None)
        verdict = None
        if needs & Needs.PROCESSORS:
            verdict = self._processors.apply(scores, rows.tokens, slots, sampled_tokens(scheduled).positions)
        broken, unknown = Restricted({}, [])
        if needs & Needs.GRAMMAR:
            broken, unknown = self._grammars.restrict(scores, slots, None, drafts)
        chosen = self._choose(logits, scores, slots, decoded, needs)
        if drawn is not None:
            accept(chosen, scores, rows, slots, decoded.positions, drawn)
        if needs & CHOSEN_BY_FIRST:
            chosen, unknown = chosen_by_first(self._ranks, chosen, unknown)
        counts: list[int | None] = []
        logprobs = None
        if needs & Needs.LOGPROBS:
            counts = [rows.request(slot).params.logprobs for slot in slots]
            logprobs = reported(logits, chosen, max(count for count in counts if count is not None))
        states = embeddings(rows, slots, decoded.hidden) if needs & Needs.EMBEDDING else None
        candidates = DeviceCandidates(scores, logits, rows, slots, listed) if needs & Needs.BEAMS else None
        # Rows change behind all that takes much memory: a step that runs out of it is run again.
        kept = write_chosen(rows, scheduled, decoded.slots, decoded.positions, chosen, starts, self._states, unknown)
        step = PendingStep(scheduled, chosen, counts, logprobs, prompts, states, broken, candidates, verdict, kept)
        if needs & Needs.GRAMMAR:
            self._grammars.expect(rows.sampled_slots(scheduled), step)
        return step

    def _scores(
        self,
        logits: torch.Tensor,
        scheduled: Sequence[ScheduledTokens],
        slots: Sequence[int],
        decoded: DecodedStates,
        needs: int,
        counted: bool,
        everything: bool,
    ) -> torch.Tensor:
        """What is made of the logits [S, vocabulary], float32, of those rows that ask for it, or of all; or themselves.

        `counted`: positions are exact on the device alone. `everything`: of all rows.
        """
        rows = self._rows
        if not _computes(needs):
            return logits
        everything = everything or bool(needs & ~IN_KERNELS)
        scores = change(logits, decoded.slots, decoded.positions, rows, everything=everything)
        if needs & Needs.REPETITIONS:
            repeating = [place for place, slot in enumerate(slots) if self._needs[slot] & Needs.REPETITIONS]
            exact = decoded.positions if counted else None
            penalize_repetitions(scores, rows, repeating, slots, sampled_tokens(scheduled).positions, exact)
        return scores

    def _choose(
        self,
        logits: torch.Tensor,
        scores: torch.Tensor,
        slots: Sequence[int],
        decoded: DecodedStates,
        needs: int,
    ) -> torch.Tensor:
        """One token [S] int64 for each row."""
        if needs & Needs.RARE_FILTERS:
            return sample(scores, self._rows, slots, decoded.positions)
        if needs & ~IN_KERNELS:
            logits = scores
        return sample_tokens(logits, scores if _computes(needs) else None, decoded.slots, decoded.positions, self._rows)


def _computes(needs: int) -> bool:
    """Whether more is asked for than a temperature and a mask, which the logits take as they are."""
    return bool(needs & ~(Needs.EMBEDDING | Needs.GRAMMAR | Needs.BEAMS))
