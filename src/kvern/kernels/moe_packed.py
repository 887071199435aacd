"""The experts of a mixture whose weights are quantized (`kernels/codes.py`), as `kernels/moe.py` has plain ones.

All experts' rows stand in one matrix: gate and up `[experts * 2 * width, hidden]`, down `[experts * hidden, width]`.
For one or a few tokens a program takes the outputs of one token (direct), otherwise blocks of rows of one expert are
multiplied on the matrix units (grouped): weights `[outputs, inputs]`, made of their codes in registers, times the
transposed rows. So an expert's codes are read once for each of its blocks.
"""

import torch
import triton
import triton.language as tl

from kvern.kernels.activation import activate_gated
from kvern.kernels.arrange import arrange
from kvern.kernels.codes import INTERLEAVED, numbers, places, planes_of, scales, weights
from kvern.kernels.launch import Launcher, cdiv, ended, next_power_of_2, overlaps, stages, wait_for_previous
from kvern.kernels.moe import DETERMINISTIC_ROWS, Tile, rows_of_block, sum_parts
from kvern.kernels.moe_direct import runs_direct
from kvern.kernels.moe_packed_direct import Form, direct_down, direct_gate_up, tensors_of
from kvern.kernels.moe_routing import Alignment, align
from kvern.kernels.packed import Packed

TILES = {
    16: Tile(64, 128, 1, 4, 5),
    32: Tile(64, 128, 1, 4, 4),
    64: Tile(128, 128, 4, 8, 3),
    128: Tile(128, 64, 8, 8, 4),
}
"""Tiles by the rows of a block."""
FLOAT32_TILE = Tile(32, 64, 1, 4, 2)


