"""Adapters added by Triton kernels, whichever rows use which: one launch more for few rows, two for many."""

from collections.abc import Mapping
from itertools import accumulate

import torch
from torch import Tensor

from kvern.kernels.adapted_product import adapted_product
from kvern.kernels.adapters import CHUNK, MANY_OUTPUTS, add_adapters
from kvern.kernels.linear import MatmulShape
from kvern.layers.adapted_linear import AdaptedLinear, Matrices
from kvern.layers.linear import Linear
from kvern.layers.tuned_linear import TunedMethod

SHAPES = {
    8: MatmulShape(8, 64, 128, 4, 3, splits=2),
    16: MatmulShape(16, 64, 128, 4, 5),
    32: MatmulShape(32, 64, 128, 4, 5),
    64: MatmulShape(64, 64, 128, 4, 4),
}
"""The kernel's shape for a product with adapters, by the most rows; for more rows cuBLAS multiplies first."""
MOST_ROWS = max(SHAPES)
MANY_INPUTS = 8192


def adapted_shape(rows: int, outputs: int, inputs: int) -> MatmulShape:
    """For so many rows, at most MOST_ROWS, of a matrix of this shape; measured on an H200."""
    shape = next(shape for most, shape in SHAPES.items() if rows <= most)
    if outputs >= MANY_OUTPUTS:  # two programs on a processor, one of which begins while the other ends
        return shape._replace(stages=min(shape.stages, 3), splits=1)
    return shape._replace(splits=2) if inputs >= MANY_INPUTS else shape


def joins(ends: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Return whether a layer whose parts end there computes few rows and their adapters in one launch."""
    return dtype.itemsize < 4 and all(end % shape.outputs == 0 for end in ends[:-1] for shape in SHAPES.values())


class FusedAdaptedLinear(AdaptedLinear[Tensor]):
    """The matrices of all places are stacked; an adapter's rank may be lower than `rank`, the highest that fits."""

    def __init__(self, linear: Linear, places: int, rank: int, deterministic: bool) -> None:
        super().__init__(linear)
        dtype = linear.dtype
        device = linear.device
        outputs = linear.outputs
        rank = -(-rank // CHUNK.value) * CHUNK.value
        self._down = torch.zeros(places, len(outputs), rank, linear.inputs, dtype=dtype, device=device)
        self._up = torch.zeros(places, rank, sum(outputs.values()), dtype=dtype, device=device)
        self._ranks = torch.zeros(places, dtype=torch.int32, device=device)
        self._ends = tuple(accumulate(linear.outputs.values()))
        self._deterministic = deterministic
        self._joins = joins(self._ends, dtype) and not deterministic

    def load(self, adapter_index: int, parts: Mapping[str, Matrices]) -> None:
        highest = max((down.shape[0] for down, _ in parts.values()), default=0)
        self._ranks[adapter_index : adapter_index + 1].fill_(highest)
        for index, (part, columns) in enumerate(self._columns.items()):
            down, up = self._down[adapter_index, index, :highest], self._up[adapter_index, :highest, columns]
            rank = 0
            if part in parts:
                matrices = parts[part]
                rank = matrices[0].shape[0]
                down[:rank].copy_(matrices[0], non_blocking=True)
                up[:rank].copy_(matrices[1].T, non_blocking=True)
            if rank < highest:  # the kernels read as many ranks of every part
                down[rank:].zero_()
                up[rank:].zero_()

    def forward(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        method = self.base.method
        if rows is None or not self._joins or x.shape[0] > MOST_ROWS or not isinstance(method, TunedMethod):
            return super().forward(x, rows)
        places = self._down, self._up, self._ranks, self._ends
        shape = adapted_shape(x.shape[0], *method.weight.shape)
        return self.base.total(adapted_product(x, method.weight, self.base.added, rows, *places, shape, method.arrived))

    def add(self, out: Tensor, x: Tensor, rows: Tensor) -> None:
        add_adapters(out, x, rows, self._down, self._up, self._ranks, self._ends, self._deterministic)
