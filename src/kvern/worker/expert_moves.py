"""Experts of a mixture change their places between steps: all ranks hand each other weights in the same order."""

from collections.abc import Mapping
from typing import NamedTuple

from kvern.device.ranks import Ranks
from kvern.expert_placement import Placement
from kvern.layers.experts import Experts


class Move(NamedTuple):
    """An expert that the rank `target` has not, into a slot of its, from one that has it."""

    source: int
    source_slot: int
    target: int
    target_slot: int


def moves_between(old: Placement, new: Placement) -> list[Move]:
    """What makes the one of the other; ranks that have an expert several ranks want take turns to give it."""
    found: list[Move] = []
    for target, (before, after) in enumerate(zip(old, new, strict=True)):
        for slot, (had, wanted) in enumerate(zip(before, after, strict=True)):
            if had != wanted:
                owners = [rank for rank, held in enumerate(old) if wanted in held]
                source = owners[len(found) % len(owners)]
                found.append(Move(source, old[source].index(wanted), target, slot))
    return found


def move_experts(layers: list[Experts | None], placements: Mapping[int, Placement], ranks: Ranks) -> None:
    """Place the experts of some layers anew. A layer's weights are all read before any of them is overwritten."""
    for layer, placement in placements.items():
        experts = layers[layer]
        assert experts is not None and experts.share.placement is not None
        came = []
        for move in moves_between(experts.share.placement, placement):
            takes = ranks.rank == move.target
            slot = {move.source: move.source_slot, move.target: move.target_slot}.get(ranks.rank, 0)
            tensors = experts.tensors_of(slot)
            assert tensors is not None, "start asks for it"
            for tensor in tensors:
                copy = tensor.clone() if takes else tensor
                ranks.hand(copy, move.source, move.target)
                came += [(tensor, copy)] if takes else []
        for tensor, copy in came:
            tensor.copy_(copy)
        experts.share.place(placement)
