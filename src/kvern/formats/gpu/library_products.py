"""Products of PyTorch's libraries in which weights and activations have a byte, for several rows on a GPU.

The format defines the rounding of activations. The tuner chooses among these products and products with plain weights.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kvern.kernels.launch import capability
from kvern.kernels.quantize_rows import Coding, RowCodes, scale_products
from kvern.layers.linear_method import CodesProduct, LinearShape, Product

BLOCK = 128
"""Outputs and inputs of the blocks, and inputs of the groups of activations, that cuBLAS knows."""
CUBLAS_ROWS = 4
"""The multiple of rows that cuBLAS takes with scales for groups, so that groups begin at multiples of 16 bytes."""


class ScaledMatrix(Protocol):
    """A matrix of codes of a byte with float32 scales: the part of `ScaledMethod` that these products read.

    Each scale is of `rows_per_scale` outputs and of the inputs of a block; `block` has 0 outputs or inputs where it is
    as large as the matrix.
    """

    shape: LinearShape
    codes: Tensor
    scale: Tensor
    zero: Tensor | None

    @property
    def rows_per_scale(self) -> int:
        """Outputs that share a scale."""

    @property
    def code(self) -> str:
        """The name of the codes, "e4m3" or "int8"."""

    @property
    def block(self) -> tuple[int, int]:
        """Outputs and inputs that share a scale."""

    def activation_codes(self) -> Coding | None:
        """The coding of activations; None: they stay plain."""


def library_products(method: ScaledMatrix) -> Mapping[str, Product]:
    """The library products that support the form of a loaded matrix, by name."""
    outputs, inputs, dtype, device = method.shape
    coding, card = method.activation_codes(), capability(device)
    if coding is None or method.zero is not None or outputs % 16 or inputs % 16:
        return {}
    by_rows = not method.block[1] and not coding.group
    if method.code == "int8":
        return {"int_mm": CodesProduct(coding, partial(_int_mm, method))} if by_rows and card >= 80 else {}
    if dtype != torch.bfloat16 or card < 89:
        return {}
    if by_rows:
        return {"scaled_mm": CodesProduct(coding, partial(_scaled_mm, method))}
    whole = outputs % BLOCK == 0 and inputs % BLOCK == 0 and method.block == (BLOCK, BLOCK)
    if whole and coding.group == BLOCK and method.rows_per_scale == BLOCK and card == 90:
        multiply = partial(_scaled_mm_by_blocks, method, _as_cublas_reads(method.scale))
        return {"scaled_mm by blocks": CodesProduct(replace(coding, columns=True), multiply)}
    return {}


def _scaled_mm(method: ScaledMatrix, x: RowCodes, bias: Tensor | None) -> Tensor:
    """e4m3 by e4m3, a scale for each token and each output."""
    by_output = method.scale.view(1, -1)
    out: Tensor = torch._scaled_mm(
        x.codes, method.codes.t(), x.scales, by_output, bias, out_dtype=method.shape.dtype, use_fast_accum=True
    )
    return out


def _scaled_mm_by_blocks(method: ScaledMatrix, scale: Tensor, x: RowCodes, bias: Tensor | None) -> Tensor:
    """e4m3 by e4m3, a scale for each token's 128 inputs and each block of 128 x 128 weights."""
    rows, missing = len(x.codes), -len(x.codes) % CUBLAS_ROWS
    codes, scales = x
    if missing:
        codes = F.pad(codes.view(torch.uint8), (0, 0, 0, missing)).view(codes.dtype)
        scales = F.pad(scales.t(), (0, missing)).t()
    out: Tensor = torch._scaled_mm(codes, method.codes.t(), scales, scale, out_dtype=method.shape.dtype)[:rows]
    return out if bias is None else out + bias


def _as_cublas_reads(scale: Tensor) -> Tensor:
    """`[outputs / 128, inputs / 128]` transposed, its columns at multiples of four numbers."""
    outputs, groups = scale.shape
    padded = torch.zeros(outputs, -(-groups // 4) * 4, device=scale.device)
    padded[:, :groups] = scale
    return padded[:, :groups].t()


def _int_mm(method: ScaledMatrix, x: RowCodes, bias: Tensor | None) -> Tensor:
    """int8 by int8 as integers, to which the scales of tokens and outputs are applied."""
    products = torch._int_mm(x.codes, method.codes.t())
    return scale_products(products, x.scales, method.scale, bias, method.shape.dtype)
