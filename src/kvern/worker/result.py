"""A step's result while the device still computes it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvern.models.decoder import Decoder
from kvern.sample.beams import DeviceCandidates
from kvern.sample.logprobs import DeviceLogprobs, fetch, token_logprobs
from kvern.step import ModelRunnerOutput, ScheduledTokens, TokenLogprobs
from kvern.worker.input_batch import InputBatch
from kvern.worker.rows import BatchRows, upload

PROMPT_LOGITS_ROWS = 256
"""Prompt positions whose logits are held at once: a row can have 256k entries of 4 bytes."""


@dataclass(frozen=True)
class PromptLogprobs:
    """Log-probabilities of prompt tokens, in parts, and how many of the most probable ones were asked for."""

    tokens: Sequence[int]
    parts: list[DeviceLogprobs]
    wanted: int

    def entries(self) -> list[TokenLogprobs]:
        result: list[TokenLogprobs] = []
        for part in self.parts:
            tokens = self.tokens[len(result) : len(result) + len(part.ranks)]
            result += part.entries(tokens, [self.wanted] * len(tokens))
        return result


class PendingStep:
    """Part of a step on its way: `result` waits for it."""

    def __init__(
        self,
        scheduled: Sequence[ScheduledTokens],
        sampled: torch.Tensor | None,
        counts: Sequence[int | None] = (),
        logprobs: DeviceLogprobs | None = None,
        prompt_logprobs: Sequence[PromptLogprobs | None] = (),
        embeddings: tuple[Sequence[int], torch.Tensor] | None = None,
        broken: dict[int, str] | None = None,
        candidates: DeviceCandidates | None = None,
    ) -> None:
        """`sampled` [S] and `logprobs` belong to the scheduled that sample; `counts` are None where none were asked.

        `embeddings`: slots [E] and their hidden states [E, hidden]; `broken`: as in ModelRunnerOutput.
        """
        self._scheduled = scheduled
        self._counts = counts
        self._sampled = None if sampled is None else fetch(sampled)
        self._logprobs = None if logprobs is None else logprobs.fetch()
        self._prompt_logprobs = prompt_logprobs
        self._broken = broken or {}
        self._candidates = candidates
        self._embeddings = None if embeddings is None else (embeddings[0], fetch(embeddings[1].float()))
        self._done: torch.cuda.Event | None = None
        if sampled is not None and sampled.device.type == "cuda":
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    def result(self) -> ModelRunnerOutput:
        """Wait for the device."""
        if self._done is not None:
            self._done.synchronize()
        tokens: list[int] = [] if self._sampled is None else self._sampled.tolist()
        logprobs: list[TokenLogprobs | None] = [None] * len(tokens)
        if self._logprobs is not None:
            entries = self._logprobs.entries(tokens, [count or 0 for count in self._counts])
            logprobs = [None if count is None else entry for count, entry in zip(self._counts, entries, strict=True)]
        prompts = [None if item is None else item.entries() for item in self._prompt_logprobs]
        embeddings = {}
        if self._embeddings is not None:
            slots, states = self._embeddings
            embeddings = {slot: state.tobytes() for slot, state in zip(slots, states.numpy(), strict=True)}
        candidates = {} if self._candidates is None else self._candidates.by_slot()
        if len(tokens) == len(self._scheduled):
            prompts = prompts or [None] * len(tokens)
            return ModelRunnerOutput(list(tokens), logprobs, prompts, self._broken, embeddings, candidates)
        pairs = iter(zip(tokens, logprobs, strict=True))
        chosen = [next(pairs) if item.sample else (None, None) for item in self._scheduled]
        return ModelRunnerOutput(
            [token for token, _ in chosen],
            [logprob for _, logprob in chosen],
            prompts or [None] * len(chosen),
            self._broken,
            embeddings,
            candidates,
        )


def embeddings(
    rows: BatchRows, slots: Sequence[int], hidden: torch.Tensor
) -> tuple[Sequence[int], torch.Tensor] | None:
    """Slots [E] and states [E, hidden] of those among the sampling `slots` [S] that want theirs, of `hidden` [S]."""
    wanted = [index for index, slot in enumerate(slots) if rows.request(slot).embed]
    if not wanted:
        return None
    return [slots[index] for index in wanted], hidden[upload(wanted, torch.int64, hidden.device)]


def asks_prompt_logprobs(rows: BatchRows, batch: InputBatch) -> bool:
    """Whether some request of the step wants log-probabilities of its prompt."""
    return any(rows.request(slot).params.prompt_logprobs is not None for slot in batch.slots)


def tokens_wanted(rows: BatchRows, batch: InputBatch) -> torch.Tensor | None:
    """Indices of the tokens whose hidden states the step needs: those that are sampled from; None: all."""
    samples = len(batch.sample_slots)
    if samples in (0, len(batch.token_ids)) or asks_prompt_logprobs(rows, batch):
        return None
    return batch.sample_tokens


def prompt_logprobs(
    decoder: Decoder, rows: BatchRows, batch: InputBatch, hidden: torch.Tensor
) -> list[PromptLogprobs | None]:
    """What the step's tokens predict of their prompts, for requests that asked. Empty if none did."""
    if not asks_prompt_logprobs(rows, batch):
        return []
    result: list[PromptLogprobs | None] = []
    first = 0
    for slot, start, count in zip(batch.slots, batch.starts, batch.counts, strict=True):
        request = rows.request(slot)
        wanted = request.params.prompt_logprobs
        last = min(start + count, request.prompt_length - 1)
        if wanted is None or last <= start:
            result.append(None)
        else:
            tokens = request.token_ids[start + 1 : last + 1]
            parts = []
            for offset in range(0, len(tokens), PROMPT_LOGITS_ROWS):
                part = tokens[offset : offset + PROMPT_LOGITS_ROWS]
                logits = decoder.logits(hidden[first + offset : first + offset + len(part)])
                ids = upload(part, torch.int64, hidden.device)
                parts.append(token_logprobs(logits, ids, wanted).fetch())
            result.append(PromptLogprobs(tokens, parts, wanted))
        first += count
    return result
