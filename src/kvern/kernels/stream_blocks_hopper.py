"""Products of few rows with GGUF's matrices of Q4_K and Q6_K on Hopper GPUs (compute capability 9.0).

    x [T, inputs] @ weight.T -> [T, outputs], or activation(gate) * up of the two halves of the outputs

As `kernels/stream_packed_hopper.py`, but scales of 32 or 16 inputs are integers of six or eight bits, and what the
matrix units multiply are float16 that hold code * scale: exactly those of Q4_K, those of Q6_K in eleven bits. The
products of a block of 256 inputs are multiplied by the block's d in float32. Minima of Q4_K, integers too, are
multiplied by the sums of 32 inputs each, kept as two float16, and those products by the block's dmin. So x is float16,
too: each row multiplied by a power of two (`kernels/arrange.py`).

A step is a block, and a lane's codes of half a step are those of a run of 32 inputs: the run of its number modulo 4, or
the fourth behind. It reads the block's scales as the format has them (`kernels/block_codes.py`), a step ahead. Two more
bits of the codes of Q6_K come in two words for each run, of even inputs and of odd ones.
"""

import functools

import torch
import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvern.kernels.arrange import ScaledLanes
from kvern.kernels.block_operands_hopper import (
    BLOCK,
    WORDS,
    four_words,
    gated_layout,
    minima_operand,
    numbers_of_four,
    numbers_of_six,
    of_run,
    run_layout,
    scales_of_block,
    words_layout,
)
from kvern.kernels.hopper import KINDS, barriers, fetch_weights, tiles_of
from kvern.kernels.launch import SHARED_MEMORY, cdiv
from kvern.kernels.linear import StreamPackedShape
from kvern.kernels.packed import Packed
from kvern.kernels.stream_hopper import write_sums
from kvern.kernels.stream_packed_hopper import (
    BARRIER_BYTES,
    FETCHING_REGISTERS,
    PROCESSOR_REGISTERS,
)

