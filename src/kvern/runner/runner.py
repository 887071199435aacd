"""Runs one step through PyTorch: rows, input batch, model, logits, sampler. For CPUs, and GPUs without Triton."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from kvern.device import marks
from kvern.device.input_batch import InputBatch, build_input_batch
from kvern.device.rows import BatchRows
from kvern.drafting.device.drafter import ComputedStep, Drafter
from kvern.drafting.verification import guessed_drafts, kept_of, verify
from kvern.models.decoder import LanguageModel
from kvern.request.step import ScheduledTokens, SchedulerOutput, StepResult
from kvern.runner.cached_model import CachedModel
from kvern.runner.captured_decodes import CapturedDecodes, Scored
from kvern.runner.loaded_model import LoadedModel
from kvern.runner.needs import SamplingNeeds
from kvern.runner.result import PendingStep, PromptLogprobs, Reported, SampledStep, embeddings
from kvern.runner.sampling import Sampling
from kvern.runner.step_runner import CHOSEN_BY_FIRST, StepRunner

if TYPE_CHECKING:
    from kvern.drafting.rejection import DrawnDrafts
    from kvern.runner.processor_rows import ProcessorVerdict
    from kvern.runner.state_memory import StateMemory

CHANGES = SamplingNeeds.CONSTRAINTS | SamplingNeeds.REPETITIONS | SamplingNeeds.PROCESSORS | SamplingNeeds.GRAMMAR
"""The demands for which logits are changed."""
BESIDE_KERNELS = ~SamplingNeeds.FILTERS
"""The demands that captured steps do not meet."""
LOOKS_AT_ALL = SamplingNeeds.FILTERS | SamplingNeeds.RARE_FILTERS | SamplingNeeds.BEAMS
"""More than one token's logit decides."""


