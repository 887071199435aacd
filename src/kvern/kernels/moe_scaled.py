"""The experts of a mixture as products of codes of eight bits with codes of eight bits, e4m3 or int8.

As the grouped products of `kernels/moe_packed.py`; x and what gate and up make are rounded to codes before
(`kernels/quantize_rows.py`), with scales of rows or of runs of inputs, so that no code is made a number. Where scales
are of less than rows, the sums of a step are made plain before they are added up. Matrix units multiply 64 rows of a
tile at least and 8 columns: of few rows of x, which are the columns then, by weights.

The matrix units add products of e4m3 in about 14 bits. Sums of a step are added to others in float32, but in blocks of
128 rows, whose sums leave no registers for those of a step.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from kvern.kernels.activation import activate
from kvern.kernels.launch import Launcher, cdiv, next_power_of_2, overlaps, stages, wait_for_previous
from kvern.kernels.moe import HOPPER_GROUP, HOPPER_ROWS, Tile, Tiles, rows_of_block, sum_parts
from kvern.kernels.moe_direct import inputs_of_step
from kvern.kernels.moe_routing import Alignment, align
from kvern.kernels.packed import Packed
from kvern.kernels.quantize_rows import Coding

if TYPE_CHECKING:
    from kvern.kernels.product_hopper import RowScales

Rounded = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""`x [T, inputs] ->` codes [T, inputs], and float32 scales [T, n] of runs of inputs / n."""

