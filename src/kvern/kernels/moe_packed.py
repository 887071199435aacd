"""The experts of a mixture whose weights are quantized (`kernels/codes.py`), as `kernels/moe.py` has plain ones.

All experts' rows stand in one matrix: gate and up `[experts * 2 * width, hidden]`, down `[experts * hidden, width]`.
For one or a few tokens a program takes the outputs of one token (direct), otherwise blocks of rows of one expert are
multiplied on the matrix units (grouped): weights `[outputs, inputs]`, made of their codes in registers, times the
transposed rows. So an expert's codes are read once for each of its blocks.
"""

from functools import partial

import torch
import triton
import triton.language as tl

from kvern.kernels.activation import activate_gated
from kvern.kernels.arrange import arrange
from kvern.kernels.codes import (
    CODES,
    INTERLEAVED,
    Form,
    Matrix,
    form_of,
    interleaved,
    matrix_of,
    numbers,
    places,
    planes_of,
    scales,
    times_rows,
    weights,
)
from kvern.kernels.launch import Launcher, cdiv, ended, next_power_of_2, stages, wait_for_previous
from kvern.kernels.moe import DETERMINISTIC_ROWS, Tile, rows_of_block
from kvern.kernels.moe_direct import inputs_of_step, runs_direct
from kvern.kernels.moe_routing import Alignment, Routed, align, through_blocks
from kvern.kernels.packed import Packed
from kvern.kernels.packed_product import MOST_CHUNK, add_row_step, ended_sums

TILES = {
    16: Tile(64, 128, 1, 4, 5),
    32: Tile(64, 128, 1, 4, 4),
    64: Tile(128, 128, 4, 8, 3),
    128: Tile(128, 64, 8, 8, 4),
}
"""Tiles by the rows of a block."""
FLOAT32_TILE = Tile(32, 64, 1, 4, 2)
DIRECT_OUTPUTS = 8
DIRECT_INPUTS = 512
DIRECT_WARPS = 4
"""The outputs of a program, and the inputs and warps of one step, of a direct product."""
FEWEST_INPUTS = 128
"""The fewest inputs of a step without masks: shorter ones would be too many."""
MOST_COPIES = 24
"""The most copies of a step in the code of a product by down: with more a compiler takes minutes."""


