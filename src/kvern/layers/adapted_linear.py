"""Linear layers to whose output each row's adapter adds: `y += up[a] @ (down[a] @ x)`.

They take the place of a built model's linear layers. Which row uses which adapter comes along with the rows; where none
uses one, they are what they replaced.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, TypeVar

import torch
from torch import Tensor

from kvern.layers.linear import Linear
from kvern.layers.module import Module
from kvern.layers.unquantized import multiply_on

Rows = TypeVar("Rows")

Matrices = tuple[Tensor, Tensor]
"""The matrices of one adapter for one part of a layer: `down [rank, inputs]` and `up [outputs, rank]`, scaled."""

STACKED_ROWS = 128
"""So few rows are multiplied with the matrices of all adapters at once: launches cost more than what is too much."""


@dataclass(frozen=True)
class AdaptedRows:
    """The index of each row's adapter, [rows] int64, -1 for none, and the rows of each that is used."""

    adapter_indices: Tensor
    segments: list[tuple[int, slice | Tensor]]

    @classmethod
    def of(cls, adapter_indices: list[int], device: torch.device) -> "AdaptedRows":
        """From the indices of all rows."""
        on_host = torch.tensor(adapter_indices)
        distinct = sorted(set(adapter_indices) - {-1})
        if len(distinct) == 1 and -1 not in adapter_indices:
            return cls(on_host.to(device), [(distinct[0], slice(None))])
        return cls(
            on_host.to(device), [(index, (on_host == index).nonzero().flatten().to(device)) for index in distinct]
        )


class AdaptedLinear(Module, Generic[Rows]):
    """A linear layer and what adapters add to it. Adapters stand in places; `load` fills one."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.base = linear
        self.inputs, self.outputs = linear.inputs, linear.outputs
        ends = list(accumulate(linear.outputs.values()))
        self._columns = dict(zip(linear.outputs, map(slice, [0, *ends], ends), strict=False))

    def forward(self, x: Tensor, rows: Rows | None = None) -> Tensor:
        """`rows`: which adapter each row of `x [T, inputs]` uses; None: no row uses one."""
        if rows is None:
            plain: Tensor = self.base(x)
            return plain
        out = self.base.method.multiply(x, self.base.added)
        self.add(out, x, rows)
        return self.base.total(out)

    @abstractmethod
    def load(self, adapter_index: int, parts: Mapping[str, Matrices]) -> None:
        """Put an adapter into a place; parts of the layer that it does not change are missing."""

    @abstractmethod
    def add(self, out: Tensor, x: Tensor, rows: Rows) -> None:
        """Add to `out [rows, outputs]` what the rows' adapters make of `x [rows, inputs]`."""


class StackedLinear(AdaptedLinear[AdaptedRows]):
    """Adapters added by PyTorch; the matrices of all places and parts stand side by side.

    `down [R, inputs]`, `up [R, outputs]`, which is zero where a rank is of another part, and `owners [R]` int64, the
    index of the adapter of each of the R ranks.
    """

    def __init__(self, linear: Linear) -> None:
        super().__init__(linear)
        self._multiply = multiply_on(linear.device)
        self._places: dict[int, tuple[Tensor, Tensor]] = {}
        self._stack()

    def load(self, adapter_index: int, parts: Mapping[str, Matrices]) -> None:
        ranks = [down.shape[0] for down, _ in parts.values()]
        ends = list(accumulate(ranks, initial=0))
        up = self._like(ends[-1], sum(self.outputs.values())).zero_()
        for part, first, last in zip(parts, ends, ends[1:], strict=False):
            up[first:last, self._columns[part]] = parts[part][1].T
        down = torch.cat([self._like(0, self.inputs), *(down.to(up.device) for down, _ in parts.values())])
        known = self._places.get(adapter_index)
        if known is not None and known[0].shape == down.shape:
            known[0].copy_(down)
            known[1].copy_(up)
        else:
            self._places[adapter_index] = (down, up)
            self._stack()

    def add(self, out: Tensor, x: Tensor, rows: AdaptedRows) -> None:
        if len(rows.segments) == 1 or x.shape[0] > STACKED_ROWS:
            for adapter_index, members in rows.segments:
                down, up = self._places[adapter_index]
                if not down.shape[0]:
                    continue
                low = self._multiply(x[members], down, None)
                if isinstance(members, slice):
                    out.addmm_(low, up)
                else:
                    out.index_add_(0, members, low @ up)
        elif self._owners.shape[0]:
            low = self._multiply(x, self._down, None)  # what others' adapters make of a row may overflow
            out.addmm_(low.masked_fill_(rows.adapter_indices[:, None] != self._owners, 0), self._up)

    def _like(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.base.dtype, device=self.base.device)

    def _stack(self) -> None:
        """Put the places' matrices side by side, and let them be views of that."""
        sizes = [down.shape[0] for down, _ in self._places.values()]
        self._down = torch.cat([self._like(0, self.inputs), *(down for down, _ in self._places.values())])
        outputs = sum(self.outputs.values())
        self._up = torch.cat([self._like(0, outputs), *(up for _, up in self._places.values())])
        owners = [index for index, size in zip(self._places, sizes, strict=True) for _ in range(size)]
        self._owners = torch.tensor(owners, dtype=torch.int64, device=self.base.device)
        views = zip(torch.split(self._down, sizes), torch.split(self._up, sizes), strict=True)
        self._places = dict(zip(self._places, views, strict=True))
