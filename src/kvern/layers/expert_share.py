"""A rank's share of the experts of a mixture: a part of the width of each, or some whole experts (expert parallel)."""

import torch
from torch import Tensor

from kvern.layers.linear_method import Part
from kvern.ranks.expert_placement import Placement, first_placement
from kvern.ranks.ranks import Ranks, Share
from kvern.spec.model import MoeSpec

TURNS = 12
"""Rows after which the copies of an expert take turns anew: up to four copies have the same number of them."""


class ExpertShare:
    """The experts in a rank's slots, `held`, and which entries of their `width` it has.

    `placement` says the same of all ranks; None: each has a part of all experts.
    """

    def __init__(self, hidden_size: int, spec: MoeSpec, ranks: Ranks, device: torch.device) -> None:
        self._hidden = hidden_size
        self._gated = spec.gated
        self._experts = spec.experts
        self._rank = ranks.rank
        self.width = ranks.share(spec.width)
        self.held: tuple[int, ...] = tuple(range(spec.experts))
        self.placement: Placement | None = None
        self.slots: Tensor | None = None
        """[turns, experts] int32, which rows take in turns: where an expert is here, or -1; None: in its own place."""
        if spec.placed_over > 1:
            self.width = Share(range(spec.width), spec.width)
            self.slots = torch.empty(TURNS if spec.redundant else 1, spec.experts, dtype=torch.int32, device=device)
            self.place(first_placement(spec.experts, spec.placed_over, spec.redundant))
        self.is_first = ranks.rank == 0 or self.placement is not None
        """This rank adds the biases of an expert's products, which only one rank may add."""

    @property
    def of(self) -> int | None:
        """The number of experts on all ranks; None: all experts are here."""
        return None if self.placement is None else self._experts

    def place(self, placement: Placement) -> None:
        """From now on each rank has these experts."""
        owners = [[rank for rank, held in enumerate(placement) if expert in held] for expert in range(self._experts)]
        assert self.slots is not None, "experts are placed whole"
        self.placement, self.held = placement, placement[self._rank]
        slots = [
            [
                self.held.index(expert) if owning[turn % len(owning)] == self._rank else -1
                for expert, owning in enumerate(owners)
            ]
            for turn in range(len(self.slots))
        ]
        self.slots.copy_(torch.tensor(slots, dtype=torch.int32))

    def here(self, topk_ids: Tensor) -> Tensor:
        """The slots that hold the experts `topk_ids [T, top_k]`; -1: another rank computes this one for this row."""
        if self.slots is None:
            return topk_ids
        if len(self.slots) == 1:
            return self.slots[0].index_select(0, topk_ids.flatten()).view_as(topk_ids)  # one launch
        turn = torch.arange(len(topk_ids), device=topk_ids.device).remainder_(len(self.slots)).unsqueeze(1)
        return self.slots[turn, topk_ids]

    def slots_of(self, expert: int) -> list[int]:
        """The slots of this rank that hold an expert."""
        return [slot for slot, held in enumerate(self.held) if held == expert]

    def shape(self, name: str) -> tuple[int, int]:
        """Outputs and inputs of what a checkpoint calls "gate", "up", "gate_up" or "down" of an expert."""
        whole = self.width.whole
        return (self._hidden, whole) if name == "down" else ((2 * whole if name == "gate_up" else whole), self._hidden)

    def parts(self, name: str, first: int = 0) -> tuple[Part, ...]:
        """The parts of a matrix that take a checkpoint's tensor; the expert begins at the matrix's output `first`."""
        (held, whole), rows = self.width, range(self._hidden)
        if name == "down":
            return (Part(first, rows, held, whole),)
        if name != "gate_up":
            return (Part(first + (len(held) if name == "up" and self._gated else 0), held, rows),)
        if len(held) == whole:
            return (Part(first, range(2 * whole), rows),)
        return Part(first, held, rows), Part(first + len(held), range(whole + held.start, whole + held.stop), rows)
