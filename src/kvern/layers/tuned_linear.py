"""Plain weights on a GPU, multiplied by cuBLAS, or by a kernel where one was measured to be faster.

Products of few rows read all weights and compute little; there the fastest way depends on the shape. Kernels for Hopper
are fed by TMA, and can activate what gate and up make in the same launch, so that twice as many numbers need not be
written and read.
"""

from bisect import bisect_left
from collections.abc import Hashable, Mapping
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kvern.kernels.activation import ACTIVATIONS, gated_activation
from kvern.kernels.hopper import hopper_multiplies
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
from kvern.kernels.product_hopper import product
from kvern.kernels.stream_hopper import stream_product
from kvern.layers.build_options import BuildOptions
from kvern.layers.linear_method import LinearMethod, LinearShape, Product, RowProduct
from kvern.layers.unquantized import Unquantized, UnquantizedMethod


def matvec_shape(outputs: int, inputs: int, activated: bool = False) -> MatvecShape:
    """The kernel's shape for a matrix of this size; measured on an H200."""
    if activated:
        return MatvecShape(4, 512, 4, stages=4 if inputs > 2048 else 3)
    if outputs <= 2048 or inputs <= 2048:
        return MatvecShape(2, 1024, 4, unroll=2)
    return MatvecShape(4, 512, 4, unroll=2) if inputs < 8192 else MatvecShape(4, 512, 4, stages=3)


def streamed_row(outputs: int, inputs: int) -> StreamShape | None:
    """The shape in which a rank streams the product of one row on Hopper; None: a matrix-vector product is as fast.

    Memory rests while ranks sum, and during the attention of one request. A ring of shared memory in two programs of
    each processor takes more of the weights meanwhile than registers do: 25 MB instead of 9.
    """
    if outputs < 8192:
        return None
    return StreamShape(8, 64, 128, 6, 2 if inputs >= 4096 else 1)


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

    def activated(self, activation: str) -> None:
        """An activation is a launch of its own: cuBLAS, which has one, is one way of several."""

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
            most: {_plain(shape): partial(self._gated_by, shape) for shape in shapes if can_gate(shape)}
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
        if isinstance(shape, StreamShape | ProductShape):
            return self._multiply_by(shape, x, bias, self._activation)
        return gated_activation(super()._multiply_by(shape, x, bias), self._activation)

    def _multiply_by(self, shape: Shape, x: Tensor, bias: Tensor | None, activation: str | None = None) -> Tensor:
        if isinstance(shape, StreamShape):
            return stream_product(x, self.weight, bias, shape, self.arrived, activation)
        if isinstance(shape, ProductShape):
            return product(x, self.weight, bias, shape, activation)
        return super()._multiply_by(shape, x, bias)


class TunedLinear(Unquantized):
    """Plain weights on a GPU. `backend`: by cuBLAS alone, by Triton alone, or by whichever is faster ("auto")."""

    def __init__(self, device: torch.device, backend: Literal["auto", "cublas", "triton"]) -> None:
        self._backend = backend
        self._arrived: dict[torch.device, Tensor] = {}
        self._arrived_on(device)

    def _arrived_on(self, device: torch.device) -> Tensor:
        """The zeros of a device: of "meta" where steps are only recorded."""
        if device not in self._arrived:
            self._arrived[device] = torch.zeros(MOST_TILES, dtype=torch.int32, device=device)
        return self._arrived[device]

    def linear(self, shape: LinearShape, build: BuildOptions) -> LinearMethod:
        if shape.dtype != build.dtype:  # of a router: small, and the kernels are checked in the model's dtype
            return UnquantizedMethod(shape)
        arrived = self._arrived_on(shape.device)
        default = DETERMINISTIC if build.deterministic or self._backend == "triton" else None
        if build.deterministic or self._backend == "cublas":
            return TunedMethod(shape, default, default, arrived, {}, "unquantized")
        single = matvec_shape(shape.outputs, shape.inputs)
        if "hopper_linear" in build.kernels and self._backend == "auto":
            own = hopper_candidates(shape)
            if own:
                method = HopperMethod(shape, default, single, arrived, own, "unquantized on Hopper")
                method.row = streamed_row(shape.outputs, shape.inputs) if build.late_sums else None
                return method
        candidates, name = candidates_of(shape.dtype), "unquantized"
        if self._backend == "triton":
            candidates = {most: tuple(filter(None, shapes)) for most, shapes in candidates.items()}
            name = "unquantized by triton"
        return TunedMethod(shape, default, single, arrived, candidates, name)

    def embedding(self, shape: LinearShape, build: BuildOptions) -> LinearMethod:
        return self.linear(shape, build)
