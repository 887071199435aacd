"""Plain weights on a Hopper GPU: kernels fed by TMA beside cuBLAS and Triton, where they are measured to be faster.

They can activate what gate and up make in the same launch, so that twice as many numbers need not be written and read.
"""

from collections.abc import Hashable, Mapping
from functools import partial

from torch import Tensor

from kvern.kernels.activation import ACTIVATIONS, gated_activation
from kvern.kernels.hopper import hopper_multiplies
from kvern.kernels.linear import NOTHING, Around, MatmulShape, ProductShape, StreamShape
from kvern.kernels.product_hopper import product
from kvern.kernels.stream_hopper import stream_product
from kvern.layers.linear_method import LinearShape, Product
from kvern.layers.tuned_linear import CANDIDATES, Shape, TunedMethod

OWN: Mapping[int, tuple[Shape, ...]] = {
    8: (StreamShape(8, 64, 128, 6, 1), StreamShape(8, 64, 128, 6, 2), StreamShape(8, 128, 64, 9, 1)),
    16: (StreamShape(16, 64, 128, 6, 1), StreamShape(16, 64, 128, 6, 2), StreamShape(16, 128, 64, 8, 1)),
    32: (StreamShape(32, 64, 128, 6, 2), StreamShape(32, 128, 64, 7, 1)),
    64: (StreamShape(64, 64, 128, 6, 2), StreamShape(64, 128, 64, 7, 1)),
    128: (StreamShape(128, 128, 64, 6, 1),),
    256: (ProductShape(2),),
    1024: (ProductShape(8),),
    8192: (ProductShape(8),),
}
"""Kernels that are timed for up to this many rows, the last for more too."""

BESIDE: Mapping[int, tuple[Shape, ...]] = {
    1: CANDIDATES[1][:3],
    16: (MatmulShape(16, 64, 128, 4, 5),),
    32: (MatmulShape(32, 64, 128, 4, 5), MatmulShape(32, 128, 64, 8, 5)),
    64: (MatmulShape(64, 128, 64, 4, 5),),
}
"""Shapes that are timed beside them and cuBLAS: those of `CANDIDATES` that were fastest for some matrix, by 1 %."""

GATED_ALONE = (128, 256, 1024, 8192)
"""Rows for which only the activation makes these kernels faster than cuBLAS."""

MOST_OUTPUTS = 1 << 16
"""A matrix with more is a head, which few rows reach: that many are not timed with it."""


def hopper_candidates(shape: LinearShape) -> Mapping[int, tuple[Shape, ...]]:
    """The shapes that are timed for a matrix, by the most rows; none for a matrix that these kernels do not know."""
    if not hopper_multiplies(shape.dtype, shape.inputs, shape.outputs):
        return {}
    return {1: BESIDE[1]} | {
        most: (None, *BESIDE.get(most, ()), *own)
        for most, own in OWN.items()
        if most <= 256 or shape.outputs <= MOST_OUTPUTS
    }


def can_gate(shape: Shape) -> bool:
    """The matrix units' 64 rows are all gate's or all up's, and a program has the whole sums."""
    return not isinstance(shape, StreamShape) or (shape.outputs == 128 and shape.splits == 1)


class HopperMethod(TunedMethod):
    """Plain weights that are also multiplied by the kernels for Hopper.

    `row`: how one row is streamed, where nothing is done around the product.
    """

    _activation: str | None = None
    row: StreamShape | None = None

    def gated(self, activation: str) -> Product | None:
        if activation not in ACTIVATIONS or self.shape.outputs % 16:
            return None
        self._activation = activation
        self.name = f"{self.name}, {activation} of gate and up"
        return self._multiply_gated

    def _multiply_row(self, x: Tensor, bias: Tensor | None, around: Around = NOTHING) -> Tensor:
        if self.row is None or around is not NOTHING:
            return super()._multiply_row(x, bias, around)
        return stream_product(x, self.weight, bias, self.row, self.arrived)

    def candidates(self) -> Mapping[int, Mapping[Hashable, Product]]:
        if self._activation is None:
            known = super().candidates()
            return {most: {None: ways[None]} if most in GATED_ALONE else ways for most, ways in known.items()}
        return {
            most: {
                None if shape is None else tuple(shape): partial(self._gated_by, shape)
                for shape in shapes
                if can_gate(shape)
            }
            for most, shapes in self._candidates.items()
        }

    def choose(self, rows: int, candidate: Hashable) -> None:
        super().choose(rows, candidate)
        if rows == self._most[-1]:
            self._ways[-1] = self._ways[-2]

    def _multiply_gated(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._gated_by(self._way(x), x, bias)

    def _gated_by(self, shape: Shape, x: Tensor, bias: Tensor | None) -> Tensor:
        assert self._activation is not None
        if isinstance(shape, StreamShape):
            return stream_product(x, self.weight, bias, shape, self.arrived, self._activation)
        if isinstance(shape, ProductShape):
            return product(x, self.weight, bias, shape, self._activation)
        return gated_activation(super()._multiply_by(shape, x, bias), self._activation)

    def _multiply_by(self, shape: Shape, x: Tensor, bias: Tensor | None) -> Tensor:
        if isinstance(shape, StreamShape):
            return stream_product(x, self.weight, bias, shape, self.arrived)
        if isinstance(shape, ProductShape):
            return product(x, self.weight, bias, shape)
        return super()._multiply_by(shape, x, bias)
