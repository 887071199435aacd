"""Runs steps on a GPU without waiting for it: the host sends differences and reads tokens one step late.

differences --> rows on the device --> tokens, positions, slot mapping read on the device
                                         |
             choose   the first kind of graphs (`kernel_backend.STEP_KINDS`) that has one for the step, or none
             run      the graph, from embedding to sampled token and its log-probabilities; without a graph the model
                      kernel by kernel, decodes first, then runs of prompt tokens
             sample   where a graph did not: for grammars, beams, embeddings, custom code and rare filters
                                         |
sampled tokens <-- copied to the host after the step, which an event marks as done

A drafter goes on behind a step: with one pipeline stage its drafts stay on the device, and the next step tells what
they took. With several stages the step's result has them, since the first stage needs them from the host.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvern.device import marks
from kvern.device.device_batch import DeviceBatch, DeviceRows, build_device_batch
from kvern.device.input_batch import sampled_tokens
from kvern.drafting.device.drafter import Captures, ComputedStep, Drafter, GuardedDrafter
from kvern.drafting.verification import guessed_drafts, read_drafts, verify
from kvern.kernels import logprobs
from kvern.kernels.batch import write_sampled
from kvern.kernels.constraints import change
from kvern.kernels.sampling import sample as sample_tokens
from kvern.models.decoder import DeviceLanguageModel
from kvern.ranks.stages import Stage
from kvern.request.step import ScheduledTokens, SchedulerOutput, StepTooLarge
from kvern.runner.device_sampling import sample_plain
from kvern.runner.device_states import DeviceStateMemory
from kvern.runner.loaded_model import LoadedModel
from kvern.runner.needs import SamplingNeeds
from kvern.runner.prompt_graphs import PromptKind, size_of, size_of_next
from kvern.runner.result import Interval, PendingStep, Reported, embeddings
from kvern.runner.step_graphs import (
    IN_GRAPHS,
    DeviceModel,
    PlannedStep,
    StepGraphs,
    StepOutputs,
    StepSize,
    capture_one,
)
from kvern.runner.step_runner import CHOSEN_BY_FIRST, StepRunner
from kvern.runner.timed_graphs import DeviceClock
from kvern.sample.beams import DeviceCandidates, most_probable
from kvern.sample.dry import penalize_repetitions
from kvern.sample.logprobs import DeviceLogprobs
from kvern.sample.sampler import sample


def draft_behind(
    step: PendingStep, computed: ComputedStep, drafter: GuardedDrafter, rows: DeviceRows, stage: Stage
) -> Interval | None:
    """Have a drafter that is asked guess behind a step, without waiting for the device.

    Returns when the device did it, if that is for the next step to tell: a step's own result does where it has drafts.
    """
    begun = _now(rows.device)
    drafter.draft(computed)
    ended = _now(rows.device)
    interval = None if begun is None or ended is None else (begun, ended)
    guessed = guessed_drafts(rows, computed.scheduled) if stage.count > 1 else None
    if guessed is None:
        return interval
    step.add_drafts(guessed, interval)
    return None


def _now(device: torch.device) -> torch.cuda.Event | None:
    """When a GPU comes here with what it was asked for."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def reported(logits: torch.Tensor, tokens: torch.Tensor, most: int) -> DeviceLogprobs:
    """Log-probabilities as `token_logprobs` returns them."""
    found = logprobs.empty(len(tokens), logits.device)
    slots = torch.zeros(len(tokens), dtype=torch.int32, device=logits.device)
    wanted = torch.full((1,), most, dtype=torch.int64, device=logits.device)
    logprobs.logprobs(logits, slots, wanted, tokens, found)
    return DeviceLogprobs.of(found, len(tokens), min(most, logits.shape[-1]))


