"""A product of few rows and what LoRA adapters add to it.

    shrink    low                    = what adapters make of x                  kernels/adapters.py
    product   out [rows, outputs]    = x @ weight.T + bias + low @ up[adapter of the row].T

The second begins while the first runs, with its own product, and waits for `low` behind that.
"""

import torch
import triton
import triton.language as tl

from kvern.kernels.adapters import (
    CHUNK,
    EXPAND_ADAPTERS,
    LARGEST_TILE,
    SMALLEST_TILE,
    LowRanks,
    four_ends,
    matrices_of_group,
    shrink,
    splits_of,
)
from kvern.kernels.launch import Launcher, gdc_launch_dependents, gdc_wait
from kvern.kernels.linear import MatmulShape, join_splits, sum_of_tile


@Launcher
@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["adapters"])
def _adapted_product_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor | None,
    low: tl.tensor,
    adapters: tl.tensor,
    up: tl.tensor,
    ranks: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    arrived: tl.tensor,
    rows,
    first_end,
    second_end,
    third_end,
    outputs,
    inputs,
    x_stride,
    EVEN: tl.constexpr,
    SPLITS: tl.constexpr,
    LOW: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
    split = tl.program_id(1)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    start = tl.program_id(0) * OUTPUTS
    output = start.to(tl.int64) + tl.arange(0, OUTPUTS)
    using = tl.load(adapters + row, mask=row < rows, other=-1)
    its = tl.load(ranks + using, mask=using >= 0, other=0)
    total = sum_of_tile(
        x, weight, row, output, rows, outputs, inputs, x_stride, split, EVEN, SPLITS, ROWS, OUTPUTS, INPUTS
    )
    if OVERLAP:  # the kernel before has let this one start when x was there, and makes `low` meanwhile
        gdc_wait()
    place = row.to(tl.int64)[None, :] * outputs + output[:, None]
    known = (row < rows)[None, :] & (output < outputs)[:, None]
    last = True
    if SPLITS > 1:
        size = rows.to(tl.int64) * outputs
        last, total = join_splits(total, partial, arrived, place, known, split, size, SPLITS, ROWS, OUTPUTS)
    if last:
        part = (
            (start >= first_end).to(tl.int32) + (start >= second_end).to(tl.int32) + (start >= third_end).to(tl.int32)
        )
        PLACES: tl.constexpr = LOW.places
        TOGETHER: tl.constexpr = LOW.together
        SPLITS_OF_LOW: tl.constexpr = LOW.splits
        width: tl.constexpr = LOW.parts * LOW.most
        its_low = low + row.to(tl.int64)[None, :] * width + part * LOW.most + tl.arange(0, CHUNK)[:, None]
        between = rows.to(tl.int64) * width
        for first in tl.range(0, tl.max(its, axis=0), CHUNK, num_stages=1):
            values = tl.zeros([CHUNK, ROWS], tl.float32)
            for low_split in tl.static_range(SPLITS_OF_LOW):
                values += tl.load(its_low + first + between * low_split, mask=(first < its)[None, :], other=0.0)
            for group in tl.static_range(0, PLACES, TOGETHER):
                mine = (group + tl.arange(0, TOGETHER))[:, None] == using[None, :]
                each = tl.where(mine[:, None, :], values[None, :, :], 0.0).to(up.dtype.element_ty)
                inside = start + tl.arange(0, OUTPUTS) < outputs
                weights = matrices_of_group(up + start, using, ranks, group, first, outputs, inside, LOW)
                each = tl.reshape(each, [TOGETHER * CHUNK, ROWS])
                total = tl.dot(tl.trans(weights), each, total, input_precision="ieee")
        if bias is not None:
            total += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[:, None]
        tl.store(out + place, total.to(out.dtype.element_ty), mask=known)


def adapted_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    adapters: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    ranks: torch.Tensor,
    ends: tuple[int, ...],
    shape: MatmulShape,
    arrived: torch.Tensor,
) -> torch.Tensor:
    """`small_matmul` and what `add_adapters` adds to it, in two launches. Their first products run side by side.

    The arguments are theirs. x must be older than the last kernel that was launched, or made by it; all but the last
    of `ends` are multiples of `shape.outputs`.
    """
    rows, inputs = x.shape
    places, parts, most, _ = down.shape
    first_end, second_end, third_end, outputs = four_ends(ends)
    splits = splits_of(inputs)
    tile = min(LARGEST_TILE, max(SMALLEST_TILE, triton.next_power_of_2(rows)))
    low = shrink(x, adapters, down, ranks, splits, tile)
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    partial = out
    if shape.splits > 1:
        partial = torch.empty(shape.splits, rows, outputs, dtype=torch.float32, device=x.device)
    _adapted_product_kernel[(triton.cdiv(outputs, shape.outputs), shape.splits, triton.cdiv(rows, shape.rows))](
        x,
        weight,
        bias,
        low,
        adapters,
        up,
        ranks,
        out,
        partial,
        arrived,
        rows,
        first_end,
        second_end,
        third_end,
        outputs,
        inputs,
        x.stride(0),
        inputs % shape.inputs == 0,
        shape.splits,
        LowRanks(parts, most, splits, places, min(EXPAND_ADAPTERS, triton.next_power_of_2(places))),
        shape.rows,
        shape.outputs,
        shape.inputs,
        num_warps=shape.warps,
        num_stages=shape.stages_on(x.device, x.element_size()),
    )
    return out
