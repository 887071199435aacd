"""Rows of activations in the order in which the codes of a quantized matrix want them (`kernels/codes.py`)."""

from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl

from kvern.kernels.launch import Launcher, cdiv, next_power_of_2, wait_for_previous

BLOCK = 1024

Arrangement = Literal["", "planes", "lanes"]
"""Orders of a row's inputs: as they are; the even ones, then the odd; as `kernels/stream_packed_sums.py` says."""


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
    wait_for_previous(OVERLAP)
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
    _arrange_kernel[(rows, cdiv(inputs, BLOCK))](
        x,
        x if order is None else order,
        out,
        inputs,
        x.stride(0),
        order is not None,
        arrangement,
        BLOCK,
        num_warps=4,
    )
    return out


class ScaledLanes(NamedTuple):
    """Rows in lanes, float16, each multiplied by a power of two so that none of their numbers is as large as 1024.

    values   [T, inputs] float16
    sums     [T, inputs / 16] float16: of each 256 inputs, 16 numbers: the sums of the runs of 32 inputs 0, 4, 1, 5, 2,
             6, 3 and 7; then what rounding takes away from them
    by       [T] float32: what makes them the rows again
    """

    values: torch.Tensor
    sums: torch.Tensor
    by: torch.Tensor


TOP = tl.constexpr(9)
"""The exponent of a row's largest number."""


@Launcher
@triton.jit
def _scaled_lanes_kernel(
    x: tl.tensor,
    gain: tl.tensor | None,
    values: tl.tensor,
    sums: tl.tensor,
    by: tl.tensor,
    inputs,
    x_stride,
    epsilon: tl.float32,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    known = place < inputs
    plain = tl.load(x + row * x_stride + place, mask=known, other=0.0).to(tl.float32)
    source = source_in_lanes(place)
    lanes = tl.load(x + row * x_stride + source, mask=known, other=0.0).to(tl.float32)
    inverse = 1.0
    if gain is not None:
        inverse = tl.rsqrt(tl.sum(plain * plain, axis=0) / inputs + epsilon)
        plain *= tl.load(gain + place, mask=known, other=0.0).to(tl.float32)
        lanes *= tl.load(gain + source, mask=known, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(plain), axis=0)
    exponent = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 27), 227)
    up = ((254 - exponent + TOP) << 23).to(tl.float32, bitcast=True)
    tl.store(by + row, ((exponent - TOP) << 23).to(tl.float32, bitcast=True) * inverse)
    tl.store(values + row * inputs + place, (lanes * up).to(tl.float16), mask=known)
    total = tl.sum(tl.reshape((plain * up).to(tl.float16).to(tl.float32), [BLOCK // 32, 32]), axis=1)
    run = tl.arange(0, BLOCK // 32)
    place = row * (inputs // 16) + run // 8 * 16 + run % 4 * 2 + run % 8 // 4
    high = total.to(tl.float16)
    tl.store(sums + place, high, mask=run * 32 < inputs)
    tl.store(sums + place + 8, (total - high.to(tl.float32)).to(tl.float16), mask=run * 32 < inputs)


def scaled_lanes(x: torch.Tensor, gain: torch.Tensor | None = None, epsilon: float = 0.0) -> ScaledLanes:
    """Returns `x [T, inputs]` (a multiple of 256), or its root-mean-square norm, in lanes with scales. Moves x twice.

    Numbers below 2^-24 of a row's largest are rounded, and all that a gain has multiplied, to 11 bits.
    """
    rows, inputs = x.shape
    made = ScaledLanes(
        torch.empty(rows, inputs, dtype=torch.float16, device=x.device),
        torch.empty(rows, inputs // 16, dtype=torch.float16, device=x.device),
        torch.empty(rows, dtype=torch.float32, device=x.device),
    )
    _scaled_lanes_kernel[(rows,)](
        x,
        gain,
        *made,
        inputs,
        x.stride(0),
        epsilon,
        next_power_of_2(inputs),
        num_warps=8,
    )
    return made