class ModelRunner(StepRunner[LanguageModel, InputBatch, BatchRows, "StateMemory"]):
    """Holds the model, its rows, its KV cache and its states; `execute` is one step."""

    def __init__(
        self,
        model: "CachedModel[LanguageModel, InputBatch, BatchRows, StateMemory]",
        loaded: LoadedModel,
        sampling: Sampling,
        captured: CapturedDecodes | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        super().__init__(model, loaded, drafter)
        self._sampling, self._captured = sampling, captured
        self._times = loaded.times

    def execute(self, output: SchedulerOutput) -> StepResult:
        """Compute the scheduled tokens and sample where the scheduler says so."""
        if self._times is None or not self._times.is_due(output):
            return self._step(output)
        with self._times.of_host(output):
            return self._step(output)

    def _step(self, output: SchedulerOutput) -> StepResult:
        if output.changes_rows:
            with torch.inference_mode():
                self._change_rows(output)
        step = self._decode(output.scheduled) or self._compute(output.scheduled)
        marks.begin(marks.OTHER)
        self._ranks.check()
        return step

    def _drafts(self, scheduled: Sequence[ScheduledTokens]) -> list[list[int]]:
        """The drafts of each request that are to be verified; empty if there are none."""
        if all(item.sampled <= 1 for item in scheduled):
            return []
        tokens = self._rows.tokens.numpy()
        return [tokens[item.slot, item.start + 1 : item.start + item.sampled].tolist() for item in scheduled]

    def _keep(
        self,
        scheduled: Sequence[ScheduledTokens],
        drafts: Sequence[Sequence[int]],
        sampled: list[int],
        hidden: torch.Tensor | None = None,
    ) -> SampledStep:
        """Keep what is right of those that were sampled behind all tokens of a step, and guess what follows."""
        is_asked = self._drafter.is_asked(scheduled)
        if not drafts and not is_asked:
            return SampledStep([[token] for token in sampled])
        kept = kept_of(scheduled, drafts or [[]] * len(scheduled), sampled)
        computed = self._rows.num_computed_tokens.numpy()
        for item, token_ids in zip(scheduled, kept, strict=True):
            computed[item.slot] = item.start + item.count - item.sampled + len(token_ids)
        if not is_asked:
            return SampledStep(kept)
        starts = torch.tensor([item.start for item in scheduled], dtype=torch.int32)
        counts = torch.tensor([len(token_ids) for token_ids in kept])
        self._drafter.draft(ComputedStep(scheduled, starts, counts, hidden))
        return SampledStep(kept, self._drafter.seconds)

    def _decode(self, scheduled: Sequence[ScheduledTokens]) -> SampledStep | None:
        """A step in which kernels do all, from tokens to the next ones; None: it is another.

        It is short: a small model's step takes a few times as long as Python does between two of them.
        """
        captured = self._captured
        needs = self._needs
        embeddings = self.model.embeddings
        if captured is None or (embeddings is not None and embeddings.rows(scheduled) is not None):
            return None
        if any(item.uncertain or needs[item.slot] & BESIDE_KERNELS for item in scheduled):
            return None
        drafter = self._drafter
        if self.model.is_adapted(scheduled) or drafter.drawn is not None:
            return None
        if drafter.reads_hidden and drafter.is_asked(scheduled):
            return None
        drafts = self._drafts(scheduled)
        sampled = captured.decode(scheduled)
        return None if sampled is None else self._keep(scheduled, drafts, sampled)

    @torch.inference_mode()
    def _compute(self, planned: Sequence[ScheduledTokens]) -> StepResult:
        """Any step."""
        scheduled = self._rows.certain(planned)
        drafted = self._drafter.is_asked(scheduled) or any(item.uncertain or item.sampled > 1 for item in planned)
        embeddings = self._embeddings(scheduled)
        if (
            self._captured is not None
            and scheduled is planned
            and embeddings is None
            and not self.model.is_adapted(scheduled)
            and not any(item.spans for item in scheduled)
        ):
            drafts = self._drafts(scheduled)
            scored = self._captured.score(scheduled)
            if scored is not None:
                needs = self._needed(scored.slots)
                if not needs & BESIDE_KERNELS and self._drafter.drawn is None:
                    return self._keep(scheduled, drafts, self._captured.choose(len(scored.slots)), scored.told)
                if needs & SamplingNeeds.BEAMS:  # they keep the logits until somebody asks for the result
                    scored = replace(scored, logits=scored.logits.clone())
                return self._sample(scheduled, scored, needs, None, drafted)
        batch = build_input_batch(self._rows, scheduled, self.model.block_size)
        states = None if self.model.states is None else self.model.states.plan(scheduled)
        computed = self._compute_layers(batch, states, self._sampling.logprobs, embeddings)
        if computed is None:
            return PendingStep(scheduled, None)
        hidden, prompts, told = computed
        if not batch.sample_slots:
            if drafted:
                starts = torch.tensor(batch.starts, dtype=torch.int32, device=hidden.device)
                self._rows.advance(scheduled, starts)
                self._drafter.draft(ComputedStep(scheduled, starts, None, told))
            return PendingStep(scheduled, None, Reported(prompt_logprobs=prompts))
        last = hidden if len(batch.sample_slots) == len(hidden) else hidden[batch.logits_indices]
        index = torch.tensor(batch.sample_slots, device=hidden.device)
        logits = self._decoder.logits(last).contiguous()
        scored = Scored(batch.sample_slots, index, batch.sample_positions, last, logits, told)
        return self._sample(scheduled, scored, self._needed(scored.slots), prompts, drafted)

    def _sample(
        self,
        scheduled: Sequence[ScheduledTokens],
        scored: Scored,
        needs: int,
        prompts: PromptLogprobs | None,
        drafted: bool,
    ) -> PendingStep:
        """Sample and write what follows. `drafted`: some tokens may be drafts, or are to be guessed."""
        marks.begin(marks.SAMPLING)
        rows = self._rows
        slots = scored.slots
        index = scored.index
        positions = scored.positions
        logits = scored.logits
        original = logits.clone() if needs & SamplingNeeds.LOGPROBS and needs & CHANGES else logits
        verdict = self._constrain(logits, slots, index, positions, needs)
        drafts = rows.tokens[index, positions].tolist() if drafted and needs & SamplingNeeds.GRAMMAR else []
        drawn = None if self._drafter.drawn is None else self._drafter.drawn.of(scheduled)
        chosen, broken, unknown = self._choose(logits, slots, index, positions, needs, drafts, drawn)
        if needs & CHOSEN_BY_FIRST:
            chosen, unknown = self._chosen_by_first(chosen, unknown)
        kept = None
        if drafted:
            starts = torch.tensor([item.start for item in scheduled], dtype=torch.int32, device=chosen.device)
            kept = verify(rows, scheduled, starts, index, positions, chosen, unknown)
            if kept is not None and self.model.states is not None:
                self.model.states.accept(scheduled, kept)
        self._sampling.write(index, positions, chosen)
        if drafted:
            self._drafter.draft(ComputedStep(scheduled, starts, kept, scored.told))
        guessed = guessed_drafts(rows, scheduled) if drafted and self._ranks.stage.count > 1 else None
        if not needs:
            return PendingStep(scheduled, chosen, Reported(prompt_logprobs=prompts), kept=kept, guessed=guessed)
        counts: list[int | None] = []
        logprobs = None
        if needs & SamplingNeeds.LOGPROBS:
            counts = [rows.request(slot).params.logprobs for slot in slots]
            logprobs = self._sampling.logprobs(original, chosen, max(count for count in counts if count is not None))
        candidates = None
        if needs & SamplingNeeds.BEAMS:
            from kvern.sample.beams import DeviceCandidates

            candidates = DeviceCandidates(logits, original, rows, slots)
        states = embeddings(rows, slots, scored.hidden) if needs & SamplingNeeds.EMBEDDING else None
        reported = Reported(counts, logprobs, prompts, states, broken, candidates, verdict)
        return PendingStep(scheduled, chosen, reported, kept=kept, guessed=guessed)

    def _constrain(
        self, logits: torch.Tensor, slots: Sequence[int], index: torch.Tensor, positions: torch.Tensor, needs: int
    ) -> "ProcessorVerdict | None":
        """Change `logits` [S, vocabulary] in place as the requests ask."""
        if needs & (SamplingNeeds.CONSTRAINTS | SamplingNeeds.REPETITIONS):
            self._sampling.constrain(logits, slots, index, positions)
        if not needs & SamplingNeeds.PROCESSORS or self._processors is None:
            return None
        return self._processors.apply(logits, self._rows.tokens, slots, positions.tolist())

    def _choose(
        self,
        logits: torch.Tensor,
        slots: Sequence[int],
        index: torch.Tensor,
        positions: torch.Tensor,
        needs: int,
        drafts: Sequence[int],
        drawn: "DrawnDrafts | None",
    ) -> tuple[torch.Tensor, dict[int, str], list[int]]:
        """Sample; returns the tokens, and what `GrammarRows.restrict` does.

        Grammars are asked afterwards, since they mostly allow what a model says, and masks cost more. The most
        probable token of all, or the earliest drawn, is also the one among those allowed, if it is allowed itself.
        Filters look at all probabilities, and so do drafts that are `drawn`: they need the mask before. `drafts` [S]
        stand in the places of the tokens that are sampled: grammars are asked about as many as are right, and one more.
        """
        broken, unknown = dict[int, str](), list[int]()
        grammars = self._grammars if needs & SamplingNeeds.GRAMMAR else None
        bound = [] if grammars is None else [row for row, slot in enumerate(slots) if slot in grammars]
        looking = [row for row in bound if drawn is not None or self._needs[slots[row]] & LOOKS_AT_ALL]
        if grammars is not None and bound:
            broken, unknown = grammars.restrict(logits, slots, looking, lambda: drafts)
        chosen = self._sampling.sample(logits, slots, index, positions, needs)
        if drawn is not None:
            drawn.accept(chosen, logits, self._rows, slots, positions)
        if grammars is None or not bound:
            return chosen, broken, unknown
        tokens = chosen.tolist()
        going = [row for row in bound if row == 0 or slots[row - 1] != slots[row]]
        going = [row for row in going if self._rows.request(slots[row]).params.beam_width is None]
        while going:
            asked = [tokens[row] for row in going]
            refused = [going[place] for place in grammars.accept([slots[row] for row in going], asked)]
            broken.update(grammars.broken(slots, going))
            if refused:
                broken.update(grammars.restrict(logits, slots, refused).broken)
                place, again = torch.tensor(refused, device=logits.device), [slots[row] for row in refused]
                found = self._sampling.sample(logits[place], again, index[place], positions[place], needs)
                chosen[place], asked = found, found.tolist()
                grammars.accept(again, asked)
                for row, token in zip(refused, asked, strict=True):
                    tokens[row] = token
            stopped = {*broken, *unknown}
            going = [
                row + 1
                for row in going
                if slots[row + 1 : row + 2] == [slots[row]] and tokens[row] == drafts[row] and row not in stopped
            ]
        return chosen, broken, unknown