@triton.jit
def _values(x_rows, start, live, inputs: tl.constexpr, PLANE: tl.constexpr, FORM: tl.constexpr):
    """The inputs of a plane, of rows of x: [COLUMNS, ROWS]. Of an interleaved code as `arrange` makes them."""
    place = places(start, PLANE, FORM)
    mask = live[None, :] if FORM.even else live[None, :] & (place < inputs)[:, None]
    if interleaved(FORM.code):
        place = PLANE * (inputs // 2) + start // 2 + tl.arange(0, FORM.inputs // 2)
    return tl.load(x_rows[None, :] + place[:, None], mask=mask, other=0.0)


@triton.jit
def _tiles(matrix, row, start, inputs: tl.constexpr, FORM: tl.constexpr, BY_STEP: tl.constexpr):
    """The weights of a step, and what their products are multiplied by if that is one number for a row (BY_STEP)."""
    if BY_STEP:
        by, _ = scales(matrix, row, start, inputs, 0, FORM)
        return numbers(matrix, row, start, inputs, FORM), by
    else:
        return weights(matrix, row, start, inputs, FORM), 1.0


@triton.jit
def _multiply(total, tiles, by, values, PLANE: tl.constexpr, BY_STEP: tl.constexpr):
    """The sums `[OUTPUTS, ROWS]` after a plane of a step."""
    tile = tiles[PLANE].to(values.dtype)
    if BY_STEP:
        total += by * tl.dot(tile, values, input_precision="ieee")
    else:
        total = tl.dot(tile, values, total, input_precision="ieee")
    return total


@Launcher
@triton.jit(do_not_specialize=["pairs"])
def _grouped_kernel(
    x, matrix: Matrix, bias, pair_weights, blocks: Alignment, out, pairs, x_stride: tl.int64, inputs: tl.constexpr,
    outputs: tl.constexpr, top_k: tl.constexpr, KIND: tl.constexpr, SIDE_BY_SIDE: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, TO_APART: tl.constexpr, BY_STEP: tl.constexpr, FORM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The product with gate and up, of a token of x for each pair; without a KIND that with down, of a row for each.

    TO_APART: the even outputs come before the odd ones.
    """
    GATED: tl.constexpr = KIND != ""
    wait_for_previous(OVERLAP)
    block = tl.program_id(1) * SIDE_BY_SIDE + tl.program_id(0) % SIDE_BY_SIDE
    expert = tl.load(blocks.experts + block).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(blocks.pairs + block * ROWS + tl.arange(0, ROWS))
    live = pair < pairs
    output = tl.program_id(0) // SIDE_BY_SIDE * OUTPUTS + tl.arange(0, OUTPUTS)
    row = expert * ((2 if GATED else 1) * outputs) + tl.minimum(output, outputs - 1)
    x_rows = x + (pair // top_k).to(tl.int64) * x_stride if GATED else x + pair.to(tl.int64) * inputs
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    up = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for start in tl.range(0, inputs, FORM.inputs):
        if not BY_STEP:
            total = ended(total)
            if GATED:
                up = ended(up)
        tiles, by = _tiles(matrix, row, start, inputs, FORM, BY_STEP)
        if GATED:
            ups, up_by = _tiles(matrix, row + outputs, start, inputs, FORM, BY_STEP)
        for plane in tl.static_range(planes_of(FORM.code)):
            values = _values(x_rows, start, live, inputs, plane, FORM)
            total = _multiply(total, tiles, by, values, plane, BY_STEP)
            if GATED:
                up = _multiply(up, ups, up_by, values, plane, BY_STEP)
    total = times_rows(total, matrix, row, FORM)
    if bias is not None:
        total += tl.load(bias + row).to(tl.float32)[:, None]
    if GATED:
        up = times_rows(up, matrix, row + outputs, FORM)
        if bias is not None:
            up += tl.load(bias + row + outputs).to(tl.float32)[:, None]
        total = activate_gated(total, up, KIND)
    else:
        total *= tl.load(pair_weights + pair, mask=live, other=0.0)[None, :]
    place = output
    if TO_APART:
        place = output % 2 * (outputs // 2) + output // 2
    target = out + pair.to(tl.int64)[None, :] * outputs + place[:, None]
    tl.store(target, total.to(out.dtype.element_ty), mask=live[None, :] & (output < outputs)[:, None])


@Launcher
@triton.jit
def _direct_gate_up_kernel(
    x, matrix: Matrix, bias, topk_ids, out, x_stride: tl.int64, hidden: tl.constexpr, width: tl.constexpr,
    top_k: tl.constexpr, KIND: tl.constexpr, OUTPUTS: tl.constexpr, FORM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_previous(OVERLAP)
    pair = tl.program_id(1).to(tl.int64)
    expert = tl.load(topk_ids + pair).to(tl.int64)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    known = output < width
    row = expert * (2 * width) + tl.minimum(output, width - 1)
    COLUMNS: tl.constexpr = FORM.inputs // planes_of(FORM.code)
    gate = tl.full([OUTPUTS, COLUMNS // FORM.chunk], 0.0, tl.float32)
    up = tl.full([OUTPUTS, COLUMNS // FORM.chunk], 0.0, tl.float32)
    squares = 0.0
    for start in tl.range(0, hidden, FORM.inputs):
        gate, up, squares = add_row_step(
            gate, up, squares, x + pair // top_k * x_stride, None, matrix, row, row + width, start, hidden,
            FORM, True, False,
        )  # fmt: skip
    first = ended_sums(tl.sum(gate, axis=1), matrix, row, known, bias, FORM)
    second = ended_sums(tl.sum(up, axis=1), matrix, row + width, known, bias, FORM)
    tl.store(out + pair * width + output, activate_gated(first, second, KIND).to(out.dtype.element_ty), mask=known)


@Launcher
@triton.jit
def _direct_down_kernel(
    x, matrix: Matrix, bias, pair_weights, topk_ids, add, out, add_stride: tl.int64, hidden: tl.constexpr,
    width: tl.constexpr, top_k: tl.constexpr, UNROLL: tl.constexpr, OUTPUTS: tl.constexpr, FORM: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_previous(OVERLAP)
    token = tl.program_id(1).to(tl.int64)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    known = output < hidden
    INPUTS: tl.constexpr = FORM.inputs
    COLUMNS: tl.constexpr = INPUTS // planes_of(FORM.code)
    result = tl.zeros([OUTPUTS], tl.float32)
    for choice in tl.range(0, top_k, loop_unroll_factor=UNROLL):  # codes of some experts come together
        pair = token * top_k + choice
        row = tl.load(topk_ids + pair).to(tl.int64) * hidden + tl.minimum(output, hidden - 1)
        total = tl.full([OUTPUTS, COLUMNS // FORM.chunk], 0.0, tl.float32)
        squares = 0.0
        for start in tl.static_range(0, width, INPUTS):
            total, _, squares = add_row_step(
                total, total, squares, x + pair * width, None, matrix, row, row, start, width, FORM, False, False
            )
        part = ended_sums(tl.sum(total, axis=1), matrix, row, known, bias, FORM)
        result += part * tl.load(pair_weights + pair)
    if add is not None:
        result += tl.load(add + token * add_stride + output, mask=known, other=0.0).to(tl.float32)
    tl.store(out + token * hidden + output, result.to(out.dtype.element_ty), mask=known)


def one_by_one(topk_ids: torch.Tensor, experts: int, gate_up: Packed, down: Packed) -> bool:
    """True if so few tokens are not sorted by expert (direct)."""
    tokens, top_k = topk_ids.shape
    return runs_direct(tokens, top_k, experts, (gate_up.codes.nbytes + down.codes.nbytes) // experts)


def packed_experts(
    x: torch.Tensor,
    gate_up: Packed,
    down: Packed,
    weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str,
    *,
    experts: int,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
    add: torch.Tensor | None = None,
    deterministic: bool = False,
    of: int | None = None,
) -> torch.Tensor:
    """Sum x through the experts chosen, times their weights.

    x              [T, hidden], rows may have gaps
    gate_up        [experts * 2 * width, hidden]: of each expert rows of the gate, then rows of up; no order
    down           [experts * hidden, width]
    weights        [T, top_k] float32
    topk_ids       [T, top_k] int32 or int64
    biases         [experts, 2 * width] of gate and up, and [experts, hidden] of down, or None
    add            [T, hidden] that is added to the sum, or None; rows may have gaps
    deterministic  a token's result depends on no other token, and on no number of tokens
    of             as `fused_experts` has it
    returns        [T, hidden] in the dtype of x; sums in float32

    Moves the codes and scales of each expert that is chosen once, if it gets no more rows than a block has.
    """
    (tokens, top_k), width = topk_ids.shape, gate_up.codes.shape[0] // experts // 2
    routed = Routed.over(x, weights, topk_ids, add, of)
    gate_up_bias, down_bias = biases or (None, None)
    if not deterministic and of is None and one_by_one(topk_ids, experts, gate_up, down):
        gated = _direct_gate_up(routed, gate_up, gate_up_bias, width, activation)
        return _direct_down(routed, gated, down, down_bias)
    rows = DETERMINISTIC_ROWS if deterministic else rows_of_block(tokens * top_k, of or experts)
    tile = TILES[rows]
    if x.element_size() == 4:
        rows, tile = 16, FLOAT32_TILE
    apart = down.code in INTERLEAVED
    first = partial(_grouped, gate_up, gate_up_bias, tile, activation=activation, top_k=top_k, to_apart=apart)
    second = partial(_grouped, down, down_bias, tile, weights=routed.weights)
    return through_blocks(routed, align(routed.topk_ids, experts, rows, tile.group), width, first, second)


def _form(matrix: Packed, inputs: int, step: int, most_chunk: int) -> Form:
    """The form of a matrix of so many inputs; a step is of at most `step` of them, and of whole blocks."""
    step = max(inputs_of_step(inputs, step, FEWEST_INPUTS), CODES[matrix.code].block, 32)
    return form_of(matrix, inputs, step, most_chunk)


def _grouped(
    matrix: Packed,
    bias: torch.Tensor | None,
    tile: Tile,
    x: torch.Tensor,
    blocks: Alignment,
    out: torch.Tensor,
    *,
    activation: str | None = None,
    top_k: int = 1,
    weights: torch.Tensor | None = None,
    to_apart: bool = False,
) -> None:
    """A `Product`: with an activation that with gate and up; else with down, times the pairs' weights.

    x         with an activation rows as they are; else the even columns before the odd ones if the code is interleaved
    to_apart  `out` has its even columns before the odd ones
    """
    (pairs, outputs), rows = out.shape, blocks.rows
    inputs = x.shape[1]
    if activation is not None and matrix.code in INTERLEAVED:
        x = arrange(x, None, "planes")
    form = _form(matrix, inputs, tile.inputs, tile.inputs)
    # All weights of a row have one scale in a step, and no offset.
    by_step = form.code in ("e4m3", "int8") and matrix.zero is None and not form.scales_rows
    halves = 1 if activation is None else 2
    wide = min(tile.outputs // halves, max(16, next_power_of_2(outputs)))
    size, columns = x.element_size(), form.inputs // planes_of(form.code)
    tile_bytes = rows * form.inputs * size + matrix.bytes_of_step(wide * halves, form.inputs, inputs)
    _grouped_kernel[(tile.group * cdiv(outputs, wide), blocks.experts.shape[0] // tile.group)](
        x,
        matrix_of(matrix),
        bias,
        weights,
        blocks,
        out,
        pairs,
        x.stride(0),
        inputs,
        outputs,
        top_k,
        activation or "",
        tile.group,
        rows,
        wide,
        to_apart,
        by_step and form.chunk == form.inputs,
        form,
        num_warps=tile.warps,
        num_stages=stages(x.device, tile.stages, tile_bytes, wide * halves * columns * size),
    )


def _direct_gate_up(
    routed: Routed, gate_up: Packed, bias: torch.Tensor | None, width: int, activation: str
) -> torch.Tensor:
    """`activation(gate) * up` of every pair: [pairs, width].

    `bias [experts, 2 * width]` is added to gate and up, if it is given.
    Moves the codes and scales of gate and up of every pair's expert.
    """
    x, topk_ids = routed.x, routed.topk_ids
    pairs, hidden = topk_ids.numel(), x.shape[1]
    out = torch.empty(pairs, width, dtype=x.dtype, device=x.device)
    outputs = min(DIRECT_OUTPUTS, next_power_of_2(width))
    _direct_gate_up_kernel[(cdiv(width, outputs), pairs)](
        x,
        matrix_of(gate_up),
        bias,
        topk_ids,
        out,
        x.stride(0),
        hidden,
        width,
        topk_ids.shape[1],
        activation,
        outputs,
        _form(gate_up, hidden, DIRECT_INPUTS, MOST_CHUNK),
        num_warps=DIRECT_WARPS,
    )
    return out


def steps_of_down(down: Packed, width: int) -> tuple[Form, int]:
    """The steps of a product by down, and of how many experts codes come together."""
    form = _form(down, width, DIRECT_INPUTS, MOST_CHUNK)
    together = 2 if down.scale is None else 4  # scales among the codes take many instructions
    return form, max(1, min(together, MOST_COPIES // cdiv(width, form.inputs)))


def _direct_down(routed: Routed, gated: torch.Tensor, down: Packed, bias: torch.Tensor | None) -> torch.Tensor:
    """gated [T * top_k, width] through down, summed with the weights: [T, hidden]. The sum is never rounded.

    `bias [experts, hidden]` is added to each product, if it is given.
    Moves the codes and scales of down of every pair's expert.
    """
    topk_ids, add = routed.topk_ids, routed.add
    (tokens, top_k), hidden = topk_ids.shape, routed.x.shape[1]
    width = gated.shape[1]
    out = torch.empty(tokens, hidden, dtype=gated.dtype, device=gated.device)
    outputs = min(DIRECT_OUTPUTS, next_power_of_2(hidden))
    form, together = steps_of_down(down, width)
    _direct_down_kernel[(cdiv(hidden, outputs), tokens)](
        gated,
        matrix_of(down),
        bias,
        routed.weights,
        topk_ids,
        add,
        out,
        0 if add is None else add.stride(0),
        hidden,
        width,
        top_k,
        together,
        outputs,
        form,
        num_warps=DIRECT_WARPS,
    )
    return out
