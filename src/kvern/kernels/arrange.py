"""Rows of activations in the order in which the codes of a quantized matrix want them (`kernels/codes.py`)."""

from typing import Literal

import torch
import triton
import triton.language as tl

from kvern.kernels.launch import Launcher, cdiv, overlaps, wait_for_previous

BLOCK = 1024

Arrangement = Literal["", "planes", "lanes"]
"""Of a row's inputs: as they are; the even ones, then the odd; as `kernels/stream_packed_sums.py` says."""


@triton.jit
def source_in_lanes(place):
    """The input that a column multiplies: bits 1 and 2 of its number go up, and others down, to make room for them."""
    return (place & ~127) | ((place & 6) << 4) | ((place & 96) >> 2) | ((place & 1) << 2) | ((place & 24) >> 3)


@Launcher
@triton.jit
def _arrange_kernel(
    x: tl.tensor,
    order: tl.tensor,
    out: tl.tensor,
    inputs,
    x_stride,
    ORDER: tl.constexpr,
    ARRANGEMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = place < inputs
    source = place
    if ARRANGEMENT == "planes":
        half = inputs // 2
        source = tl.where(place < half, 2 * place, 2 * (place - half) + 1)
    elif ARRANGEMENT == "lanes":
        source = source_in_lanes(place)
    if ORDER:
        source = tl.load(order + source, mask=known, other=0)
    values = tl.load(x + row * x_stride + source, mask=known, other=0.0)
    tl.store(out + row * inputs + place, values, mask=known)


def arrange(x: torch.Tensor, order: torch.Tensor | None, arrangement: Arrangement) -> torch.Tensor:
    """`x [T, inputs]`, first in the `order [inputs]` int32, then as the arrangement says. Moves x twice.

    In lanes there is a multiple of 128 inputs.
    """
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
        arrangement,
        BLOCK,
        overlap,
        num_warps=4,
        launch_pdl=overlap,
    )
    return out
