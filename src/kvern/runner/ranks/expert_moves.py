"""Experts of a mixture change their places between steps: all ranks hand each other weights in the same order."""

from collections.abc import Mapping
from typing import NamedTuple
from zlib import crc32

import torch

from kvern.errors import ConfigError
from kvern.layers.experts import Experts
from kvern.ranks.expert_placement import Placement
from kvern.ranks.ranks import Ranks


class Move(NamedTuple):
    """An expert that the rank `target` has not, into a slot of its, from one that has it."""

    source: int
    source_slot: int
    target: int
    target_slot: int


def moves_between(old: Placement, new: Placement) -> list[Move]:
    """The moves from one placement to another; ranks that have an expert take turns to give it."""
    found: list[Move] = []
    for target, (before, after) in enumerate(zip(old, new, strict=True)):
        for slot, (had, wanted) in enumerate(zip(before, after, strict=True)):
            if had != wanted:
                owners = [rank for rank, held in enumerate(old) if wanted in held]
                source = owners[len(found) % len(owners)]
                found.append(Move(source, old[source].index(wanted), target, slot))
    return found


def check_moves(layers: Mapping[int, Experts], ranks: Ranks) -> None:
    """Raise ConfigError, on all ranks, where not all slots of a layer's experts store theirs alike."""
    for experts in layers.values():
        forms = {_form(experts.tensors_of(slot)) for slot in range(experts.slots)}
        own = crc32(forms.pop().encode()) if len(forms) == 1 and "" not in forms else -1
        found = ranks.beside(torch.tensor([[own]], device=experts.expert_counts.device))
        if own == -1 or int(found.min()) != int(found.max()):
            raise ConfigError(
                f"rebalance_experts is on, and not all experts of {experts.path} are stored alike, as {experts.name}, "
                "or kernels keep numbers of theirs: they cannot change their places, leave rebalance_experts out"
            )


def _form(tensors: list[torch.Tensor] | None) -> str:
    return "" if tensors is None else str([(tensor.shape, tensor.dtype) for tensor in tensors])


def move_experts(layers: Mapping[int, Experts], placements: Mapping[int, Placement], ranks: Ranks) -> None:
    """Place the experts of some layers anew, of those that are here.

    A layer's weights are all read before any of them is overwritten.
    """
    for layer, placement in placements.items():
        if (experts := layers.get(layer)) is None:
            continue
        assert experts.share.placement is not None
        came = []
        for move in moves_between(experts.share.placement, placement):
            takes = ranks.rank == move.target
            slot = {move.source: move.source_slot, move.target: move.target_slot}.get(ranks.rank, 0)
            tensors = experts.tensors_of(slot)
            assert tensors is not None, "start asks for it"
            for tensor in tensors:
                copy = tensor.clone(memory_format=torch.contiguous_format) if takes else tensor.contiguous()
                ranks.hand(copy, move.source, move.target)
                came += [(tensor, copy)] if takes else []
        for tensor, copy in came:
            tensor.copy_(copy)
        experts.share.place(placement)
