"""Linear layers to whose output each row's adapter adds: `y += up[a] @ (down[a] @ x)`.

They take the place of a built model's linear layers. Which row uses which adapter is in a `Selection` that all of them
share and that is set before each step; while no row uses one, they are what they replaced.
"""

from abc import abstractmethod
from collections.abc import Mapping
from itertools import accumulate
from typing import Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kvern.layers.linear import Linear
from kvern.layers.module import Module
from kvern.layers.packed_linear import PackedLinear

Rows = TypeVar("Rows")

Matrices = tuple[Tensor, Tensor]
"""Of one adapter and one part of a layer: `down [rank, inputs]` and `up [outputs, rank]`, its scale within `up`."""

Segments = list[tuple[int, slice | Tensor]]
"""The rows of each adapter that a step uses, by its slot."""


class Selection(Generic[Rows]):
    """Which adapter each row of a step uses.

    `by_count` is keyed by the number of rows, for there are two kinds in a step: a last layer has only those rows that
    are sampled from, and these are fewer. What is not there uses no adapter.
    """

    def __init__(self) -> None:
        self.by_count: dict[int, Rows] = {}


class AdaptedLinear(Module, Generic[Rows]):
    """A linear layer and what adapters add to it. Adapters stand in slots; `load` fills one."""

    def __init__(self, linear: Linear | PackedLinear, selection: Selection[Rows]) -> None:
        super().__init__()
        self.base = linear
        self.inputs, self.outputs = linear.inputs, linear.outputs
        self._by_count = selection.by_count
        ends = list(accumulate(linear.outputs.values()))
        self._columns = dict(zip(linear.outputs, map(slice, [0, *ends], ends), strict=False))

    @property
    def weight(self) -> Tensor:
        """Of the layer alone."""
        return self.base.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x)
        rows = self._by_count.get(x.shape[0])
        if rows is not None:
            self.add(out, x, rows)
        return out

    @abstractmethod
    def load(self, slot: int, parts: Mapping[str, Matrices]) -> None:
        """Put an adapter into a slot; parts of the layer that it does not change are missing."""

    @abstractmethod
    def add(self, out: Tensor, x: Tensor, rows: Rows) -> None:
        """Add to `out [rows, outputs]` what the rows' adapters make of `x [rows, inputs]`."""


class SegmentedLinear(AdaptedLinear[Segments]):
    """One adapter after the other, by PyTorch."""

    def __init__(self, linear: Linear | PackedLinear, selection: Selection[Segments]) -> None:
        super().__init__(linear, selection)
        self._slots: dict[int, list[tuple[slice, Tensor, Tensor]]] = {}

    def load(self, slot: int, parts: Mapping[str, Matrices]) -> None:
        device = self.weight.device
        self._slots[slot] = [
            (self._columns[part], down.to(device), up.to(device)) for part, (down, up) in parts.items()
        ]

    def add(self, out: Tensor, x: Tensor, rows: Segments) -> None:
        for slot, members in rows:
            taken = x[members]
            for columns, down, up in self._slots[slot]:
                out[members, columns] += F.linear(F.linear(taken, down), up)


def segments_of(slots: list[int], device: torch.device) -> Segments:
    """The rows of each slot among those of all rows, -1 for rows without an adapter; empty if all are."""
    distinct = sorted(set(slots) - {-1})
    if len(distinct) == 1 and -1 not in slots:
        return [(distinct[0], slice(None))]
    every = torch.tensor(slots)
    return [(slot, (every == slot).nonzero().flatten().to(device)) for slot in distinct]
