"""Runs one step through PyTorch: rows, input batch, model, logits, sampler. For CPUs, and GPUs without Triton."""

import torch

from kvern.attention.base import AttentionBackend
from kvern.models.decoder import Decoder
from kvern.sample.constraints import constrain, is_constrained, is_penalized
from kvern.sample.logprobs import DeviceLogprobs, token_logprobs
from kvern.sample.sampler import sample
from kvern.step import SchedulerOutput
from kvern.structured.masks import GrammarRows
from kvern.worker.adapters import Adapters
from kvern.worker.input_batch import InputBatch, build_input_batch
from kvern.worker.result import PendingStep, embeddings, prompt_logprobs, tokens_wanted
from kvern.worker.rows import BatchRows


class ModelRunner:
    """Holds the model, its rows and its KV cache; `execute` is one step."""

    def __init__(
        self,
        decoder: Decoder,
        attention: AttentionBackend[InputBatch],
        rows: BatchRows,
        block_size: int,
        grammars: GrammarRows,
        adapters: Adapters | None = None,
    ) -> None:
        self._decoder = decoder
        self._attention = attention
        self._rows = rows
        self._block_size = block_size
        self._grammars = grammars
        self._adapters = adapters

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> PendingStep:
        """Compute the scheduled tokens and sample where the scheduler says so."""
        if self._adapters is not None:
            self._adapters.load(output.adapters)
        self._attention.copy_blocks(output.copies)
        self._rows.join(output.joined)
        self._grammars.join(output.joined)
        self._rows.grow(output.grown)
        batch = build_input_batch(self._rows, output.scheduled, self._block_size)
        wanted = tokens_wanted(self._rows, batch)
        if self._adapters is not None:
            self._adapters.select(self._rows, batch, wanted is not None)
        hidden = self._decoder(batch.token_ids, batch.positions, self._attention.plan(batch), wanted)
        prompts = prompt_logprobs(self._decoder, self._rows, batch, hidden)
        if not batch.sample_slots:
            return PendingStep(output.scheduled, None, prompt_logprobs=prompts)
        counts = [self._rows.request(slot).params.logprobs for slot in batch.sample_slots]
        everyone = len(batch.sample_slots) == hidden.shape[0]
        hidden = hidden if everyone else hidden[batch.sample_tokens]
        chosen, logprobs, broken = self._sample(
            batch, hidden, max((count for count in counts if count is not None), default=None)
        )
        states = embeddings(self._rows, batch.sample_slots, hidden)
        step = PendingStep(output.scheduled, chosen, counts, logprobs, prompts, states, broken)
        self._grammars.expect([item.slot if item.sample else None for item in output.scheduled], step)
        return step

    def _sample(
        self, batch: InputBatch, hidden: torch.Tensor, wanted: int | None
    ) -> tuple[torch.Tensor, DeviceLogprobs | None, dict[int, str]]:
        slots = batch.sample_slots
        logits = self._decoder.logits(hidden)
        original = None if wanted is None else logits.clone()
        if any(is_constrained(self._rows.request(slot)) or is_penalized(self._rows.request(slot)) for slot in slots):
            ends = [start + count for start, count in zip(batch.starts, batch.counts, strict=True)]
            sampling = dict(zip(batch.slots, ends, strict=True))
            constrain(logits, self._rows, slots, [sampling[slot] for slot in slots])
        broken = self._grammars.restrict(logits, slots)
        chosen = sample(logits, self._rows, slots, batch.sample_positions)
        self._rows.tokens[torch.tensor(slots, device=chosen.device), batch.sample_positions] = chosen.int()
        return chosen, None if original is None else token_logprobs(original, chosen, wanted or 0), broken
