"""Sampling: from logits to tokens.

    logits -> constraints and penalties -> top_n_sigma -> temperature -> top_k -> top_p -> min_p -> typical_p -> XTC
           -> dynamic temperature -> one token

The order of the filters is the one of Hugging Face transformers; `rare_filters` states where its own belong. Each token
draws a time from the exponential distribution with its probability as the rate, and the earliest wins. The random
numbers depend on the request's seed, the position and the token alone, so a seeded request gives the same tokens in any
batch. Rounding differs between batches. This method is the least sensitive to it: the sampled token changes about as
seldom as the distribution does, while inversion of the cumulative distribution could change it at every token boundary.
"""

from collections.abc import Iterator, Sequence

import torch

from kvern.device.rows import BatchRows
from kvern.device.transfer import upload
from kvern.sample.random import uniform
from kvern.sample.rare_filters import RareFilters


def sample(logits: torch.Tensor, rows: BatchRows, slots: Sequence[int], positions: torch.Tensor) -> torch.Tensor:
    """Choose one token for each row.

    logits     [N, vocabulary] float32, after `constrain`
    slots      N rows of the batch that the logits belong to
    positions  [N] int64, positions of the tokens that are chosen
    returns    [N] int64 token ids
    """
    greedy = [rows.request(slot).params.is_greedy for slot in slots]
    if all(greedy):
        return logits.argmax(-1)
    tokens = logits.argmax(-1) if any(greedy) else torch.empty(len(slots), dtype=torch.int64, device=logits.device)
    for index, slot, left, ids in _left(logits, rows, slots, positions, greedy):
        candidates = torch.arange(left.shape[-1], device=logits.device)[None] if ids is None else ids
        column = draw(left, uniform(rows.seeds[slot], positions[index], candidates))
        tokens[index] = column if ids is None else ids.gather(1, column[:, None])[:, 0]
    return tokens


def probabilities(logits: torch.Tensor, rows: BatchRows, slots: Sequence[int], positions: torch.Tensor) -> torch.Tensor:
    """The probabilities [N, vocabulary] float32, which sum to 1, from which `sample` draws each row's token."""
    greedy = [rows.request(slot).params.is_greedy for slot in slots]
    found = torch.zeros_like(logits).scatter_(1, logits.argmax(-1, keepdim=True), 1.0)
    for index, _, left, ids in _left(logits, rows, slots, positions, greedy):
        left = left / left.sum(-1, keepdim=True)
        found[index] = left if ids is None else torch.zeros_like(logits[index]).scatter_(1, ids, left)
    return found


def _left(
    logits: torch.Tensor, rows: BatchRows, slots: Sequence[int], positions: torch.Tensor, greedy: Sequence[bool]
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """The probabilities after all filters of the rows that are not `greedy`, in groups of rows with the same filters.

    Yields indices and slots [M], probabilities [M, candidates], not normalized, and the ids of the candidates; None:
    all.
    """
    kinds: dict[tuple[bool, bool, bool], list[int]] = {}
    for row in range(len(slots)):
        if not greedy[row]:
            params = rows.request(slots[row]).params
            ordered = params.top_p < 1.0 or params.typical_p < 1.0
            kinds.setdefault((params.top_k > 0, ordered, params.has_rare_filters), []).append(row)
    slot_index = upload(slots, torch.int64, logits.device)
    for (few, ordered, rare), members in kinds.items():
        index = upload(members, torch.int64, logits.device)
        asked = [rows.request(slots[row]).params for row in members]
        slot = slot_index[index]
        temperature = rows.temperature[slot, None]
        rarely = RareFilters.of(asked, logits.device) if rare else None
        scores = logits[index] / temperature if rarely is None else rarely.before_common(logits[index], temperature)
        ids = None
        if few:
            scores, ids = _most_probable(scores, rows.top_k[slot])
        elif ordered:
            scores, ids = scores.sort(dim=-1, descending=True, stable=True)
        left = _filter(scores, rows, slot, ordered, any(params.typical_p < 1.0 for params in asked))
        if rarely is not None:
            left = rarely.after_common(left, temperature, rows.seeds[slot], positions[index])
        yield index, slot, left, ids


def _most_probable(scores: torch.Tensor, top_k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The k best scores of each row and all ties of the last, in descending order, ties by token id; [N, most kept].

    A GPU sorts all scores instead, so that the host does not wait for it.
    """
    top_k = top_k.clamp(max=scores.shape[-1])
    if scores.is_cuda:
        values, ids = scores.sort(dim=-1, descending=True, stable=True)
        return values.masked_fill(values < values.gather(1, top_k[:, None] - 1), float("-inf")), ids
    best = scores.topk(int(top_k.max()), -1).values
    limit = best.gather(1, top_k[:, None] - 1)
    kept = scores >= limit
    width = max(int(kept.sum(-1).max()), 1)  # of rows that are no numbers nothing is
    ids = scores.masked_fill(~kept, float("-inf")).topk(width, -1).indices.sort(-1).values
    values = scores.gather(1, ids).masked_fill(~kept.gather(1, ids), float("-inf"))
    values, order = values.sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _filter(
    scores: torch.Tensor, rows: BatchRows, slot: torch.Tensor, ordered: bool, any_typical: bool
) -> torch.Tensor:
    """Probabilities [N, candidates] with everything that top_p, min_p and typical_p drop at 0, not normalised."""
    probabilities = scores.softmax(-1)
    if ordered:
        before = probabilities.cumsum(-1) - probabilities
        last = ((before < rows.top_p[slot, None]).sum(-1, keepdim=True) - 1).clamp_(min=0)  # the best always stays
        probabilities = probabilities.masked_fill(scores < scores.gather(1, last), 0)  # ties of the last are kept
    floor = rows.min_p[slot, None] * probabilities.amax(-1, keepdim=True)
    probabilities = probabilities.masked_fill(probabilities < floor, 0)
    if any_typical:
        typical = rows.typical_p[slot, None]
        probabilities = torch.where(typical < 1, _typical(probabilities, typical), probabilities)
    return probabilities


def _typical(probabilities: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """Locally typical sampling (Meister et al. 2022): keep the tokens nearest the expected surprise."""
    probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    surprise = -probabilities.log()
    entropy = (probabilities * surprise).nan_to_num(0.0).sum(-1, keepdim=True)
    distances = (surprise - entropy).abs()
    nearest, order = distances.sort(dim=-1)
    ordered = probabilities.gather(1, order)
    before = ordered.cumsum(-1) - ordered
    last = ((before < mass).sum(-1, keepdim=True) - 1).clamp_(min=0)
    return probabilities.masked_fill(distances > nearest.gather(1, last), 0)  # ties of the last are kept


def draw(probabilities: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Samples from probabilities with random numbers, [N, candidates] each, and returns the columns [N].

    The column with the earliest exponential time wins; the numbers are overwritten.
    """
    times = numbers.neg_().log1p_().neg_()
    return (probabilities / times).argmax(-1)
