"""Products of PyTorch's libraries in which weights and activations have a byte, for several rows on a GPU.

Activations are rounded first, as the format says. Which product is used, or whether weights are made plain instead, is
for the tuner to say.
"""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvern.kernels.launch import capability
from kvern.kernels.quantize_rows import quantize_rows, scale_products
from kvern.layers.linear_method import Product

if TYPE_CHECKING:
    from kvern.layers.quantized.scaled import ScaledMethod

BLOCK = 128
"""Outputs and inputs of the blocks, and inputs of the groups of activations, that cuBLAS knows."""


def library_products(method: "ScaledMethod") -> Mapping[str, Product]:
    """Those that know the form of a matrix, on its device, by name. All is loaded."""
    form, (outputs, inputs, dtype, device) = method.form, method.shape
    how, card = form.activations, capability(device)
    if how is None or how.code != form.code or not how.symmetric or method.zero is not None:
        return {}
    if outputs % 16 or inputs % 16:
        return {}
    by_rows = not form.block.inputs and not how.group
    if form.code == "int8":
        return {"int_mm": partial(_int_mm, method)} if by_rows and card >= 80 else {}
    if dtype != torch.bfloat16 or card < 89:
        return {}
    if by_rows:
        return {"scaled_mm": partial(_scaled_mm, method)}
    whole = outputs % BLOCK == 0 and inputs % BLOCK == 0 and form.block == (BLOCK, BLOCK)
    if whole and how.group == BLOCK and method.rows_per_scale == BLOCK and card == 90:
        return {"scaled_mm by blocks": partial(_scaled_mm_by_blocks, method, _as_cublas_reads(method.scale))}
    return {}


def activation_codes(method: "ScaledMethod", x: Tensor, columns: bool = False) -> tuple[Tensor, Tensor]:
    """`x [T, inputs]` as codes of the weights' dtype, and float32 scales of rows, or of groups of inputs."""
    form = method.form
    assert form.activations is not None
    static = method.input_scale if form.static else None
    return quantize_rows(x.contiguous(), form.code, form.activations.group, static, form.activations.limit, columns)


def _scaled_mm(method: "ScaledMethod", x: Tensor, bias: Tensor | None) -> Tensor:
    """e4m3 by e4m3, a scale for each token and each output."""
    codes, by_row = activation_codes(method, x)
    by_output = method.scale.view(1, -1)
    out: Tensor = torch._scaled_mm(
        codes, method.codes.t(), by_row, by_output, bias, out_dtype=x.dtype, use_fast_accum=True
    )
    return out


def _scaled_mm_by_blocks(method: "ScaledMethod", scale: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """e4m3 by e4m3, a scale for each token's 128 inputs and each block of 128 x 128 weights."""
    codes, by_group = activation_codes(method, x, columns=True)
    out: Tensor = torch._scaled_mm(codes, method.codes.t(), by_group, scale, out_dtype=x.dtype)
    return out if bias is None else out + bias


def _as_cublas_reads(scale: Tensor) -> Tensor:
    """`[outputs / 128, inputs / 128]` transposed, its columns at multiples of four numbers."""
    outputs, groups = scale.shape
    padded = torch.zeros(outputs, -(-groups // 4) * 4, device=scale.device)
    padded[:, :groups] = scale
    return padded[:, :groups].t()


def _int_mm(method: "ScaledMethod", x: Tensor, bias: Tensor | None) -> Tensor:
    """int8 by int8 as integers, to which the scales of tokens and outputs are applied."""
    codes, by_row = activation_codes(method, x)
    return scale_products(torch._int_mm(codes, method.codes.t()), by_row, method.scale, bias, x.dtype)
