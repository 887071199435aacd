"""Rows of activations in the order in which the codes of a quantized matrix want them (`kernels/codes.py`)."""

import torch
import triton
import triton.language as tl

from kvern.kernels.launch import Launcher, cdiv, overlaps, wait_for_previous

BLOCK = 1024


@Launcher
@triton.jit
def _arrange_kernel(
    x: tl.tensor,
    order: tl.tensor,
    out: tl.tensor,
    inputs,
    x_stride,
    ORDER: tl.constexpr,
    APART: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = place < inputs
    source = place
    if APART:
        half = inputs // 2
        source = tl.where(place < half, 2 * place, 2 * (place - half) + 1)
    if ORDER:
        source = tl.load(order + source, mask=known, other=0)
    values = tl.load(x + row * x_stride + source, mask=known, other=0.0)
    tl.store(out + row * inputs + place, values, mask=known)


def arrange(x: torch.Tensor, order: torch.Tensor | None, apart: bool) -> torch.Tensor:
    """`x [T, inputs]`, first in the `order [inputs]` int32; if `apart`, the even ones, then the odd. Moves x twice."""
    rows, inputs = x.shape
    out = torch.empty(rows, inputs, dtype=x.dtype, device=x.device)
    overlap = overlaps(x.device)
    _arrange_kernel[(rows, cdiv(inputs, BLOCK))](
        x,
        x if order is None else order,
        out,
        inputs,
        x.stride(0),
        order is not None,
        apart,
        BLOCK,
        overlap,
        num_warps=4,
        launch_pdl=overlap,
    )
    return out
