"""Runs one step through PyTorch: rows, input batch, model, logits, sampler. For CPUs, and GPUs without Triton."""

from collections.abc import Sequence

import torch

from kvern.attention.base import AttentionBackend
from kvern.device.input_batch import InputBatch, build_input_batch
from kvern.device.rows import BatchRows
from kvern.layers.attention import NO_ADAPTERS
from kvern.models.decoder import Decoder
from kvern.sample.beams import DeviceCandidates
from kvern.sample.constraints import changes_logits, constrain
from kvern.sample.drafts import verify
from kvern.sample.logprobs import token_logprobs
from kvern.sample.rare_filters import has_rare_filters
from kvern.sample.sampler import GREEDY_BELOW, filters, sample
from kvern.sampling_params import ResolvedParams
from kvern.step import SchedulerOutput
from kvern.structured.masks import GrammarRows
from kvern.worker.adapters import Adapters
from kvern.worker.processor_rows import ProcessorRows, ProcessorVerdict
from kvern.worker.result import PendingStep, embeddings, prompt_logprobs, prompt_runs, tokens_wanted


class ModelRunner:
    """Holds the model, its rows and its KV cache; `execute` is one step."""

    def __init__(
        self,
        decoder: Decoder,
        attention: AttentionBackend[InputBatch],
        rows: BatchRows,
        block_size: int,
        grammars: GrammarRows,
        processors: ProcessorRows,
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

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> PendingStep:
        """Compute the scheduled tokens and sample where the scheduler says so."""
        if self._adapters is not None:
            self._adapters.load(output.adapters)
        self._attention.copy_blocks(output.copies)
        self._rows.fork(output.forked)
        self._grammars.fork(output.forked)
        self._processors.fork(output.forked, self._rows)
        self._rows.join(output.joined)
        self._grammars.join(output.joined)
        self._processors.join(output.joined)
        self._rows.grow(output.grown)
        self._rows.draft(output.drafts)
        scheduled = self._rows.certain(output.scheduled)
        batch = build_input_batch(self._rows, scheduled, self._block_size)
        runs = prompt_runs(self._rows, batch)
        wanted = tokens_wanted(batch, runs)
        adapters = NO_ADAPTERS
        if self._adapters is not None:
            adapters = self._adapters.select(self._rows, batch, wanted is not None)
        hidden = self._decoder(batch.token_ids, batch.positions, self._attention.plan(batch), wanted, adapters)
        prompts = prompt_logprobs(self._decoder, batch, runs, hidden, token_logprobs)
        if not batch.sample_slots:
            return PendingStep(scheduled, None, prompt_logprobs=prompts)
        params = [self._rows.request(slot).params for slot in batch.sample_slots]
        counts = [item.logprobs for item in params]
        beams = any(item.beam_width for item in params)
        everyone = len(batch.sample_slots) == hidden.shape[0]
        hidden = hidden if everyone else hidden[batch.logits_indices]
        most = max((count for count in counts if count is not None), default=None)
        logits = self._decoder.logits(hidden)
        original = None if most is None else logits.clone()
        verdict = self._constrain(batch, logits)
        chosen, broken = self._choose(logits, batch.sample_slots, batch.sample_positions)
        kept = None
        slots = torch.tensor(batch.sample_slots, device=chosen.device)
        if output.drafts or scheduled is not output.scheduled:
            starts = torch.tensor(batch.starts, dtype=torch.int32, device=chosen.device)
            kept = verify(self._rows, scheduled, starts, slots, batch.sample_positions, chosen)
        self._rows.tokens[slots, batch.sample_positions] = chosen.int()
        logprobs = None if original is None else token_logprobs(original, chosen, most or 0)
        candidates = DeviceCandidates(logits, original, self._rows, batch.sample_slots) if beams else None
        states = embeddings(self._rows, batch.sample_slots, hidden)
        return PendingStep(scheduled, chosen, counts, logprobs, prompts, states, broken, candidates, verdict, kept)

    def idle(self) -> bool:
        """Nothing can be made beforehand."""
        return False

    def abandon(self) -> None:
        """Wait for the device and forget the steps on their way. Raises if the device is broken."""
        self._grammars.abandon()
        if self._rows.device.type == "cuda":
            torch.cuda.synchronize(self._rows.device)

    def _constrain(self, batch: InputBatch, logits: torch.Tensor) -> ProcessorVerdict | None:
        """Change `logits` [S, vocabulary] in place as the requests ask."""
        slots = batch.sample_slots
        positions = batch.sample_positions.tolist()
        if any(changes_logits(self._rows.request(slot)) for slot in slots):
            constrain(logits, self._rows, slots, positions)
        return self._processors.apply(logits, self._rows.tokens, slots, positions)

    def _choose(
        self, logits: torch.Tensor, slots: Sequence[int], positions: torch.Tensor
    ) -> tuple[torch.Tensor, dict[int, str]]:
        """Sample; grammars are asked afterwards, since they mostly allow what a model says, and masks cost more.

        The most probable token of all, or the earliest drawn, is also the one among those allowed, if it is allowed
        itself. Filters look at all probabilities: they need the mask before.
        """
        bound = [row for row, slot in enumerate(slots) if slot in self._grammars]
        filtered = [row for row in bound if _filters(self._rows.request(slots[row]).params)]
        broken = self._grammars.restrict(logits, slots, filtered)
        chosen = sample(logits, self._rows, slots, positions)
        if bound:
            going = [None if self._rows.request(slot).params.beam_width else slot for slot in slots]
            refused = self._grammars.accept(going, chosen.tolist())
            broken |= self._grammars.restrict(logits, slots, refused)
            if refused:
                index = torch.tensor(refused, device=logits.device)
                again = [slots[row] for row in refused]
                chosen[index] = sample(logits[index], self._rows, again, positions[index])
                self._grammars.accept(again, chosen[index].tolist())
        return chosen, broken


def _filters(params: ResolvedParams) -> bool:
    """Whether more than one token is looked at: the improbable ones are dropped, or beams choose."""
    if params.beam_width is not None:
        return True
    if params.temperature < GREEDY_BELOW:
        return False
    return filters(params) or has_rare_filters(params)
