"""Plain weights on a GPU, multiplied by cuBLAS, or by a Triton kernel where one was measured to be faster.

Products of few rows read all weights and compute little; there the fastest way depends on the shape.
"""

from bisect import bisect_left
from collections.abc import Hashable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kvern.kernels.linear import (
    NOTHING,
    Around,
    MatmulShape,
    MatvecShape,
    ProductShape,
    StreamShape,
    matvec,
    small_matmul,
)
from kvern.layers.few_rows import matvec_shape
from kvern.layers.linear_method import LinearShape, Product, RowProduct
from kvern.layers.unquantized import UnquantizedMethod

Shape = MatvecShape | MatmulShape | StreamShape | ProductShape | None
"""The shape of a kernel; None: cuBLAS."""

CANDIDATES: Mapping[int, tuple[Shape, ...]] = {
    1: (None, MatvecShape(4, 512, 4, stages=3), MatvecShape(2, 1024, 4, unroll=2), MatvecShape(4, 512, 4, unroll=4)),
    8: (
        None,
        MatmulShape(8, 64, 64, 4, 3),
        MatmulShape(8, 64, 64, 4, 5, splits=2),
        MatmulShape(8, 64, 128, 4, 3, splits=2),
        MatmulShape(8, 64, 256, 4, 5, splits=2),
    ),
    16: (
        None,
        MatmulShape(16, 64, 64, 4, 5),
        MatmulShape(16, 64, 128, 4, 5),
        MatmulShape(16, 64, 128, 4, 5, splits=2),
        MatmulShape(16, 64, 256, 4, 4, splits=2),
    ),
    32: (
        None,
        MatmulShape(32, 64, 128, 4, 5),
        MatmulShape(32, 128, 64, 8, 5),
        MatmulShape(32, 64, 128, 4, 3, splits=2),
        MatmulShape(32, 64, 128, 4, 5, splits=2),
    ),
    64: (
        None,
        MatmulShape(64, 64, 128, 4, 4),
        MatmulShape(64, 128, 64, 4, 5),
        MatmulShape(64, 64, 128, 4, 4, splits=2),
        MatmulShape(64, 128, 128, 8, 4, splits=2),
    ),
}
"""The shapes that are timed for up to this many rows; more rows are bound by arithmetic and left to cuBLAS."""

FLOAT32_CANDIDATES: Mapping[int, tuple[Shape, ...]] = {
    1: CANDIDATES[1],
    16: (None, MatmulShape(16, 32, 64, 4, 3), MatmulShape(16, 32, 64, 4, 3, splits=2)),
    64: (None, MatmulShape(32, 32, 64, 4, 3)),
}
"""Numbers of four bytes are multiplied on the ordinary cores, which takes small tiles."""

DETERMINISTIC = MatmulShape(64, 128, 64, 4, 4)
"""The one way to multiply if a row's result must not depend on the number of rows."""

MOST_TILES = 1 << 14
"""The most tiles of a product whose inputs are split; a tile has at least 64 outputs, or 32 of float32."""


def candidates_of(dtype: torch.dtype) -> Mapping[int, tuple[Shape, ...]]:
    """The shapes that are timed for numbers of this dtype, by the most rows."""
    return CANDIDATES if dtype.itemsize < 4 else FLOAT32_CANDIDATES


class TunedMethod(UnquantizedMethod):
    """Plain weights with a way to multiply for each number of rows; `default` for many, `single` for one until timed.

    `arrived` are zeros that kernels count in, shared by all methods of a device. Without `candidates` nothing is timed.
    """

    def __init__(
        self,
        shape: LinearShape,
        default: Shape,
        single: Shape,
        arrived: Tensor,
        candidates: Mapping[int, tuple[Shape, ...]],
        name: str,
    ) -> None:
        super().__init__(shape)
        self.name = name
        self.arrived, self._candidates = arrived, candidates
        self._most = sorted(candidates)
        self._ways = [single if most == 1 else default for most in self._most] + [default]

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._multiply_by(self._way(x), x, bias)

    def _way(self, x: Tensor) -> Shape:
        return self._ways[bisect_left(self._most, x.shape[0])]

    def row_product(self) -> RowProduct:
        return self._multiply_row

    def _multiply_row(self, x: Tensor, bias: Tensor | None, around: Around = NOTHING) -> Tensor:
        shape = matvec_shape(self.shape.outputs, self.shape.inputs, around.activation is not None)
        return matvec(x, self.weight, bias, shape, around)

    def candidates(self) -> Mapping[int, Mapping[Hashable, Product]]:
        return {
            most: {_plain(shape): partial(self._multiply_by, shape) for shape in shapes}
            for most, shapes in self._candidates.items()
        }

    def choose(self, rows: int, candidate: Hashable) -> None:
        shape = next(shape for shape in self._candidates[rows] if _plain(shape) == candidate)
        self._ways[self._most.index(rows)] = shape

    def _multiply_by(self, shape: Shape, x: Tensor, bias: Tensor | None) -> Tensor:
        if shape is None:
            return F.linear(x, self.weight, bias)
        if isinstance(shape, MatvecShape):
            return matvec(x, self.weight, bias, shape)
        assert isinstance(shape, MatmulShape)
        return small_matmul(x, self.weight, bias, shape, self.arrived)


def _plain(shape: Shape) -> tuple[int, ...] | None:
    return None if shape is None else tuple(shape)
