"""The experts of a mixture as products of codes of eight bits with codes of eight bits, e4m3 or int8.

As the grouped products of `kernels/moe_packed.py`; x and what gate and up make are rounded to codes before
(`kernels/quantize_rows.py`), with scales of rows or of runs of inputs, so that no code is made a number. Where scales
are of less than rows, the sums of a step are made plain before they are added up. Matrix units multiply 64 rows of a
tile at least and 8 columns: of few rows of x, which are the columns then, by weights.

The matrix units add products of e4m3 in about 14 bits. Sums of a step are added to others in float32, but in blocks of
128 rows, whose sums leave no registers for those of a step.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvern.kernels.activation import activate
from kvern.kernels.launch import Launcher, cdiv, next_power_of_2, stages, wait_for_previous
from kvern.kernels.moe import HOPPER_GROUP, HOPPER_ROWS, Tile, Tiles, hopper_product, rows_of_block
from kvern.kernels.moe_direct import inputs_of_step
from kvern.kernels.moe_routing import Alignment, Routed, align, through_blocks
from kvern.kernels.packed import Packed
from kvern.kernels.quantize_rows import Coding

Rounded = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""`x [T, inputs] ->` codes [T, inputs], and float32 scales [T, n] of runs of inputs / n."""

ROWS = 128
"""The rows of the largest tiles."""
TILES = {
    16: (Tiles(Tile(128, 128, 1, 4, 3), Tile(128, 128, 1, 4, 4)), Tiles(*[Tile(128, 128, 1, 4, 6)] * 2)),
    32: (Tiles(*[Tile(128, 128, 1, 4, 4)] * 2), Tiles(*[Tile(128, 128, 1, 4, 3)] * 2)),
    64: (Tiles(*[Tile(128, 128, 4, 4, 4)] * 2), Tiles(*[Tile(128, 128, 1, 4, 4)] * 2)),
    ROWS: (Tiles(*[Tile(256, 128, 8, 8, 4)] * 2), Tiles(*[Tile(128, 128, 8, 4, 4)] * 2)),
}
"""Tiles by the rows of a block: the ones to time; the first is used until then.

A step is of no more inputs than a scale stands for.
"""
TALL = 64
"""Blocks of fewer rows are columns of the matrix units' tiles."""


class Scales(NamedTuple):
    """The layout of scales: of runs of `x_group` inputs of a row of x, of `group` inputs and `per` rows of weights.

    `whole`: both have scales of whole rows.
    """

    x_group: int
    group: int
    per: int
    whole: bool

    @classmethod
    def of(cls, x_scale: torch.Tensor, weight: Packed, inputs: int) -> "Scales":
        """Returns the layout for rows of so many inputs."""
        runs = x_scale.shape[1]
        x_group = inputs if runs == 1 else cdiv(inputs, runs)
        return cls(x_group, weight.group, weight.outputs_per_scale, runs == 1 and weight.group == inputs)


