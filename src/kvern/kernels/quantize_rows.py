"""Activations rounded to one byte for products of two such matrices, and the scales applied to integer results."""

import torch
import triton
import triton.language as tl

from kvern.kernels.launch import Launcher, cdiv, next_power_of_2, overlaps, wait_for_previous

DTYPES = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8}
LARGEST = {"e4m3": 448.0, "int8": 127.0}
BLOCK = 4096
"""Inputs of a row that a program has in registers at a time."""
TILE = 2048
"""Inputs of groups, of one row, that a program rounds."""


@triton.jit
def _coded(x, scale, codes, LARGEST: tl.constexpr, INTEGER: tl.constexpr):
    """`x / scale` as the nearest codes, ties to even; what is out of range becomes the largest."""
    value = tl.minimum(tl.maximum(x / scale, -LARGEST), LARGEST)
    if INTEGER:
        value = (value + 12582912.0) - 12582912.0  # numbers of 24 bits that begin at 2^23 are whole
    return value.to(codes.dtype.element_ty)


@Launcher
@triton.jit
def _quantize_rows_kernel(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    static: tl.tensor,
    width,
    limit,
    LARGEST: tl.constexpr,
    INTEGER: tl.constexpr,
    STATIC: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    if STATIC:
        scale = tl.load(static)
    else:
        most = tl.zeros([BLOCK], dtype=tl.float32)
        for first in range(0, width, BLOCK):
            part = tl.load(x + row * width + first + column, mask=first + column < width, other=0.0)
            most = tl.maximum(most, tl.abs(part.to(tl.float32)))
        scale = tl.minimum(tl.maximum(tl.max(most, 0), LARGEST * 1e-12), limit) / LARGEST
    tl.store(scales + row, scale)
    for first in range(0, width, BLOCK):
        inside = first + column < width
        part = tl.load(x + row * width + first + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(codes + row * width + first + column, _coded(part, scale, codes, LARGEST, INTEGER), mask=inside)


@Launcher
@triton.jit
def _quantize_groups_kernel(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    width,
    groups,
    row_stride,
    group_stride,
    LARGEST: tl.constexpr,
    INTEGER: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    GROUPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    within = tl.arange(0, PADDED)
    column = group[:, None] * GROUP + within[None, :]
    inside = (within[None, :] < GROUP) & (column < width)
    part = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(part), 1), LARGEST * 1e-12) / LARGEST
    tl.store(scales + group.to(tl.int64) * group_stride + row * row_stride, scale, mask=group < groups)
    tl.store(codes + row * width + column, _coded(part, scale[:, None], codes, LARGEST, INTEGER), mask=inside)


def quantize_rows(
    x: torch.Tensor,
    code: str,
    group: int = 0,
    static: torch.Tensor | None = None,
    limit: float | None = None,
    columns: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`x [T, I]` as codes [T, I] of "e4m3" or "int8", and float32 scales [T, 1], or [T, I / group] of groups of inputs.

    A scale is that of its largest number, of `limit` at most, or `static [1]` float32. `columns`: scales of
    the same group lie behind one another, as cuBLAS reads them. Moves x once or twice, the second time from a cache,
    and the codes once.
    """
    tokens, width = x.shape
    codes = torch.empty(tokens, width, dtype=DTYPES[code], device=x.device)
    overlap = overlaps(x.device)
    if group:
        groups, padded = cdiv(width, group), next_power_of_2(group)
        shape = (groups, tokens) if columns else (tokens, groups)
        scales = torch.empty(shape, dtype=torch.float32, device=x.device)
        scales = scales.t() if columns else scales
        count = max(1, min(TILE // padded, next_power_of_2(groups)))
        _quantize_groups_kernel[(tokens, cdiv(groups, count))](
            x, codes, scales, width, groups, *scales.stride(), LARGEST[code], code == "int8", group, padded, count,
            overlap, num_warps=4, launch_pdl=overlap,
        )  # fmt: skip
        return codes, scales
    scales = torch.empty(tokens, 1, dtype=torch.float32, device=x.device)
    block = min(BLOCK, next_power_of_2(width))
    _quantize_rows_kernel[(tokens,)](
        x, codes, scales, scales if static is None else static, width, limit or 3e38, LARGEST[code], code == "int8",
        static is not None, block, overlap, num_warps=8, launch_pdl=overlap,
    )  # fmt: skip
    return codes, scales


@Launcher
@triton.jit
def _scale_products_kernel(
    products: tl.tensor,
    by_row: tl.tensor,
    by_output: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    outputs,
    BIASED: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = output < outputs
    result = tl.load(products + row * outputs + output, mask=inside, other=0).to(tl.float32)
    result = result * tl.load(by_row + row) * tl.load(by_output + output, mask=inside, other=0.0)
    if BIASED:
        result += tl.load(bias + output, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * outputs + output, result.to(out.dtype.element_ty), mask=inside)


def scale_products(
    products: torch.Tensor, by_row: torch.Tensor, by_output: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """`products [T, O]` int32 times `by_row [T, 1]` and `by_output [O, 1]` float32, plus a bias: [T, O] of `dtype`."""
    tokens, outputs = products.shape
    out = torch.empty(tokens, outputs, dtype=dtype, device=products.device)
    block, overlap = min(1024, next_power_of_2(outputs)), overlaps(products.device)
    _scale_products_kernel[(tokens, cdiv(outputs, block))](
        products, by_row, by_output, by_row if bias is None else bias, out, outputs, bias is not None, block, overlap,
        num_warps=4, launch_pdl=overlap,
    )  # fmt: skip
    return out