SUMS = gl.constexpr(BLOCK // 16)
REGISTERS = {8: 104, 16: 104, 32: 108, 64: 160}
"""The registers of a thread that multiplies, by the rows of a tile."""


@gluon.jit
def _multiply(
    out,
    bias,
    residual,
    x_by,
    scale,
    partial,
    arrived,
    codes,
    high_bits,
    values,
    sums,
    ready,
    empty,
    first,
    steps,
    rows,
    outputs,
    blocks,
    SPLITS: gl.constexpr,
    KIND: gl.constexpr,
    SIX: gl.constexpr,
):
    STAGES: gl.constexpr = sums.shape[0]
    OUTPUTS: gl.constexpr = codes.shape[1]
    ROWS: gl.constexpr = values.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [OUTPUTS // 16, 1], [16, ROWS, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    held: gl.constexpr = words_layout(OUTPUTS)
    WIDE: gl.constexpr = OUTPUTS // 2 if KIND > 0 else OUTPUTS
    total = gl.zeros([OUTPUTS, ROWS], gl.float32, layout)
    product = gl.zeros([OUTPUTS, ROWS], gl.float32, layout)
    nothing = gl.zeros([OUTPUTS, ROWS], gl.float32, layout)
    coming = scales_of_block(scale, first, outputs, blocks, OUTPUTS, WIDE, SIX, by_row)
    for step in range(steps):
        stage = step % STAGES
        found = coming
        coming = scales_of_block(scale, first + step + 1, outputs, blocks, OUTPUTS, WIDE, SIX, by_row)
        mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
        words = gl.reshape(codes.index(2 * stage).load(held), [OUTPUTS, 4, WORDS // 4])
        if SIX:
            bits = high_bits.index(2 * stage).load(run_layout(OUTPUTS, 2))
            numbers = numbers_of_six(words, bits, found[1], layout)
        else:
            halves, low, middle, high = four_words(found[0])
            runs: gl.constexpr = gl.SliceLayout(2, words.type.layout)
            low = of_run(low, runs)
            middle = of_run(middle, runs)
            high = of_run(high, runs)
            minima = minima_operand(middle & 63, ((high >> 4) & 15) | ((middle >> 2) & 48), layout)
            least = warpgroup_mma(minima, sums.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
            numbers = numbers_of_four(words, gl.expand_dims(low & 63, 2), layout)
            least = warpgroup_mma_wait(0, deps=[least])
            halves = gl.convert_layout(halves, by_row)
            deep = ((halves >> 16) & 0xFFFF).to(gl.uint16).to(gl.float16, bitcast=True).to(gl.float32)
            total -= least * deep[:, None]
        product = warpgroup_mma(numbers, values.index(2 * stage).permute((1, 0)), product, use_acc=False, is_async=True)
        product = warpgroup_mma_wait(0, deps=[product])
        words = gl.reshape(codes.index(2 * stage + 1).load(held), [OUTPUTS, 4, WORDS // 4])
        if SIX:
            bits = high_bits.index(2 * stage + 1).load(run_layout(OUTPUTS, 2))
            numbers = numbers_of_six(words, bits, found[2], layout)
        else:
            numbers = numbers_of_four(words, gl.expand_dims((high & 15) | ((low >> 2) & 48), 2), layout)
        product = warpgroup_mma(numbers, values.index(2 * stage + 1).permute((1, 0)), product, is_async=True)
        product = warpgroup_mma_wait(0, deps=[product])
        mbarrier.arrive(empty.index(stage), count=1)
        if SIX:
            wide = found[0].to(gl.uint16).to(gl.float16, bitcast=True).to(gl.float32)
        else:
            wide = (halves & 0xFFFF).to(gl.uint16).to(gl.float16, bitcast=True).to(gl.float32)
        total += product * wide[:, None]
    gdc_wait()
    row = gl.arange(0, ROWS, gl.SliceLayout(0, layout))
    total *= gl.load(x_by + row, mask=row < rows, other=0.0)[None, :]
    if residual is not None:
        line = gl.program_id(0) * OUTPUTS + gl.arange(0, OUTPUTS, by_row)
        known = (line < outputs) & (gl.program_id(1) == 0)
        total += gl.load(residual + line, mask=known, other=0.0).to(gl.float32)[:, None]
    if KIND > 0:
        total = gl.convert_layout(total, gated_layout())
    tile = gl.program_id(0)
    write_sums(total, out, bias, partial, arrived, tile, tile, rows, outputs, SPLITS, KIND)


@gluon.jit
def _fetch_codes(
    code_tiles, bit_tiles, codes, high_bits, bar, stage, block, wanted, outputs, GATED: gl.constexpr, SIX: gl.constexpr
):
    tile = gl.program_id(0)
    for half in gl.static_range(2):
        into = codes.index(2 * stage + half)
        if SIX:
            begin = block * (6 * WORDS // 2)
            fetch_weights(code_tiles, bar, into, 0, tile, begin + half * WORDS, wanted, outputs, GATED)
            begin += 2 * WORDS + half * (WORDS // 2)
            into = high_bits.index(2 * stage + half)
            fetch_weights(bit_tiles, bar, into, 0, tile, begin, wanted, outputs, GATED)
        else:
            fetch_weights(code_tiles, bar, into, 0, tile, (2 * block + half) * WORDS, wanted, outputs, GATED)


@gluon.jit
def _fetch_values(x_tiles, sum_tiles, values, sums, bar, stage, block, wanted):
    HALF: gl.constexpr = values.shape[2]
    for half in gl.static_range(2):
        place = (2 * block + half) * HALF
        tma.async_copy_global_to_shared(x_tiles, [0, place], bar, values.index(2 * stage + half), pred=wanted)
    tma.async_copy_global_to_shared(sum_tiles, [0, block * sums.shape[2]], bar, sums.index(stage), pred=wanted)


@gluon.jit
def _fetch(
    code_tiles, bit_tiles, x_tiles, sum_tiles, codes, high_bits, values, sums, ready, empty, first, steps, outputs,
    GATED: gl.constexpr, SIX: gl.constexpr,
):  # fmt: skip
    """Fill the ring, whose stages have two halves."""
    gdc_launch_dependents()
    STAGES: gl.constexpr = sums.shape[0]
    BYTES: gl.constexpr = (
        (12 if SIX else 8) * codes.shape[1] * codes.shape[2]
        + 4 * values.shape[1] * values.shape[2]
        + 2 * sums.shape[1] * sums.shape[2]
    )
    for early in gl.static_range(STAGES):
        bar = ready.index(early)
        mbarrier.expect(bar, BYTES, pred=early < steps)
        _fetch_codes(
            code_tiles, bit_tiles, codes, high_bits, bar, early, first + early, early < steps, outputs, GATED, SIX
        )
    gdc_wait()
    for early in gl.static_range(STAGES):
        _fetch_values(x_tiles, sum_tiles, values, sums, ready.index(early), early, first + early, early < steps)
    for step in range(STAGES, steps):
        stage = step % STAGES
        bar = ready.index(stage)
        mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(bar, BYTES)
        _fetch_codes(code_tiles, bit_tiles, codes, high_bits, bar, stage, first + step, True, outputs, GATED, SIX)
        _fetch_values(x_tiles, sum_tiles, values, sums, bar, stage, first + step, True)


@gluon.jit(do_not_specialize=["rows", "outputs", "blocks"])
def _stream_blocks_kernel(
    x_tiles,
    sum_tiles,
    code_tiles,
    bit_tiles,
    x_by,
    scale,
    bias,
    residual,
    out,
    partial,
    arrived,
    rows,
    outputs,
    blocks,
    SIX: gl.constexpr,
    KIND: gl.constexpr,
    ROWS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    STAGES: gl.constexpr,
    SPLITS: gl.constexpr,
):
    codes = gl.allocate_shared_memory(gl.int32, [2 * STAGES, OUTPUTS, WORDS], code_tiles.layout)
    high_bits = codes
    if SIX:
        high_bits = gl.allocate_shared_memory(gl.int32, [2 * STAGES, OUTPUTS, WORDS // 2], bit_tiles.layout)
    values = gl.allocate_shared_memory(gl.float16, [2 * STAGES, ROWS, 8 * WORDS], x_tiles.layout)
    sums = gl.allocate_shared_memory(gl.float16, [STAGES, ROWS, SUMS], sum_tiles.layout)
    ready, empty = barriers(STAGES, 1, 1)
    span = (blocks + SPLITS - 1) // SPLITS
    first = gl.program_id(1) * span
    own = gl.minimum(blocks - first, span)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    out, bias, residual, x_by, scale, partial, arrived, codes, high_bits, values, sums, ready, empty,
                    first, own, rows, outputs, blocks, SPLITS, KIND, SIX,
                ),
            ),
            (
                _fetch,
                (
                    code_tiles, bit_tiles, x_tiles, sum_tiles, codes, high_bits, values, sums, ready, empty, first, own,
                    outputs, KIND > 0, SIX,
                ),
            ),
        ],
        [1],
        [FETCHING_REGISTERS],
    )  # fmt: skip


@functools.cache
def registers_of(shape: StreamPackedShape) -> int:
    """Returns the registers of a thread before any are given away: four warps fetch, or wait, and four multiply 64
    outputs."""
    groups = shape.outputs // 64
    needed = cdiv(groups * REGISTERS[shape.rows] + FETCHING_REGISTERS.value, groups + 1)
    return min(8 * cdiv(needed, 8), PROCESSOR_REGISTERS // (128 * (groups + 1)) // 8 * 8)


def streams_blocks(code: str, shape: StreamPackedShape) -> bool:
    """True if the kernel of this shape multiplies by a matrix of a code."""
    codes = shape.outputs * BLOCK // 2 if code == "q4_k" else shape.outputs * BLOCK * 3 // 4
    ring = shape.stages * (codes + shape.rows * (BLOCK + SUMS.value) * 2)
    result = shape.outputs * shape.rows * 2  # changes its layout in shared memory
    return code in ("q4_k", "q6_k") and ring + result + BARRIER_BYTES <= SHARED_MEMORY[90] << 10


def stream_blocks_product(
    x: ScaledLanes,
    weight: Packed,
    bias: torch.Tensor | None,
    shape: StreamPackedShape,
    arrived: torch.Tensor,
    dtype: torch.dtype,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """`x @ weight.T + bias`, sums in float32: [T, inputs] -> [T, outputs] of 16 bits.

    x           of `scaled_lanes`
    weight      of a code that `streams_blocks` knows
    arrived     if the shape has splits: an int32 zero for every tile, which is zero again afterwards
    activation  gate and up are the two halves of the outputs, and the result is activation(gate) * up: of a shape of 8
                rows and 64 outputs
    residual    [1, outputs] of the dtype, where x is one row: the result is added to it in place, and is it

    A row's result depends on the shape of the tiles alone. Moves the codes and scales once for `shape.rows` rows.
    """
    rows, inputs = x.values.shape
    outputs, wide = weight.codes.shape[0], shape.outputs
    assert weight.scale is not None and (residual is None or rows == 1)
    assert activation is None or shape[:2] == (8, 64)
    codes, six = weight.codes.view(torch.int32).view(outputs, -1), weight.code == "q6_k"
    if activation is not None:
        outputs, wide = outputs // 2, wide // 2
    tiles = cdiv(outputs, wide)
    out = torch.empty(rows, outputs, dtype=dtype, device=x.values.device) if residual is None else residual
    partial = out
    if shape.splits > 1:
        partial = torch.empty(tiles, shape.splits, shape.outputs, shape.rows, dtype=torch.float32, device=out.device)
    code_tiles = tiles_of(codes, wide, WORDS.value)
    bit_tiles = tiles_of(codes, wide, WORDS.value // 2) if six else code_tiles
    for first in range(0, rows, shape.rows):  # one after the other: counters and sums of parts are the next one's too
        run = slice(first, first + shape.rows)
        _stream_blocks_kernel[(tiles, shape.splits)](
            tiles_of(x.values[run], shape.rows, BLOCK // 2),
            tiles_of(x.sums[run], shape.rows, SUMS.value),
            code_tiles,
            bit_tiles,
            x.by[run],
            weight.scale.view(torch.int16 if six else torch.int32),
            bias,
            residual,
            out[run],
            partial,
            arrived,
            min(rows - first, shape.rows),
            outputs,
            inputs // BLOCK,
            six,
            KINDS.index(activation),
            shape.rows,
            shape.outputs,
            shape.stages,
            shape.splits,
            num_warps=shape.outputs // 16,
            maxnreg=registers_of(shape),
            launch_pdl=True,
        )
    return out
