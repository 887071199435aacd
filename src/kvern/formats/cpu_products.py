"""Multiplication by quantized weights on a CPU, with kernels that read them packed (`kvern/cpu/packed.py`)."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvern.cpu.packed import KINDS, STEP, Groups, GroupsProduct, Int8Matrix, multiply_int8, side_by_side
from kvern.kernels.packed import E2M1, NF4, NON_LINEAR, Packed
from kvern.layers.linear_method import LinearShape

NUMBERS: Mapping[str, Sequence[float] | None] = {
    "int4": range(16),
    "int8": None,
    "e2m1": E2M1,
    "nf4": NF4,
    "iq4_nl": NON_LINEAR,
}
"""The values of 4-bit codes before zero and scale; None: integers of eight bits."""
MIDDLE = 8
"""The zero of int4 without zeros."""


class CpuProduct(Protocol):
    """Multiplies by one matrix, which it stores in another order."""

    def __call__(self, x: Tensor, bias: Tensor | None, first: int = 0, outputs: int | None = None) -> Tensor:
        """Multiplies `x [T, inputs]` to `[T, outputs]`: all outputs, or some from `first`, a multiple of 16."""

    def stored(self) -> Mapping[str, Tensor]:
        """The tensors, each `side_by_side`, that replace a method's parameters, by name."""


class Int8Product:
    """INT8 weights with a scale for each output, times activations that are rounded to INT8 for each token."""

    def __init__(self, shape: LinearShape, codes: Tensor, scale: Tensor, fixed: float, limit: float) -> None:
        self._outputs = shape.outputs
        self._matrix = Int8Matrix(side_by_side(codes, STEP), side_by_side(scale), fixed, limit)

    def __call__(self, x: Tensor, bias: Tensor | None, first: int = 0, outputs: int | None = None) -> Tensor:
        return multiply_int8(x.contiguous(), self._matrix, bias, outputs or self._outputs, first)

    def stored(self) -> Mapping[str, Tensor]:
        return {"codes": self._matrix.codes, "scale": self._matrix.scale}


class PackedProduct:
    """A product with 4-bit or 8-bit codes that have scales for groups; activations of bfloat16 models are rounded."""

    def __init__(self, shape: LinearShape, matrix: Groups) -> None:
        self._outputs, self._matrix = shape.outputs, matrix
        self._product = GroupsProduct(matrix, rounded=shape.dtype == torch.bfloat16)

    def __call__(self, x: Tensor, bias: Tensor | None, first: int = 0, outputs: int | None = None) -> Tensor:
        return self._product(x.contiguous(), bias, first, outputs or self._outputs)

    def stored(self) -> Mapping[str, Tensor]:
        found = {
            name: getattr(self._matrix, name) for name in ("codes", "scale", "zero", "factor", "outer", "outer_zero")
        }
        if found["scale"].dtype == torch.float8_e8m0fnu:
            found["scale"] = found["scale"].view(torch.uint8)
        return {name: lanes for name, lanes in found.items() if lanes is not None}


def packed_product(shape: LinearShape, packed: Packed) -> PackedProduct | None:
    """The product with a matrix that is packed as for GPU kernels; None: no CPU kernel supports it."""
    code = packed.code
    scale = packed.scale
    zero = packed.zero
    group = packed.group
    if code not in NUMBERS or scale is None or packed.outputs_per_scale > 1:
        return None
    if shape.inputs % group or group % (STEP if code == "int8" else 2 * STEP):
        return None
    if code != "int8" and scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    if any(item is not None and item.dtype not in KINDS for item in (scale, zero)):
        return None
    numbers = NUMBERS[code]
    if code == "int4" and zero is None:
        numbers = [number - MIDDLE for number in range(16)]
    factor = None if packed.factor is None else side_by_side(packed.factor.unsqueeze(1))
    zeros = None if zero is None else side_by_side(zero)
    matrix = Groups(
        side_by_side(packed.codes.flatten(1), STEP), numbers, side_by_side(scale), zeros, group, packed.order, factor
    )
    return PackedProduct(shape, matrix)