@triton.jit
def _step(
    total, values, x_by, codes, scale, row, start, inputs: tl.constexpr, FORM: tl.constexpr, EVEN: tl.constexpr,
    INPUTS: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """The sums `[ROWS, OUTPUTS]` after a step: rows of x times `row [OUTPUTS]` of the weights. TURNED: transposed."""
    column = start + tl.arange(0, INPUTS)
    tile = codes + row[None, :] * inputs + column[:, None]
    weights = tl.load(tile) if EVEN else tl.load(tile, mask=(column < inputs)[:, None], other=0.0)
    SUMS: tl.constexpr = tl.int32 if codes.dtype.element_ty == tl.int8 else tl.float32
    first = tl.trans(weights) if TURNED else values
    second = tl.trans(values) if TURNED else weights
    if FORM.whole and (codes.dtype.element_ty == tl.int8 or values.shape[0] >= 128):
        total = tl.dot(first, second, total, out_dtype=SUMS)
    elif FORM.whole:
        total += tl.dot(first, second)
    else:
        part = tl.dot(first, second, out_dtype=SUMS).to(tl.float32)
        by = tl.load(scale + (row // FORM.per) * tl.cdiv(inputs, FORM.group) + start // FORM.group)
        if TURNED:
            total += part * by[:, None] * x_by[None, :]
        else:
            total += part * x_by[:, None] * by[None, :]
    return total


@triton.jit
def _plain(total, x_by, scale, row, FORM: tl.constexpr, TURNED: tl.constexpr):
    """The sums `[ROWS, OUTPUTS]`."""
    if TURNED:
        total = tl.trans(total)
    if FORM.whole:
        total = total.to(tl.float32) * x_by[:, None] * tl.load(scale + row // FORM.per)[None, :]
    return total


@Launcher
@triton.jit(do_not_specialize=["pairs"])
def _coded_experts_kernel(
    x, x_scale, codes, scale, pair_weights, blocks: Alignment, out, pairs, scale_stride: tl.int64,
    run_stride: tl.int64, inputs: tl.constexpr, outputs: tl.constexpr, top_k: tl.constexpr, KIND: tl.constexpr,
    FORM: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    SIDE_BY_SIDE: tl.constexpr, TURNED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The product with gate and up, of a token of x for each pair; without a KIND that with down, of a row for each."""
    GATED: tl.constexpr = KIND != ""
    wait_for_previous(OVERLAP)
    block = tl.program_id(1) * SIDE_BY_SIDE + tl.program_id(0) % SIDE_BY_SIDE
    expert = tl.load(blocks.experts + block).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(blocks.pairs + block * ROWS + tl.arange(0, ROWS))
    live = pair < pairs
    output = tl.program_id(0) // SIDE_BY_SIDE * OUTPUTS + tl.arange(0, OUTPUTS)
    row = expert * (outputs * (2 if GATED else 1)) + tl.minimum(output, outputs - 1)
    line = pair.to(tl.int64)
    if GATED:
        line = (pair // top_k).to(tl.int64)
    INTEGERS: tl.constexpr = FORM.whole and codes.dtype.element_ty == tl.int8
    total = tl.zeros([OUTPUTS, ROWS] if TURNED else [ROWS, OUTPUTS], tl.int32 if INTEGERS else tl.float32)
    other = total
    x_by = tl.load(x_scale + line * scale_stride, mask=live, other=0.0)
    for start in tl.range(0, inputs, INPUTS):
        column = start + tl.arange(0, INPUTS)
        mask = live[:, None] if EVEN else live[:, None] & (column < inputs)[None, :]
        values = tl.load(x + line[:, None] * inputs + column[None, :], mask=mask, other=0.0)
        if not FORM.whole:
            x_by = tl.load(x_scale + line * scale_stride + start // FORM.x_group * run_stride, mask=live, other=0.0)
        total = _step(total, values, x_by, codes, scale, row, start, inputs, FORM, EVEN, INPUTS, TURNED)
        if GATED:
            other = _step(other, values, x_by, codes, scale, row + outputs, start, inputs, FORM, EVEN, INPUTS, TURNED)
    result = _plain(total, x_by, scale, row, FORM, TURNED)
    if GATED:
        result = activate(result, KIND) * _plain(other, x_by, scale, row + outputs, FORM, TURNED)
    else:
        result *= tl.load(pair_weights + pair, mask=live, other=0.0)[:, None]
    target = out + pair.to(tl.int64)[:, None] * outputs + output[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=live[:, None] & (output < outputs)[None, :])


def coded_experts(
    x: torch.Tensor,
    gate_up: Packed,
    down: Packed,
    weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str,
    *,
    experts: int,
    rounded: Sequence[Rounded],
    add: torch.Tensor | None = None,
    hopper: bool = False,
    tiles: int = 0,
    of: int | None = None,
) -> torch.Tensor:
    """Computes `packed_experts` for weights without zeros or factors; `rounded` makes codes of x, and of down's inputs.

    hopper   the kernels for Hopper GPUs multiply; all scales are of whole rows
    tiles    which of `TILES` do else

    Moves the codes of each expert that is chosen once, if it gets no more rows than a block has.
    """
    (tokens, top_k), width = topk_ids.shape, gate_up.codes.shape[0] // experts // 2
    routed = Routed.over(x, weights, topk_ids, add, of)
    rows = rows_of_block(tokens * top_k, of or experts)
    cut = TILES[rows][tiles]
    padded = hopper and rows == HOPPER_ROWS
    group = HOPPER_GROUP if padded else 1 if hopper else cut.gate_up.group
    first, second = (
        partial(_multiply, matrix, coding, None if hopper else tile)
        for matrix, coding, tile in zip((gate_up, down), rounded, cut, strict=True)
    )
    return through_blocks(
        routed,
        align(routed.topk_ids, experts, rows, group),
        width,
        partial(first, activation=activation, top_k=top_k),
        partial(second, weights=routed.weights),
        padded=padded,
    )


def hopper_codes(code: str, dtype: torch.dtype, hidden: int, width: int) -> bool:
    """True if `hopper_experts` holds, for codes with scales of whole rows."""
    return code == "e4m3" and dtype.itemsize == 2 and hidden % 16 == 0 and width % 16 == 0


def _multiply(
    matrix: Packed,
    rounded: Rounded,
    tile: Tile | None,
    x: torch.Tensor,
    blocks: Alignment,
    out: torch.Tensor,
    *,
    activation: str | None = None,
    top_k: int = 0,
    weights: torch.Tensor | None = None,
) -> None:
    """A `Product`: with an activation that with gate and up; else with down, times the pairs' weights.

    tile   None: the kernels for Hopper GPUs multiply
    top_k  as `hopper_product` has it
    """
    assert matrix.scale is not None
    codes, x_scale = rounded(x.contiguous())
    if tile is None:
        from kvern.kernels.product_hopper import RowScales

        scales = RowScales(x_scale, matrix.scale, matrix.outputs_per_scale)
        early = isinstance(rounded, Coding) and rounded.late and not rounded.group
        hopper_product(
            matrix.codes, codes, blocks, out,
            activation=activation, top_k=top_k, weights=weights, scales=scales, early=early,
        )  # fmt: skip
        return
    (pairs, outputs), rows = out.shape, blocks.rows
    inputs = codes.shape[1]
    halves = 1 if activation is None else 2
    form = Scales.of(x_scale, matrix, inputs)
    # Sums of a step beside those of all take twice the registers.
    wide = min(tile.outputs, 256 if form.whole else 128) // halves
    wide = min(wide, max(16, next_power_of_2(outputs)))
    step = inputs_of_step(inputs, tile.inputs)
    wanted = tile.stages if form.whole or rows < ROWS else tile.stages - 1
    _coded_experts_kernel[(tile.group * cdiv(outputs, wide), blocks.experts.shape[0] // tile.group)](
        codes,
        x_scale,
        matrix.codes,
        matrix.scale,
        weights,
        blocks,
        out,
        pairs,
        x_scale.stride(0),
        x_scale.stride(1),
        inputs,
        outputs,
        max(1, top_k),
        activation or "",
        form,
        inputs % step == 0,
        rows,
        wide,
        step,
        tile.group,
        rows < TALL,
        num_warps=tile.warps,
        num_stages=stages(x.device, wanted, (rows + wide * halves) * step),
    )
