"""Norms, alone and with the residual addition before them, as numbers; root-mean-square norms also as codes."""

import torch
import triton
import triton.language as tl

from kvern.kernels.launch import Launcher, next_power_of_2, wait_for_previous
from kvern.kernels.quantize_rows import Coding, Destination, RowCodes, Strides, Target, store_codes


@Launcher
@triton.jit(do_not_specialize=["strides"])
def _rms_norm_kernel(
    x: tl.tensor,
    update: tl.tensor,
    weight: tl.tensor,
    target: Target,
    strides: Strides,
    row_stride: tl.int64,
    epsilon: tl.float32,
    width: tl.constexpr,
    ADD: tl.constexpr,
    RULE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """RULE: that of codes with scales, or None."""
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    values = tl.load(x + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(update + row * width + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(x + row * row_stride + column, values.to(x.dtype.element_ty), mask=inside)
        values = values.to(x.dtype.element_ty).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, axis=0) / width + epsilon)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if RULE is not None:
        normal = (values * inverse * gain).to(x.dtype.element_ty).to(tl.float32)
        # A thread has as many neighbours as it loads at once: with more, as stores of bytes ask for, sums would differ.
        NEIGHBOURS: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
        column = tl.max_contiguous(column, NEIGHBOURS)
        store_codes(normal, row, column, width, target, strides, RULE)
    else:
        normal = (values * inverse * gain).to(target.out.dtype.element_ty)
        tl.store(target.out + row * width + column, normal, mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """`x / rms(x) * weight` along the last dimension, in float32.

    x [T, width], rows may have gaps; weight [width], any float dtype; the result has the dtype of x. Moves x once in
    and once out.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, (Target(out), Strides(), None), epsilon, next_power_of_2(x.shape[1]))
    return out


def add_rms_norm(x: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """`x += update` in place, then the norm of x: [T, width] each.

    The sum is rounded to the dtype of x before it is normalised, as two separate operations would. Moves x twice,
    update once, the result once.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, update, weight, (Target(out), Strides(), None), epsilon, next_power_of_2(x.shape[1]))
    return out


def coded_rms_norm(
    x: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor, epsilon: float, coding: Coding
) -> RowCodes:
    """Returns `rms_norm`, or `add_rms_norm` with an update, as coded by `coding`, bit for bit.

    In one launch, but of very long rows. Moves what these do, but a byte a number for the result.
    """
    block = coding.block(x.shape[1])
    if not block:
        return coding(rms_norm(x, weight, epsilon) if update is None else add_rms_norm(x, update, weight, epsilon))
    made = coding.empty(x.shape[0], x.shape[1], x.device)
    _launch(x, update, weight, coding.arguments(made), epsilon, block)
    return made


def _launch(
    x: torch.Tensor,
    update: torch.Tensor | None,
    weight: torch.Tensor,
    destination: Destination,
    epsilon: float,
    block: int,
) -> None:
    rows, width = x.shape
    target, strides, rule = destination
    _rms_norm_kernel[(rows,)](
        x,
        x if update is None else update,
        weight,
        target,
        strides,
        x.stride(0),
        epsilon,
        width,
        update is not None,
        rule,
        block,
        num_warps=min(16, max(1, block // 512)),
    )


@Launcher
@triton.jit
def _any_norm_kernel(
    x: tl.tensor,
    update: tl.tensor | None,
    weight: tl.tensor | None,
    bias: tl.tensor | None,
    out: tl.tensor,
    epsilon: tl.float32,
    width: tl.constexpr,
    CENTRED: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    inside = column < width
    values = tl.load(x + row + column, mask=inside, other=0.0).to(tl.float32)
    if update is not None:
        values += tl.load(update + row + column, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(x.dtype.element_ty)
        tl.store(x + row + column, rounded, mask=inside)
        values = rounded.to(tl.float32)
    if CENTRED:
        values = tl.where(inside, values - tl.sum(values, axis=0) / width, 0.0)
    values *= tl.rsqrt(tl.sum(values * values, axis=0) / width + epsilon)
    if weight is not None:
        values *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        values += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + column, values.to(out.dtype.element_ty), mask=inside)


def add_any_norm(
    x: torch.Tensor,
    update: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    epsilon: float,
    kind: str,
) -> torch.Tensor:
    """`x += update` in place, if there is one, then the norm of x, in float32.

    x and update [T, width], contiguous; weight and bias [width], any float dtype; `kind` is "rms" or "layer", which
    takes the mean away. The sum is rounded to the dtype of x before it is normalised. Moves x twice, update once, the
    result once.
    """
    out = torch.empty_like(x)
    block = next_power_of_2(x.shape[1])
    update = None if update is None else update.contiguous()
    _any_norm_kernel[(x.shape[0],)](
        x, update, weight, bias, out, epsilon, x.shape[1], kind == "layer", block,
        num_warps=min(16, max(1, block // 1024)),
    )  # fmt: skip
    return out
