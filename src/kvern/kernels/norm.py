"""Root-mean-square norms, alone and with the residual addition before them."""

import torch
import triton
import triton.language as tl

from kvern.kernels.arrange import source_in_lanes
from kvern.kernels.launch import Launcher, next_power_of_2, overlaps, wait_for_previous


@Launcher
@triton.jit
def _rms_norm_kernel(
    x: tl.tensor,
    update: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    row_stride: tl.int64,
    epsilon: tl.float32,
    width: tl.constexpr,
    ADD: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    source = source_in_lanes(column) if LANES else column
    values = tl.load(x + row * row_stride + source, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(update + row * width + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(x + row * row_stride + column, values.to(x.dtype.element_ty), mask=inside)
        values = values.to(x.dtype.element_ty).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, axis=0) / width + epsilon)
    gain = tl.load(weight + source, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, (values * inverse * gain).to(out.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, lanes: bool = False) -> torch.Tensor:
    """`x / rms(x) * weight` along the last dimension, in float32.

    x [T, width], rows may have gaps; weight [width], any float dtype; the result has the dtype of x. Moves x once in
    and once out. `lanes`: arranged as `kernels/arrange.py` does.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, x, weight, out, epsilon, add=False, lanes=lanes)
    return out


def add_rms_norm(x: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """`x += update` in place, then the norm of x: [T, width] each.

    The sum is rounded to the dtype of x before it is normalised, as two separate operations would. Moves x twice,
    update once, the result once.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, update, weight, out, epsilon, add=True, lanes=False)
    return out


def _launch(
    x: torch.Tensor,
    update: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    epsilon: float,
    add: bool,
    lanes: bool,
) -> None:
    rows, width = x.shape
    block = next_power_of_2(width)
    overlap = overlaps(x.device)
    _rms_norm_kernel[(rows,)](
        x,
        update,
        weight,
        out,
        x.stride(0),
        epsilon,
        width,
        add,
        lanes,
        block,
        overlap,
        num_warps=min(16, max(1, block // 512)),
        launch_pdl=overlap,
    )
