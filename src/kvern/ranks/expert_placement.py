"""The placement of a mixture's experts on ranks by their load; no torch."""

from collections.abc import Callable, Sequence

Placement = tuple[tuple[int, ...], ...]
"""The experts of each rank, one for each of its slots. An expert may be on several ranks."""


def place_experts(load: Sequence[float], ranks: int, redundant: int = 0) -> Placement:
    """Distributes the experts, with `redundant` copies of the busiest, so that ranks have equal loads.

    `load` has a number for each expert. The numbers of slots differ by at most one; the first ranks have more. No rank
    has an expert twice: there are at most `(ranks - 1) * len(load)` copies.
    """
    copies = [1] * len(load)
    for _ in range(redundant):
        candidates = [expert for expert, count in enumerate(copies) if count < ranks]
        copies[max(candidates, key=lambda expert: load[expert] / copies[expert])] += 1
    each = [number / count for number, count in zip(load, copies, strict=True)]
    size, larger = divmod(sum(copies), ranks)
    slots = [size + (rank < larger) for rank in range(ranks)]
    experts = range(len(load))
    busiest_first = sorted(experts, key=lambda expert: -each[expert])
    most_first = sorted(busiest_first, key=lambda expert: -copies[expert])
    found = [
        _spread(busiest_first, copies, each, slots, lambda free, busy: (busy, -free)),
        _spread(most_first, copies, each, slots, lambda free, busy: (busy, -free)),
        _spread(most_first, copies, each, slots, lambda free, busy: (-free, busy)),  # this one always fits
    ]
    return min((placed for placed in found if placed), key=lambda placed: max(rank_loads(placed, load)))


def first_placement(experts: int, ranks: int, redundant: int) -> Placement:
    """Returns the placement at the start, when the loads are unknown."""
    return place_experts([1.0] * experts, ranks, redundant)


def kept_in_place(old: Placement, new: Placement) -> Placement:
    """Returns `new` in another order: an expert that stays on its rank stays in its slot, and so need not be copied."""
    arranged = []
    for before, after in zip(old, new, strict=True):
        coming = iter([expert for expert in after if expert not in before])
        arranged.append(tuple(expert if expert in after else next(coming) for expert in before))
    return tuple(arranged)


def rank_loads(placement: Placement, load: Sequence[float]) -> list[float]:
    """Returns the load of each rank, if the copies of an expert share its work evenly."""
    copies = [0] * len(load)
    for experts in placement:
        for expert in experts:
            copies[expert] += 1
    return [sum(load[expert] / copies[expert] for expert in experts) for experts in placement]


def _spread(
    experts: Sequence[int],
    copies: Sequence[int],
    each: Sequence[float],
    slots: Sequence[int],
    order: Callable[[int, float], tuple[float, float]],
) -> Placement | None:
    """Assigns each expert to free ranks, first in `order`; None if too few ranks were free for one."""
    placed: list[list[int]] = [[] for _ in slots]
    busy = [0.0] * len(slots)
    for expert in experts:
        free = [rank for rank, count in enumerate(slots) if len(placed[rank]) < count]
        chosen = sorted(free, key=lambda rank: order(slots[rank] - len(placed[rank]), busy[rank]))[: copies[expert]]
        if len(chosen) < copies[expert]:
            return None
        for rank in chosen:
            placed[rank].append(expert)
            busy[rank] += each[expert]
    return tuple(tuple(sorted(held)) for held in placed)
