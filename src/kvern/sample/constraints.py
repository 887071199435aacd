"""What requests ask of the logits before a token is chosen: bans, biases and penalties."""

from collections.abc import Sequence

import torch

from kvern.device.rows import BatchRows
from kvern.device.transfer import upload
from kvern.sample.dry import penalize_repetitions
from kvern.step import NewRequest

BANNED = float("-inf")


def changes_logits(request: NewRequest) -> bool:
    """Whether the request uses anything of this module."""
    return _is_constrained(request) or _is_penalized(request) or request.params.penalizes_repetitions


def _is_constrained(request: NewRequest) -> bool:
    params = request.params
    return bool(params.allowed_token_ids or params.logit_bias or request.spec.bad_word_ids or params.min_tokens)


def _is_penalized(request: NewRequest) -> bool:
    params = request.params
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def constrain(
    logits: torch.Tensor,
    rows: BatchRows,
    slots: Sequence[int],
    positions: Sequence[int],
    exact: torch.Tensor | None = None,
) -> None:
    """Change `logits` [N, vocabulary] in place as each row's request asks; positions are those to be sampled.

    With `exact` [N] int64 these are on the device, and those on the host are bounds, never below them.
    """
    repeating = []
    for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        request = rows.request(slot)
        if _is_penalized(request):
            _penalize(logits[row], rows, slot, position, None if exact is None else exact[row])
        if _is_constrained(request):
            where = None if exact is None else exact[row]
            _constrain_row(logits[row], request, rows.tokens[slot, :position], position, where)
        if request.params.penalizes_repetitions:
            repeating.append(row)
    if repeating:
        penalize_repetitions(logits, rows, repeating, slots, positions, exact)


def _penalize(logits: torch.Tensor, rows: BatchRows, slot: int, position: int, exact: torch.Tensor | None) -> None:
    tokens = rows.tokens[slot, :position].long()
    length = rows.request(slot).spec.prompt_length
    weights = torch.ones_like(tokens[length:], dtype=logits.dtype)
    if exact is not None:
        known = torch.arange(position, device=tokens.device) < exact
        tokens, weights = torch.where(known, tokens, tokens[0]), known[length:].to(logits.dtype)
    counts = torch.zeros_like(logits).scatter_add_(0, tokens[length:], weights)
    seen = torch.zeros_like(logits, dtype=torch.bool)
    seen.index_fill_(0, tokens, True)
    penalty = rows.repetition[slot]
    logits.copy_(torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits))
    logits -= rows.frequency[slot] * counts + rows.presence[slot] * (counts > 0)


def _constrain_row(
    logits: torch.Tensor, request: NewRequest, tokens: torch.Tensor, position: int, exact: torch.Tensor | None
) -> None:
    params, device = request.params, logits.device
    if params.logit_bias:
        ids = upload(list(params.logit_bias), torch.int64, device)
        logits[ids] += upload(list(params.logit_bias.values()), logits.dtype, device)
    if params.allowed_token_ids:
        allowed = upload(params.allowed_token_ids, torch.int64, device)
        kept = logits[allowed]
        logits.fill_(BANNED)
        logits[allowed] = kept
    if params.min_tokens and request.spec.stop_token_ids:
        _ban_ends(logits, request, position, exact)
    for word in request.spec.bad_word_ids:
        head = word[:-1]
        if len(head) > position - request.spec.prompt_length:
            continue
        last = logits[word[-1] : word[-1] + 1]
        if head:
            last.masked_fill_(_ends_with(tokens, upload(head, torch.int32, device), request, exact), BANNED)
        else:
            last.fill_(BANNED)


def _ban_ends(logits: torch.Tensor, request: NewRequest, position: int, exact: torch.Tensor | None) -> None:
    """Ban what would end the answer before `min_tokens`."""
    first = request.spec.prompt_length + request.params.min_tokens
    if position >= first and exact is None:
        return
    ids = upload(list(request.spec.stop_token_ids), torch.int64, logits.device)
    if exact is None:
        logits.index_fill_(0, ids, BANNED)
    else:
        logits[ids] = logits[ids].masked_fill(exact < first, BANNED)


def _ends_with(
    tokens: torch.Tensor, head: torch.Tensor, request: NewRequest, exact: torch.Tensor | None
) -> torch.Tensor:
    """Whether the tokens end with `head`, or their first `exact` ones do, all of it generated."""
    if exact is None:
        return (tokens[len(tokens) - len(head) :] == head).all()
    first = exact - len(head)
    places = (first + torch.arange(len(head), device=tokens.device)).clamp_(min=0)
    return (tokens[places] == head).all() & (first >= request.spec.prompt_length)
