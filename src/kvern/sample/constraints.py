"""Token bans, logit biases and penalties, applied to the logits before a token is sampled.

This is the reference in PyTorch. `kernels.constraints` (GPU) and `cpu.sampling` do the same, except for DRY.
"""

from collections.abc import Sequence

import torch

from kvern.device.rows import BatchRows
from kvern.device.transfer import upload
from kvern.request.step import NewRequest
from kvern.sample.dry import penalize_repetitions

BANNED = float("-inf")


def constrain(logits: torch.Tensor, rows: BatchRows, slots: Sequence[int], positions: Sequence[int]) -> None:
    """Applies each request's constraints to `logits` [N, vocabulary] in place; `positions` are those to be sampled."""
    repeating = []
    for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        request, tokens = rows.request(slot), rows.tokens[slot, :position]
        if request.params.penalizes_tokens:
            _penalize(logits[row], rows, slot, tokens.long())
        if request.spec.bans_or_biases:
            _constrain_row(logits[row], request, tokens)
        if request.params.penalizes_repetitions:
            repeating.append(row)
    if repeating:
        penalize_repetitions(logits, rows, repeating, slots, positions, None)


def _penalize(logits: torch.Tensor, rows: BatchRows, slot: int, tokens: torch.Tensor) -> None:
    output = tokens[rows.request(slot).spec.prompt_length :]
    counts = torch.zeros_like(logits).scatter_add_(0, output, torch.ones_like(output, dtype=logits.dtype))
    seen = torch.zeros_like(logits, dtype=torch.bool)
    seen.index_fill_(0, tokens, True)
    penalty = rows.repetition[slot]
    logits.copy_(torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits))
    logits -= rows.frequency[slot] * counts + rows.presence[slot] * (counts > 0)


def _constrain_row(logits: torch.Tensor, request: NewRequest, tokens: torch.Tensor) -> None:
    params, device = request.params, logits.device
    if params.logit_bias:
        ids = upload(list(params.logit_bias), torch.int64, device)
        logits[ids] += upload(list(params.logit_bias.values()), logits.dtype, device)
    if params.allowed_token_ids:
        allowed = upload(params.allowed_token_ids, torch.int64, device)
        kept = logits[allowed]
        logits.fill_(BANNED)
        logits[allowed] = kept
    generated = len(tokens) - request.spec.prompt_length
    if request.spec.stop_token_ids and generated < params.min_tokens:
        logits.index_fill_(0, upload(list(request.spec.stop_token_ids), torch.int64, device), BANNED)
    for word in request.spec.bad_word_ids:
        head = word[:-1]
        if len(head) <= generated:
            ended = (tokens[len(tokens) - len(head) :] == upload(head, torch.int32, device)).all()
            logits[word[-1] : word[-1] + 1].masked_fill_(ended, BANNED)
