"""The ends of a pipeline stage, which take the places of embeddings and of the last norm."""

import torch
from torch import Tensor

from kvern.layers.build import Build
from kvern.layers.halves import Update, joined
from kvern.layers.module import Module
from kvern.ranks.stages import Stage


class ReceivedRows(Module):
    """Rows `[T, width]` of a step's tokens, as the stage before handed them on: `ids [T] -> [T, width]`.

    `earlier`: for each of the stage's `earlier_entries` what came beside them last, likewise.
    """

    def __init__(self, width: int, build: Build) -> None:
        super().__init__()
        self._width = width
        self._dtype = build.dtype
        self._device = build.device
        self._stage: Stage = build.ranks.stage
        self.earlier: list[Tensor] = []

    def forward(self, ids: Tensor) -> Tensor:
        return self.taken(self._stage.receive(self.room(len(ids))))

    def room(self, count: int) -> Tensor:
        """Memory for what comes of so many tokens."""
        width = self._width * (1 + len(self._stage.earlier_entries))
        return torch.empty(count, width, dtype=self._dtype, device=self._device)

    def taken(self, rows: Tensor) -> Tensor:
        """The rows `[T, width]` of what came."""
        hidden, *self.earlier = (part.contiguous() for part in torch.split(rows, self._width, -1))
        return hidden


class HandedRows(Module):
    """The residual, which the next stage continues with."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self._add = build.ops.add
        self._sum = build.ranks.sum if build.late_sums else None

    def after(self, hidden: Tensor, update: Update) -> tuple[Tensor, Tensor]:
        """The residual `[T, width]` with `update` added, twice: there is no norm."""
        hidden, update = joined(hidden, update)
        if update is not None:
            hidden = self._add(hidden, update if self._sum is None else self._sum(update))
        return hidden, hidden