@triton.jit
def _values(
    x_rows,
    start,
    live,
    inputs: tl.constexpr,
    CODE: tl.constexpr,
    APART: tl.constexpr,
    EVEN: tl.constexpr,
    INPUTS: tl.constexpr,
    PLANE: tl.constexpr,
):
    """The inputs of a plane, of rows of x: [COLUMNS, ROWS]. APART: as `arrange` makes them."""
    place = places(start, CODE, INPUTS, PLANE)
    mask = live[None, :] if EVEN else live[None, :] & (place < inputs)[:, None]
    if APART:
        place = PLANE * (inputs // 2) + start // 2 + tl.arange(0, INPUTS // 2)
    return tl.load(x_rows[None, :] + place[:, None], mask=mask, other=0.0)


@triton.jit
def _tiles(
    codes, scale, zero, table, row, start, inputs: tl.constexpr,
    CODE: tl.constexpr, GROUP: tl.constexpr, PER: tl.constexpr, ZERO: tl.constexpr, SCALES_ROWS: tl.constexpr,
    EVEN: tl.constexpr, INPUTS: tl.constexpr, CHUNK: tl.constexpr, BY_STEP: tl.constexpr,
):  # fmt: skip
    """The weights of a step, and what their products are multiplied by if that is one number for a row (BY_STEP)."""
    if BY_STEP:
        by, _ = scales(codes, scale, zero, row, start, inputs, CODE, GROUP, PER, ZERO, INPUTS, CHUNK, EVEN, 0)
        return numbers(codes, table, row, start, inputs, CODE, INPUTS, EVEN), by
    else:
        tiles = weights(
            codes, scale, zero, table, row, start, inputs, CODE, GROUP, PER, ZERO, SCALES_ROWS, INPUTS, CHUNK, EVEN
        )
        return tiles, 1.0


@triton.jit
def _multiply(total, tiles, by, values, PLANE: tl.constexpr, BY_STEP: tl.constexpr):
    """The sums `[OUTPUTS, ROWS]` after a plane of a step."""
    tile = tiles[PLANE].to(values.dtype)
    if BY_STEP:
        total += by * tl.dot(tile, values, input_precision="ieee")
    else:
        total = tl.dot(tile, values, total, input_precision="ieee")
    return total


@triton.jit
def _ended_rows(total, row, scale, factor, PER: tl.constexpr, SCALES_ROWS: tl.constexpr, FACTOR: tl.constexpr):
    """The sums `[OUTPUTS, ROWS]`, with what multiplies whole rows of weights."""
    if SCALES_ROWS:
        total *= tl.load(scale + row // PER).to(tl.float32)[:, None]
    if FACTOR:
        total *= tl.load(factor + row)[:, None]
    return total


@Launcher
@triton.jit(do_not_specialize=["pairs"])
def _grouped_gate_up_kernel(
    x: tl.tensor,
    codes: tl.tensor,
    scale: tl.tensor,
    zero: tl.tensor,
    table: tl.tensor,
    factor: tl.tensor,
    bias: tl.tensor | None,
    sorted_pairs: tl.tensor,
    block_experts: tl.tensor,
    out: tl.tensor,
    pairs,
    x_stride: tl.int64,
    hidden: tl.constexpr,
    width: tl.constexpr,
    top_k: tl.constexpr,
    KIND: tl.constexpr,
    SIDE_BY_SIDE: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    APART: tl.constexpr,
    TO_APART: tl.constexpr,
    BY_STEP: tl.constexpr,
    CODE: tl.constexpr,
    GROUP: tl.constexpr,
    PER: tl.constexpr,
    ZERO: tl.constexpr,
    SCALES_ROWS: tl.constexpr,
    FACTOR: tl.constexpr,
    EVEN: tl.constexpr,
    INPUTS: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        wait_for_previous()
    block = tl.program_id(1) * SIDE_BY_SIDE + tl.program_id(0) % SIDE_BY_SIDE
    expert = tl.load(block_experts + block).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(sorted_pairs + block * ROWS + tl.arange(0, ROWS))
    live = pair < pairs
    output = tl.program_id(0) // SIDE_BY_SIDE * OUTPUTS + tl.arange(0, OUTPUTS)
    row = expert * (2 * width) + tl.minimum(output, width - 1)
    x_rows = x + (pair // top_k).to(tl.int64) * x_stride
    gate = tl.zeros([OUTPUTS, ROWS], tl.float32)
    up = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for start in tl.range(0, hidden, INPUTS):
        if not BY_STEP:
            gate, up = ended(gate), ended(up)
        gates, gate_by = _tiles(
            codes, scale, zero, table, row, start, hidden,
            CODE, GROUP, PER, ZERO, SCALES_ROWS, EVEN, INPUTS, CHUNK, BY_STEP,
        )  # fmt: skip
        ups, up_by = _tiles(
            codes, scale, zero, table, row + width, start, hidden,
            CODE, GROUP, PER, ZERO, SCALES_ROWS, EVEN, INPUTS, CHUNK, BY_STEP,
        )  # fmt: skip
        for plane in tl.static_range(planes_of(CODE)):
            values = _values(x_rows, start, live, hidden, CODE, APART, EVEN, INPUTS, plane)
            gate = _multiply(gate, gates, gate_by, values, plane, BY_STEP)
            up = _multiply(up, ups, up_by, values, plane, BY_STEP)
    gate = _ended_rows(gate, row, scale, factor, PER, SCALES_ROWS, FACTOR)
    up = _ended_rows(up, row + width, scale, factor, PER, SCALES_ROWS, FACTOR)
    if bias is not None:
        gate += tl.load(bias + row).to(tl.float32)[:, None]
        up += tl.load(bias + row + width).to(tl.float32)[:, None]
    place = output
    if TO_APART:
        place = output % 2 * (width // 2) + output // 2
    target = out + pair.to(tl.int64)[None, :] * width + place[:, None]
    result = activate_gated(gate, up, KIND).to(out.dtype.element_ty)
    tl.store(target, result, mask=live[None, :] & (output < width)[:, None])


@Launcher
@triton.jit(do_not_specialize=["pairs"])
def _grouped_down_kernel(
    x: tl.tensor,
    codes: tl.tensor,
    scale: tl.tensor,
    zero: tl.tensor,
    table: tl.tensor,
    factor: tl.tensor,
    bias: tl.tensor | None,
    weights: tl.tensor,
    sorted_pairs: tl.tensor,
    block_experts: tl.tensor,
    out: tl.tensor,
    pairs,
    hidden: tl.constexpr,
    width: tl.constexpr,
    SIDE_BY_SIDE: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    APART: tl.constexpr,
    BY_STEP: tl.constexpr,
    CODE: tl.constexpr,
    GROUP: tl.constexpr,
    PER: tl.constexpr,
    ZERO: tl.constexpr,
    SCALES_ROWS: tl.constexpr,
    FACTOR: tl.constexpr,
    EVEN: tl.constexpr,
    INPUTS: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        wait_for_previous()
    block = tl.program_id(1) * SIDE_BY_SIDE + tl.program_id(0) % SIDE_BY_SIDE
    expert = tl.load(block_experts + block).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(sorted_pairs + block * ROWS + tl.arange(0, ROWS))
    live = pair < pairs
    output = tl.program_id(0) // SIDE_BY_SIDE * OUTPUTS + tl.arange(0, OUTPUTS)
    row = expert * hidden + tl.minimum(output, hidden - 1)
    x_rows = x + pair.to(tl.int64) * width
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for start in tl.range(0, width, INPUTS):
        if not BY_STEP:
            total = ended(total)
        tiles, by = _tiles(
            codes, scale, zero, table, row, start, width,
            CODE, GROUP, PER, ZERO, SCALES_ROWS, EVEN, INPUTS, CHUNK, BY_STEP,
        )  # fmt: skip
        for plane in tl.static_range(planes_of(CODE)):
            values = _values(x_rows, start, live, width, CODE, APART, EVEN, INPUTS, plane)
            total = _multiply(total, tiles, by, values, plane, BY_STEP)
    total = _ended_rows(total, row, scale, factor, PER, SCALES_ROWS, FACTOR)
    if bias is not None:
        total += tl.load(bias + row).to(tl.float32)[:, None]
    total *= tl.load(weights + pair, mask=live, other=0.0)[None, :]
    target = out + pair.to(tl.int64)[None, :] * hidden + output[:, None]
    tl.store(target, total.to(out.dtype.element_ty), mask=live[None, :] & (output < hidden)[:, None])


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
    (tokens, top_k), hidden = topk_ids.shape, x.shape[1]
    width = gate_up.codes.shape[0] // experts // 2
    topk_ids, weights = topk_ids.contiguous(), weights.contiguous()
    gate_up_bias, down_bias = biases or (None, None)
    some = None if of is None else topk_ids
    if not deterministic and some is None and one_by_one(topk_ids, experts, gate_up, down):
        gated = torch.empty(tokens * top_k, width, dtype=x.dtype, device=x.device)
        direct_gate_up(x, gate_up, topk_ids, gated, activation, gate_up_bias)
        return direct_down(gated, down, weights, topk_ids, add, hidden, down_bias)
    rows = DETERMINISTIC_ROWS if deterministic else rows_of_block(tokens * top_k, of or experts)
    tile = TILES[rows]
    if x.element_size() == 4:
        rows, tile = 16, FLOAT32_TILE
    blocks = align(topk_ids, experts, rows, tile.group)
    gated = torch.empty(tokens * top_k, width, dtype=x.dtype, device=x.device)
    _grouped_gate_up(x, gate_up, gate_up_bias, blocks, gated, top_k, activation, rows, tile, down.code in INTERLEAVED)
    parts = _grouped_down(gated, down, down_bias, weights, blocks, rows, tile, hidden)
    return parts if top_k == 1 and add is None and some is None else sum_parts(parts, top_k, add, some=some)


def _by_step(form: Form) -> bool:
    """True if all weights of a row have one scale in a step, and no offset."""
    one = form.code in ("e4m3", "int8") and not form.zero and not form.scales_rows
    return one and form.chunk == form.inputs


def _stages(x: torch.Tensor, rows: int, outputs: int, tile: Tile, form: Form, matrix: Packed) -> int:
    size, columns = x.element_size(), form.inputs // planes_of(form.code)
    tile_bytes = rows * form.inputs * size + matrix.bytes_of_step(outputs, form.inputs, x.shape[1])
    return stages(x.device, tile.stages, tile_bytes, outputs * columns * size)


def _grouped_gate_up(
    x: torch.Tensor,
    gate_up: Packed,
    bias: torch.Tensor | None,
    blocks: Alignment,
    out: torch.Tensor,
    top_k: int,
    activation: str,
    rows: int,
    tile: Tile,
    to_apart: bool,
) -> None:
    (pairs, width), hidden = out.shape, x.shape[1]
    overlap = overlaps(x.device)
    apart = gate_up.code in INTERLEAVED
    x = arrange(x, None, "planes") if apart else x
    form = Form.of(gate_up, hidden, tile.inputs, tile.inputs)
    outputs = min(tile.outputs // 2, max(16, next_power_of_2(width)))
    _grouped_gate_up_kernel[(tile.group * cdiv(width, outputs), blocks.experts.shape[0] // tile.group)](
        x,
        *tensors_of(gate_up),
        bias,
        blocks.pairs,
        blocks.experts,
        out,
        pairs,
        x.stride(0),
        hidden,
        width,
        top_k,
        activation,
        tile.group,
        rows,
        outputs,
        apart,
        to_apart,
        _by_step(form),
        *form,
        overlap,
        num_warps=tile.warps,
        num_stages=_stages(x, rows, 2 * outputs, tile, form, gate_up),
        launch_pdl=overlap,
    )


def _grouped_down(
    gated: torch.Tensor,
    down: Packed,
    bias: torch.Tensor | None,
    weights: torch.Tensor,
    blocks: Alignment,
    rows: int,
    tile: Tile,
    hidden: int,
) -> torch.Tensor:
    """`gated [pairs, width]`, the even columns before the odd ones if the code's inputs are interleaved."""
    pairs, width = gated.shape
    overlap = overlaps(gated.device)
    out = torch.empty(pairs, hidden, dtype=gated.dtype, device=gated.device)
    form = Form.of(down, width, tile.inputs, tile.inputs)
    outputs = min(tile.outputs, max(16, next_power_of_2(hidden)))
    _grouped_down_kernel[(tile.group * cdiv(hidden, outputs), blocks.experts.shape[0] // tile.group)](
        gated,
        *tensors_of(down),
        bias,
        weights,
        blocks.pairs,
        blocks.experts,
        out,
        pairs,
        hidden,
        width,
        tile.group,
        rows,
        outputs,
        down.code in INTERLEAVED,
        _by_step(form),
        *form,
        overlap,
        num_warps=tile.warps,
        num_stages=_stages(gated, rows, outputs, tile, form, down),
        launch_pdl=overlap,
    )
    return out
