"""Runs one step on a device: rows, input batch, model, logits, sampler."""

from collections.abc import Sequence

import torch

from kvern.attention.base import AttentionBackend
from kvern.models.decoder import Decoder
from kvern.sample.sampler import sample, top_logprobs
from kvern.step import ModelRunnerOutput, SchedulerOutput, TokenLogprobs
from kvern.worker.input_batch import InputBatch, build_input_batch
from kvern.worker.rows import BatchRows

PROMPT_LOGITS_ROWS = 256
"""Prompt positions whose logits are held at once: a row can have 256k entries of 4 bytes."""


class ModelRunner:
    """Holds the model, its rows and its KV cache; `execute` is one step."""

    def __init__(self, decoder: Decoder, attention: AttentionBackend, rows: BatchRows, block_size: int) -> None:
        self._decoder = decoder
        self._attention = attention
        self._rows = rows
        self._block_size = block_size

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute the scheduled tokens and sample where the scheduler says so."""
        self._attention.copy_blocks(output.copies)
        self._rows.join(output.joined)
        self._rows.grow(output.grown)
        batch = build_input_batch(self._rows, output.scheduled, self._block_size)
        hidden = self._decoder(batch.token_ids, batch.positions, self._attention.plan(batch))
        prompt_logprobs = [self._prompt_logprobs(batch, index, hidden) for index in range(len(batch.slots))]
        tokens, logprobs = self._sample(batch, hidden)
        sampled = iter(zip(tokens, logprobs, strict=True))
        pairs = [next(sampled) if item.sample else (None, None) for item in output.scheduled]
        return ModelRunnerOutput([token for token, _ in pairs], [logprob for _, logprob in pairs], prompt_logprobs)

    def _sample(self, batch: InputBatch, hidden: torch.Tensor) -> tuple[list[int], list[TokenLogprobs | None]]:
        slots = batch.sample_slots
        if not slots:
            return [], []
        everyone = len(slots) == hidden.shape[0]
        logits = self._decoder.logits(hidden if everyone else hidden[batch.sample_tokens])
        counts = [self._rows.request(slot).params.logprobs for slot in slots]
        wanted = [row for row, count in enumerate(counts) if count is not None]
        original = logits[wanted] if wanted else logits
        chosen = sample(logits, self._rows, slots, batch.sample_positions)
        self._rows.tokens[torch.tensor(slots, device=chosen.device), batch.sample_positions] = chosen.int()
        tokens: list[int] = chosen.tolist()
        logprobs: list[TokenLogprobs | None] = [None] * len(slots)
        for index, row in enumerate(wanted):
            logprobs[row] = top_logprobs(original[index : index + 1], [tokens[row]], counts[row] or 0)[0]
        return tokens, logprobs

    def _prompt_logprobs(self, batch: InputBatch, index: int, hidden: torch.Tensor) -> list[TokenLogprobs] | None:
        slot, start, count = batch.slots[index], batch.starts[index], batch.counts[index]
        request = self._rows.request(slot)
        wanted = request.params.prompt_logprobs
        last = min(start + count, request.prompt_length - 1)
        if wanted is None or last <= start:
            return None
        first = sum(batch.counts[:index])
        tokens: Sequence[int] = request.token_ids[start + 1 : last + 1]
        result: list[TokenLogprobs] = []
        for offset in range(0, len(tokens), PROMPT_LOGITS_ROWS):
            part = tokens[offset : offset + PROMPT_LOGITS_ROWS]
            logits = self._decoder.logits(hidden[first + offset : first + offset + len(part)])
            result += top_logprobs(logits, part, wanted)
        return result
