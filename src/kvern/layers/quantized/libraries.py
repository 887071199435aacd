"""Products of PyTorch's libraries that take weights and activations of one byte: for many rows, on a GPU."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvern.kernels.launch import capability
from kvern.kernels.quantize_rows import quantize_rows, scale_products
from kvern.layers.linear_method import Product

if TYPE_CHECKING:
    from kvern.layers.quantized.scaled import ScaledMethod

BLOCKS = 128
"""Outputs and inputs of the blocks, and inputs of the groups of activations, that cuBLAS knows."""


def library_product(method: "ScaledMethod") -> tuple[str, Product] | None:
    """The product and its name; None: no library has one for this shape, these scales, or this card."""
    form, (outputs, inputs, dtype, device) = method.form, method.shape
    how, card = form.activations, capability(device)
    if how is None or how.code != form.code or not how.symmetric or method.zero is not None:
        return None
    if dtype != torch.bfloat16 or outputs % 16 or inputs % 16:
        return None
    by_rows = not form.block.inputs and method.rows_per_scale == 1
    if form.code == "int8":
        return ("int_mm", _IntMM(method)) if by_rows and card >= 80 else None
    if by_rows and card >= 89:
        return "scaled_mm", _ScaledMM(method)
    whole = outputs % BLOCKS == 0 and inputs % BLOCKS == 0
    blocks = form.block == (BLOCKS, BLOCKS) and how.group == BLOCKS and method.rows_per_scale == BLOCKS
    return ("scaled_mm by blocks", _BlockMM(method)) if blocks and whole and card == 90 else None


class _ScaledMM:
    """e4m3 by e4m3, a scale for each token and each output."""

    def __init__(self, method: "ScaledMethod") -> None:
        self._method = method

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        codes, by_row = self._rounded(x)
        method = self._method
        out: Tensor = torch._scaled_mm(
            codes,
            method.codes.t(),
            scale_a=by_row,
            scale_b=method.scale.view(1, -1),
            bias=bias,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
        return out

    def _rounded(self, x: Tensor) -> tuple[Tensor, Tensor]:
        form = self._method.form
        assert form.activations is not None
        static = self._method.input_scale if form.static else None
        return quantize_rows(x.contiguous(), form.code, form.activations.group, static, form.activations.limit)


class _BlockMM(_ScaledMM):
    """e4m3 by e4m3, a scale for each token's 128 inputs and each block of 128 x 128 weights."""

    def __init__(self, method: "ScaledMethod") -> None:
        super().__init__(method)
        outputs, groups = method.scale.shape
        padded = torch.zeros(outputs, -(-groups // 4) * 4, device=method.scale.device)  # as cuBLAS reads them
        padded[:, :groups] = method.scale
        self._scale = padded[:, :groups].t()

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        codes, by_group = self._rounded(x)
        weight = self._method.codes.t()
        out: Tensor = torch._scaled_mm(
            codes, weight, scale_a=by_group, scale_b=self._scale, out_dtype=torch.bfloat16, use_fast_accum=True
        )
        return out if bias is None else out + bias


class _IntMM(_ScaledMM):
    """int8 by int8 as integers, to which the scales of tokens and outputs are applied."""

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        codes, by_row = self._rounded(x)
        products = torch._int_mm(codes, self._method.codes.t())
        return scale_products(products, by_row, self._method.scale, bias, x.dtype)