def listed(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The most probable tokens as `most_probable` returns them."""
    if count > logprobs.WIDTH:
        return most_probable(scores, count)
    found = reported(scores, torch.zeros(len(scores), dtype=torch.int64, device=scores.device), count)
    return found.best, found.best_ids


class DeviceRunner(StepRunner[DeviceLanguageModel, DeviceBatch, DeviceRows, DeviceStateMemory]):
    """Holds the model, its rows and its KV cache on a device; `execute` starts one step."""

    def __init__(
        self,
        model: DeviceModel,
        loaded: LoadedModel,
        drafter: Drafter | None = None,
        graphs: Sequence[StepGraphs[Any, Any]] = (),
        others: Sequence[Captures] = (),
    ) -> None:
        """`graphs`: those of the model's steps, in the order in which they are tried; `others`: done while idle."""
        super().__init__(model, loaded, drafter)
        self.graphs = graphs
        self._times = loaded.times if isinstance(loaded.times, DeviceClock) else None
        self._others = [*others] if self._times is None else [self._times, *others]
        self._is_measured = False
        self._drafted: Interval | None = None
        self._on_gpu = model.rows.device.type == "cuda"

    @property
    def graphs(self) -> Sequence[StepGraphs[Any, Any]]:
        """The graphs of the model's steps, in the order in which they are tried."""
        return self._graphs

    @graphs.setter
    def graphs(self, graphs: Sequence[StepGraphs[Any, Any]]) -> None:
        self._graphs = [each for each in graphs if each.kind.shapes]
        kinds = (each.kind for each in self._graphs)
        self._prompts = next((kind for kind in kinds if isinstance(kind, PromptKind)), None)

    @property
    def graph_tokens(self) -> int:
        return 0 if self._prompts is None else max(shape.prompts for shape in self._prompts.shapes)

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> PendingStep:
        """Start computing the scheduled tokens, and sampling where the scheduler says so. Raises StepTooLarge."""
        if output.changes_rows:
            self._change_rows(output)
        try:
            step, computed = self._start_measured(output)
        except torch.OutOfMemoryError as error:
            free = torch.cuda.mem_get_info(self._rows.device)[0] if self._on_gpu else 0
            torch.cuda.empty_cache()
            # Some layers' states have gone on already.
            raise StepTooLarge(f"({free / 2**20:.0f} MiB free)", final=self.model.states is not None) from error
        step.drafted, self._drafted = self._drafted, None
        if computed is not None:
            self._drafted = draft_behind(step, computed, self._drafter, self._rows, self._ranks.stage)
        return step

    @torch.inference_mode()
    def assist(self) -> None:
        """Take part in a step of other ranks: in a graph of rows that pad, or with experts alone."""
        size = self._size([])
        if size is None or self._replay(PlannedStep([], size)) is None:
            super().assist()

    def size(self, output: SchedulerOutput) -> tuple[int, int, bool] | None:
        """The size of a step as `Runner`; there is none where a drafter goes on, or with rows of embeddings."""
        if self._drafter.is_asked(output.scheduled) or self.model.embeddings is not None:
            return None
        adapters = self.model.adapters
        adapts = None if adapters is None else adapters.captures
        return size_of_next(self._prompts, output, self._rows, adapts=adapts)

    def _size(self, scheduled: Sequence[ScheduledTokens]) -> StepSize | None:
        """The size of a step whose rows have joined; in DP attention it is the size that all ranks agreed on."""
        if (dp_attention := self._ranks.dp_attention) is None:
            return size_of(self._prompts, scheduled, self._rows.request)
        return None if dp_attention.room is None else StepSize(*dp_attention.room)

    @torch.inference_mode()
    def idle(self) -> bool:
        """Capture one graph, or make what comes after graphs. Raises as `capture_one`."""
        graphs = [*self._graphs, *self._drafter.graphs, *self._others]
        return capture_one(graphs, is_alone=self._ranks.processes == 1)

    def abandon(self) -> None:
        super().abandon()
        for graphs in self._graphs:
            graphs.kind.forget_inputs(graphs.captured.values())

    def _start_measured(self, output: SchedulerOutput) -> tuple[PendingStep, ComputedStep | None]:
        """Start a step, with events between its parts if it is due."""
        if self._times is None or not self._times.is_due(output):
            started = self._start(output.scheduled)
            marks.begin(marks.OTHER)
            return started
        self._is_measured = True
        try:
            with self._times.of_device(output):
                return self._start(output.scheduled)
        finally:
            self._is_measured = False

    def _start(self, scheduled: Sequence[ScheduledTokens]) -> tuple[PendingStep, ComputedStep | None]:
        """Choose how to compute the step, compute and sample; what a drafter is told, if it is to go on."""
        needs, uncertain = 0, False
        for item in scheduled:
            uncertain |= item.uncertain
            if item.sampled:
                needs |= self._needs[item.slot]
        if uncertain and (needs & SamplingNeeds.PROCESSORS or not self.model.attention.reads_device_starts):
            scheduled = self._rows.certain(scheduled)
        drafting = self._drafter.is_asked(scheduled)
        step = PlannedStep(
            scheduled,
            self._size(scheduled),
            needs,
            self.model.is_adapted(scheduled),
            uncertain,
            drafting,
            drafting and self._drafter.reads_hidden,
            self._embeddings(scheduled),
        )
        drafts, outputs = None, self._replay(step)
        if outputs is None:
            if needs & SamplingNeeds.GRAMMAR and any(item.sampled > 1 for item in scheduled):
                drafts = read_drafts(self._rows, scheduled)  # before the model, which is not waited for
            outputs = self._compute(step)
        if outputs.sampled is not None:
            pending = self._sampled(step, outputs)
        elif outputs.hidden is not None:
            pending = self._sample(step, outputs, drafts)
        else:  # a GPU is waited for, or the steps of a long prompt would all be launched at once
            pending = PendingStep(scheduled, None, Reported(prompt_logprobs=outputs.prompts), on_gpu=self._on_gpu)
        if not drafting or not self._ranks.stage.is_last:
            return pending, None
        starts = outputs.starts
        if starts is None:
            starts = self._rows.starts(scheduled)
            self._rows.advance(scheduled, starts)
        return pending, ComputedStep(scheduled, starts, pending.kept, outputs.told, outputs.is_read)

    def _replay(self, step: PlannedStep) -> StepOutputs | None:
        """Start a step by a graph; None: there is none for it."""
        if any(item.spans for item in step.scheduled):
            return None
        for graphs in self._graphs:
            if step.embeddings is not None and not graphs.kind.takes_embeddings:
                continue
            timed = self._times if self._is_measured else None
            outputs = graphs.run(step) if timed is None else timed.run(graphs, step)
            if outputs is not None:
                return outputs
        return None

    def _compute(self, step: PlannedStep) -> StepOutputs:
        """Start a step kernel by kernel, up to the states that are sampled from."""
        scheduled, model = step.scheduled, self.model
        batch = build_device_batch(self._rows, scheduled, model.block_size)
        states = None if model.states is None else model.states.plan(batch)
        computed = self._compute_layers(batch, states, reported, step.embeddings)
        if computed is None:
            return StepOutputs()
        hidden, prompts, told = computed
        if not batch.sample_slots:
            if step.drafting:
                self._rows.advance(scheduled, batch.device_starts)
            return StepOutputs(starts=batch.device_starts, prompts=prompts, told=told)
        if len(batch.sample_slots) != len(hidden):
            hidden = hidden.index_select(0, batch.logits_indices)
        counted = step.uncertain or step.drafting or any(item.sampled > 1 for item in scheduled)
        return StepOutputs(
            hidden,
            batch.device_sample_slots,
            batch.sample_positions,
            starts=batch.device_starts if counted else None,
            prompts=prompts,
            told=told,
        )

    def _sampled(self, step: PlannedStep, outputs: StepOutputs) -> PendingStep:
        """The result of a step whose graph has sampled."""
        sampled = outputs.sampled
        assert sampled is not None
        if not step.needs & SamplingNeeds.LOGPROBS:
            return PendingStep(step.scheduled, sampled, kept=outputs.kept)
        assert outputs.reported is not None
        counts = [self._rows.request(item.slot).params.logprobs for item in step.scheduled for _ in range(item.sampled)]
        most = max(count for count in counts if count is not None)
        logprobs = DeviceLogprobs.of(outputs.reported, len(sampled), most)
        return PendingStep(step.scheduled, sampled, Reported(counts, logprobs), kept=outputs.kept)

    def _sample(self, step: PlannedStep, outputs: StepOutputs, drafts: Callable[[], list[int]] | None) -> PendingStep:
        """Sample and write what the rows go on with. `drafts`: see `read_drafts`, if grammars follow them."""
        scheduled = step.scheduled
        needs = step.needs
        rows = self._rows
        hidden = outputs.hidden
        index = outputs.slots
        positions = outputs.positions
        logits = outputs.logits
        assert hidden is not None and index is not None and positions is not None
        drawn = None if self._drafter.drawn is None else self._drafter.drawn.of(scheduled)
        if not needs and drawn is None and logits is None:
            _, chosen = sample_plain(self._decoder, hidden, index, positions, rows)
            kept = self._write(step, outputs, chosen)
            return PendingStep(scheduled, chosen, Reported(prompt_logprobs=outputs.prompts), kept=kept)
        slots = sampled_tokens(scheduled).slots
        logits = self._decoder.logits(hidden, upcast=False) if logits is None else logits
        marks.begin(marks.SAMPLING)
        scores = self._scores(logits, step, outputs, everything=drawn is not None)
        verdict = None
        if needs & SamplingNeeds.PROCESSORS and self._processors is not None:
            verdict = self._processors.apply(scores, rows.tokens, slots, sampled_tokens(scheduled).positions)
        broken, unknown = dict[int, str](), list[int]()
        grammars = self._grammars if needs & SamplingNeeds.GRAMMAR else None
        if grammars is not None:
            broken, unknown = grammars.restrict(scores, slots, None, drafts)
        chosen = self._choose(logits, scores, slots, outputs, needs)
        if drawn is not None:
            drawn.accept(chosen, scores, rows, slots, positions)
        if needs & CHOSEN_BY_FIRST:
            chosen, unknown = self._chosen_by_first(chosen, unknown)
        counts: list[int | None] = []
        logprobs = None
        if needs & SamplingNeeds.LOGPROBS:
            counts = [rows.request(slot).params.logprobs for slot in slots]
            logprobs = reported(logits, chosen, max(count for count in counts if count is not None))
        states = embeddings(rows, slots, hidden) if needs & SamplingNeeds.EMBEDDING else None
        candidates = DeviceCandidates(scores, logits, rows, slots, listed) if needs & SamplingNeeds.BEAMS else None
        # Rows change after all that takes much memory: a step that runs out of it is run again.
        kept = self._write(step, outputs, chosen, unknown)
        found = Reported(counts, logprobs, outputs.prompts, states, broken, candidates, verdict)
        pending = PendingStep(scheduled, chosen, found, kept=kept)
        if grammars is not None:
            grammars.expect(rows.sampled_slots(scheduled), pending)
        return pending

    def _write(
        self, step: PlannedStep, outputs: StepOutputs, chosen: Tensor, unknown: Sequence[int] = ()
    ) -> Tensor | None:
        """Let rows go on with the tokens `chosen` [S]; returns how many of them each keeps, [R] int64; None: all."""
        index = outputs.slots
        positions = outputs.positions
        kept = None
        assert index is not None and positions is not None
        if outputs.starts is not None:
            kept = verify(self._rows, step.scheduled, outputs.starts, index, positions, chosen, unknown)
            if kept is not None and self.model.states is not None:
                self.model.states.accept(kept)
        write_sampled(self._rows.tokens, index, positions, chosen)
        return kept

    def _scores(self, logits: Tensor, step: PlannedStep, outputs: StepOutputs, *, everything: bool) -> Tensor:
        """The logits [S, vocabulary] as requests change them, float32, of rows that ask for it, or of `everything`.

        The logits themselves, if nobody asks.
        """
        rows = self._rows
        needs = step.needs
        scheduled = step.scheduled
        if not _computes(needs):
            return logits
        assert outputs.slots is not None and outputs.positions is not None
        everything = everything or bool(needs & ~IN_GRAPHS)
        scores = change(logits, outputs.slots, outputs.positions, rows, everything=everything)
        if needs & SamplingNeeds.REPETITIONS:
            sampled = sampled_tokens(scheduled)
            repeating = [
                place for place, slot in enumerate(sampled.slots) if self._needs[slot] & SamplingNeeds.REPETITIONS
            ]
            exact = outputs.positions if outputs.starts is not None else None  # else the host knows them
            penalize_repetitions(scores, rows, repeating, sampled.slots, sampled.positions, exact)
        return scores

    def _choose(self, logits: Tensor, scores: Tensor, slots: Sequence[int], outputs: StepOutputs, needs: int) -> Tensor:
        """One token [S] int64 for each row."""
        index, positions = outputs.slots, outputs.positions
        assert index is not None and positions is not None
        if needs & SamplingNeeds.RARE_FILTERS:
            return sample(scores, self._rows, slots, positions)
        if needs & ~IN_GRAPHS:
            logits = scores
        return sample_tokens(logits, scores if _computes(needs) else None, index, positions, self._rows)


def _computes(needs: int) -> bool:
    """Returns whether more is asked for than a temperature and a mask, which the logits take as they are."""
    return bool(needs & ~(SamplingNeeds.EMBEDDING | SamplingNeeds.GRAMMAR | SamplingNeeds.BEAMS))
