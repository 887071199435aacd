"""Tables with a row for each token."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kvern.layers.build import Build
from kvern.layers.linear import Weighted
from kvern.layers.linear_format import LinearFormat
from kvern.layers.linear_method import LinearMethod, LinearShape
from kvern.layers.loadable import Loadable, copy_rows


class Embedding(Weighted):
    """`ids [T] -> [T, width]`, times `scale` rounded to the model's dtype, as the models that scale were trained.

    `name`: what a checkpoint calls the table.
    """

    def __init__(self, vocab_size: int, width: int, scale: float, build: Build, *, name: str = "embed_tokens") -> None:
        super().__init__(width, {name: vocab_size}, build)
        self._multiply = build.on_rows.scale
        self.scale = float(torch.tensor(scale, dtype=build.dtype))

    def _make_method(self, build: Build) -> LinearMethod:
        [(name, vocab_size)] = self.outputs.items()
        return self._stored(
            build.linear_format(name), LinearShape(vocab_size, self.inputs, self.dtype, self.device), build
        )

    def _stored(self, stored: LinearFormat, shape: LinearShape, build: Build) -> LinearMethod:
        return stored.embedding(shape, build)

    def forward(self, ids: Tensor) -> Tensor:
        embedded = self.method.embed(ids)
        return embedded if self.scale == 1.0 else self._multiply(embedded, self.scale)


class Table(Loadable):
    """Rows `[count, width]` of learned positions, or of kinds of tokens; the checkpoint calls them `name`."""

    def __init__(self, name: str, count: int, width: int, build: Build) -> None:
        super().__init__(build.path)
        self.name = name
        self.weight = build.empty(count, width)

    def forward(self, ids: Tensor) -> Tensor:
        """`ids [T] int64 -> [T, width]`."""
        return F.embedding(ids, self.weight)

    def parts(self) -> dict[str, tuple[int, ...]]:
        return {f"{self.name}.weight": tuple(self.weight.shape)}

    def load(self, part: str, tensor: Tensor, first_row: int = 0) -> None:
        copy_rows(self.weight, tensor, first_row)


class LookupTable(Embedding):
    """A table that nothing is multiplied by."""

    def _stored(self, stored: LinearFormat, shape: LinearShape, build: Build) -> LinearMethod:
        return stored.table(shape, build)


class ShortTable(LookupTable):
    """One without rows for the last tokens, which take the first row."""

    def forward(self, ids: Tensor) -> Tensor:
        [count] = self.outputs.values()
        return super().forward(torch.where(ids < count, ids, 0))