ROWS = 128
"""The rows of the largest blocks."""
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
    total, values, x_by, codes, scale, row, start, inputs: tl.constexpr, SCALES_GROUP: tl.constexpr,
    PER: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr, INPUTS: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """The sums `[ROWS, OUTPUTS]` after a step: rows of x times `row [OUTPUTS]` of the weights. TURNED: transposed."""
    column = start + tl.arange(0, INPUTS)
    tile = codes + row[None, :] * inputs + column[:, None]
    weights = tl.load(tile) if EVEN else tl.load(tile, mask=(column < inputs)[:, None], other=0.0)
    SUMS: tl.constexpr = tl.int32 if codes.dtype.element_ty == tl.int8 else tl.float32
    first = tl.trans(weights) if TURNED else values
    second = tl.trans(values) if TURNED else weights
    if WHOLE and (codes.dtype.element_ty == tl.int8 or values.shape[0] >= 128):
        total = tl.dot(first, second, total, out_dtype=SUMS)
    elif WHOLE:
        total += tl.dot(first, second)
    else:
        part = tl.dot(first, second, out_dtype=SUMS).to(tl.float32)
        by = tl.load(scale + (row // PER) * tl.cdiv(inputs, SCALES_GROUP) + start // SCALES_GROUP)
        if TURNED:
            total += part * by[:, None] * x_by[None, :]
        else:
            total += part * x_by[:, None] * by[None, :]
    return total


@triton.jit
def _plain(total, x_by, scale, row, PER: tl.constexpr, WHOLE: tl.constexpr, TURNED: tl.constexpr):
    """The sums `[ROWS, OUTPUTS]`."""
    if TURNED:
        total = tl.trans(total)
    if WHOLE:
        total = total.to(tl.float32) * x_by[:, None] * tl.load(scale + row // PER)[None, :]
    return total


@Launcher
@triton.jit(do_not_specialize=["pairs"])
def _coded_experts_kernel(
    x: tl.tensor,
    x_scale: tl.tensor,
    codes: tl.tensor,
    scale: tl.tensor,
    weights: tl.tensor,
    sorted_pairs: tl.tensor,
    block_experts: tl.tensor,
    out: tl.tensor,
    pairs,
    scale_stride: tl.int64,
    run_stride: tl.int64,
    inputs: tl.constexpr,
    outputs: tl.constexpr,
    top_k: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    X_GROUP: tl.constexpr,
    SCALES_GROUP: tl.constexpr,
    PER: tl.constexpr,
    WHOLE: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    SIDE_BY_SIDE: tl.constexpr,
    TURNED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """GATED: the product with gate and up, of a token of x for each pair; else with down, of a row for each pair."""
    if OVERLAP:
        wait_for_previous()
    block = tl.program_id(1) * SIDE_BY_SIDE + tl.program_id(0) % SIDE_BY_SIDE
    expert = tl.load(block_experts + block).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(sorted_pairs + block * ROWS + tl.arange(0, ROWS))
    live = pair < pairs
    output = tl.program_id(0) // SIDE_BY_SIDE * OUTPUTS + tl.arange(0, OUTPUTS)
    row = expert * (outputs * (1 + GATED)) + tl.minimum(output, outputs - 1)
    line = pair.to(tl.int64)
    if GATED:
        line = (pair // top_k).to(tl.int64)
    INTEGERS: tl.constexpr = WHOLE and codes.dtype.element_ty == tl.int8
    total = tl.zeros([OUTPUTS, ROWS] if TURNED else [ROWS, OUTPUTS], tl.int32 if INTEGERS else tl.float32)
    other = total
    x_by = tl.load(x_scale + line * scale_stride, mask=live, other=0.0)
    for start in tl.range(0, inputs, INPUTS):
        column = start + tl.arange(0, INPUTS)
        mask = live[:, None] if EVEN else live[:, None] & (column < inputs)[None, :]
        values = tl.load(x + line[:, None] * inputs + column[None, :], mask=mask, other=0.0)
        if not WHOLE:
            x_by = tl.load(x_scale + line * scale_stride + start // X_GROUP * run_stride, mask=live, other=0.0)
        total = _step(
            total, values, x_by, codes, scale, row, start, inputs, SCALES_GROUP, PER, WHOLE, EVEN, INPUTS, TURNED
        )
        if GATED:
            other = _step(
                other, values, x_by, codes, scale, row + outputs, start, inputs, SCALES_GROUP, PER, WHOLE, EVEN,
                INPUTS, TURNED,
            )  # fmt: skip
    result = _plain(total, x_by, scale, row, PER, WHOLE, TURNED)
    if GATED:
        result = activate(result, KIND) * _plain(other, x_by, scale, row + outputs, PER, WHOLE, TURNED)
    else:
        result *= tl.load(weights + pair, mask=live, other=0.0)[:, None]
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
    topk_ids, weights = topk_ids.contiguous(), weights.contiguous()
    some = None if of is None else topk_ids
    rows = rows_of_block(tokens * top_k, of or experts)
    if hopper and rows == ROWS:
        return _coded_on_hopper(x, gate_up, down, weights, topk_ids, activation, experts, rounded, add, some)
    cut = TILES[rows][tiles]
    blocks = align(topk_ids, experts, rows, 1 if hopper else cut.gate_up.group)
    gated = torch.empty(tokens * top_k, width, dtype=x.dtype, device=x.device)
    parts = torch.empty(tokens * top_k, x.shape[1], dtype=x.dtype, device=x.device)
    if hopper:
        from kvern.kernels.stream_experts_hopper import stream_experts

        early = [isinstance(coding, Coding) and coding.late and not coding.group for coding in rounded]
        codes, scales = _with_scales(rounded[0](x.contiguous()), gate_up)
        stream_experts(codes, gate_up.codes, gated, blocks, rows, top_k, activation, scales=scales, early=early[0])
        codes, scales = _with_scales(rounded[1](gated), down)
        stream_experts(codes, down.codes, parts, blocks, rows, weights=weights, scales=scales, early=early[1])
    else:
        _multiply(*rounded[0](x.contiguous()), gate_up, weights, blocks, gated, rows, cut.gate_up, top_k, activation)
        _multiply(*rounded[1](gated), down, weights, blocks, parts, rows, cut.down, top_k, None)
    return parts if top_k == 1 and add is None and some is None else sum_parts(parts, top_k, add, some=some)


def hopper_codes(code: str, dtype: torch.dtype, hidden: int, width: int) -> bool:
    """True if `hopper_experts` holds, for codes with scales of whole rows."""
    return code == "e4m3" and dtype.itemsize == 2 and hidden % 16 == 0 and width % 16 == 0


def _with_scales(rounded: tuple[torch.Tensor, torch.Tensor], matrix: Packed) -> "tuple[torch.Tensor, RowScales]":
    """Codes of x, and their scales beside the matrix's."""
    from kvern.kernels.product_hopper import RowScales

    assert matrix.scale is not None
    codes, scales = rounded
    return codes, RowScales(scales, matrix.scale, matrix.outputs_per_scale)


def _coded_on_hopper(
    x: torch.Tensor,
    gate_up: Packed,
    down: Packed,
    weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str,
    experts: int,
    rounded: Sequence[Rounded],
    add: torch.Tensor | None,
    some: torch.Tensor | None,
) -> torch.Tensor:
    from kvern.kernels.product_hopper import experts_product

    pairs, top_k = topk_ids.numel(), topk_ids.shape[1]
    blocks = align(topk_ids, experts, HOPPER_ROWS, HOPPER_GROUP)
    codes, scales = _with_scales(rounded[0](x.contiguous()), gate_up)
    gated = torch.empty(blocks.pairs.shape[0], gate_up.codes.shape[0] // experts // 2, dtype=x.dtype, device=x.device)
    experts_product(codes, gate_up.codes, gated, blocks, pairs, HOPPER_GROUP, activation, top_k, scales)
    codes, scales = _with_scales(rounded[1](gated), down)
    parts = torch.empty(blocks.pairs.shape[0], x.shape[1], dtype=x.dtype, device=x.device)
    experts_product(codes, down.codes, parts, blocks, pairs, HOPPER_GROUP, scales=scales)
    return sum_parts(parts, top_k, add, blocks.places, weights, some)


def _multiply(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    matrix: Packed,
    weights: torch.Tensor,
    blocks: Alignment,
    out: torch.Tensor,
    rows: int,
    tile: Tile,
    top_k: int,
    activation: str | None,
) -> None:
    """`activation`: with gate and up; None: with down, times the weights of the pairs."""
    assert matrix.scale is not None
    (pairs, outputs), inputs = out.shape, x.shape[1]
    gated = activation is not None
    form = Scales.of(x_scale, matrix, inputs)
    overlap = overlaps(x.device)
    halves = 2 if gated else 1
    # Sums of a step beside those of all take twice the registers.
    wide = min(tile.outputs, 256 if form.whole else 128) // halves
    wide = min(wide, max(16, next_power_of_2(outputs)))
    step = inputs_of_step(inputs, tile.inputs)
    wanted = tile.stages if form.whole or rows < ROWS else tile.stages - 1
    _coded_experts_kernel[(tile.group * cdiv(outputs, wide), blocks.experts.shape[0] // tile.group)](
        x,
        x_scale,
        matrix.codes,
        matrix.scale,
        weights,
        blocks.pairs,
        blocks.experts,
        out,
        pairs,
        x_scale.stride(0),
        x_scale.stride(1),
        inputs,
        outputs,
        top_k,
        activation or "",
        gated,
        *form,
        inputs % step == 0,
        rows,
        wide,
        step,
        tile.group,
        rows < TALL,
        overlap,
        num_warps=tile.warps,
        num_stages=stages(x.device, wanted, (rows + wide * halves) * step),
        launch_pdl=overlap,
    )
