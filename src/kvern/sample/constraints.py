"""What requests ask of the logits before a token is chosen: bans, biases and penalties."""

from collections.abc import Sequence

import torch

from kvern.device.rows import BatchRows
from kvern.device.transfer import upload
from kvern.step import NewRequest

BANNED = float("-inf")


def is_constrained(request: NewRequest) -> bool:
    """Whether the request uses anything of this module but penalties."""
    params = request.params
    return bool(params.allowed_token_ids or params.logit_bias or request.spec.bad_word_ids or params.min_tokens)


def is_penalized(request: NewRequest) -> bool:
    """Whether the request's own tokens change its logits."""
    params = request.params
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def constrain(logits: torch.Tensor, rows: BatchRows, slots: Sequence[int], positions: Sequence[int]) -> None:
    """Change `logits` [N, vocabulary] in place as each row's request asks; positions are those to be sampled."""
    penalized = [row for row, slot in enumerate(slots) if is_penalized(rows.request(slot))]
    for row in penalized:
        _penalize(logits[row], rows, slots[row], positions[row])
    for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        request = rows.request(slot)
        if is_constrained(request):
            _constrain_row(logits[row], request, rows.tokens[slot, :position], position)


def _penalize(logits: torch.Tensor, rows: BatchRows, slot: int, position: int) -> None:
    tokens = rows.tokens[slot, :position].long()
    output = tokens[rows.request(slot).spec.prompt_length :]
    counts = torch.zeros_like(logits).scatter_add_(0, output, torch.ones_like(output, dtype=logits.dtype))
    seen = torch.zeros_like(logits, dtype=torch.bool)
    seen.index_fill_(0, tokens, True)
    penalty = rows.repetition[slot]
    logits.copy_(torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits))
    logits -= rows.frequency[slot] * counts + rows.presence[slot] * (counts > 0)


def _constrain_row(logits: torch.Tensor, request: NewRequest, tokens: torch.Tensor, position: int) -> None:
    params, device = request.params, logits.device
    if params.logit_bias:
        ids = upload(list(params.logit_bias), torch.int64, device)
        logits[ids] += upload(list(params.logit_bias.values()), logits.dtype, device)
    if params.allowed_token_ids:
        allowed = upload(params.allowed_token_ids, torch.int64, device)
        kept = logits[allowed]
        logits.fill_(BANNED)
        logits[allowed] = kept
    if position - request.spec.prompt_length < params.min_tokens and request.spec.stop_token_ids:
        logits.index_fill_(0, upload(list(request.spec.stop_token_ids), torch.int64, device), BANNED)
    for word in request.spec.bad_word_ids:
        head = word[:-1]
        if len(head) > position - request.spec.prompt_length:
            continue
        last = logits[word[-1] : word[-1] + 1]
        if head:
            said = (tokens[position - len(head) :] == upload(head, torch.int32, device)).all()
            last.masked_fill_(said, BANNED)
        else:
            last.fill_(BANNED)
