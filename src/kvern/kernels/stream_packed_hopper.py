"""Products of few rows with weights of four bits on Hopper GPUs (compute capability 9.0), bound by the weights' bytes.

    x [T, inputs] @ weight.T -> [T, outputs]

As `kernels/stream_hopper.py`, but the ring holds codes. The warps that multiply make numbers of them in registers, from
which the matrix units take their rows; each 64 outputs have four warps. Where a group is no less than a step, what is
multiplied is exact, codes less their zero, and a step's product is multiplied by the scale in float32. Otherwise
weights are multiplied by their scales in the dtype of x; PER scales are those of a row in a step.

A lane holds the columns 16b + 8h + 2j + i of two rows of the matrix units' operand, where j is its number modulo 4, and
i, h and b count up to 2, 2 and 8. Of 128 inputs it reads 16 bytes that stand together: the inputs 32j + 8q + p + 4i of
the words q, of which p counts pairs that a mask takes out of a word at once, so that 2b + h = 4q + p. Not the weights
but x is put in that order: `kernels/arrange.py`.
"""

import functools

import torch
import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from kvern.kernels.hopper import tiles_of
from kvern.kernels.launch import SHARED_MEMORY, cdiv, next_power_of_2
from kvern.kernels.linear import StreamPackedShape
from kvern.kernels.packed import Packed
from kvern.kernels.stream_hopper import fetch, write_sums

STEP = 128
"""Inputs of a step, and of each product that a scale multiplies."""
WORDS = gl.constexpr(STEP // 8)

BIASED = {torch.bfloat16: 0x4300, torch.float16: 0x6400}
"""The bits of the number, 128 or 1024, whose last four bits are worth 8, 4, 2 and 1."""
MIDDLE = gl.constexpr(8)
"""The zero of a matrix without zeros."""


@gluon.constexpr_function
def _assembly(code: str, scaled: bool, biased: int):
    """Of a word of eight codes, $8, pairs of codes four apart, of biased zeros, $9, and of scales, $10: the numbers.

    Sign, exponent and fraction of e2m1 go where bfloat16 has its own, which is 2^126 times too small.
    """
    kind = "bf16x2" if biased == BIASED[torch.bfloat16] else "f16x2"
    lines = ["{ .reg .b32 word, pair, unit; mov.b32 unit, 0x7e807e80;"]
    for place in range(4):
        if code == "int4":
            lines.append(f"shr.b32 word, $8, {4 * place};")
            lines.append(f"lop3.b32 pair, word, 0x000f000f, {biased * 0x10001:#x}, 0xea; sub.{kind} pair, pair, $9;")
        else:
            lines.append(f"shl.b32 word, $8, {12 - 4 * place}; and.b32 pair, word, 0x70007000; shr.b32 pair, pair, 6;")
            lines.append("lop3.b32 pair, word, 0x80008000, pair, 0xea; mul.bf16x2 pair, pair, unit;")
        if scaled:
            lines.append(f"mul.{kind} pair, pair, $10;")
        lines.append(f"mov.b32 {{${2 * place}, ${2 * place + 1}}}, pair;")
    return " ".join([*lines, "}"])


OUTPUT_REGISTERS = gl.constexpr(",".join(["=h"] * 8) + ",r,r,r")

REGISTERS = {8: 88, 16: 96, 32: 104, 64: 144}
"""Of a thread that multiplies, by the rows of a tile."""
BARRIER_BYTES = 1024
"""Of shared memory at most."""
PROCESSOR_REGISTERS = 1 << 16
FETCHING_REGISTERS = gl.constexpr(24)


@functools.cache
def registers_of(shape: StreamPackedShape) -> int:
    """Of a thread while none has given any away: four warps fetch, or wait, and four for each 64 outputs multiply."""
    groups = shape.outputs // 64
    needed = cdiv(groups * REGISTERS[shape.rows] + FETCHING_REGISTERS.value, groups + 1)
    return min(8 * cdiv(needed, 8), PROCESSOR_REGISTERS // (128 * (groups + 1)) // 8 * 8)


@gluon.constexpr_function
def _words_layout(outputs: int):
    """[outputs, WORDS]: a lane has four words that stand together, of two rows."""
    warps = [[16, 0], [32, 0], [64, 0], [128, 0]][: (outputs // 16).bit_length() - 1]
    registers, lanes = [[0, 1], [0, 2], [8, 0]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [outputs, 16])


@gluon.jit
def _numbers(words, zeros, by, CODE: gl.constexpr, SCALED: gl.constexpr, BIASED: gl.constexpr, layout: gl.constexpr):
    """What the units read, [OUTPUTS, 8 * WORDS], of words [OUTPUTS, PER, WORDS / PER], and pairs that fit."""
    OUTPUTS: gl.constexpr = words.shape[0]
    assembly: gl.constexpr = _assembly(CODE, SCALED, BIASED)
    if BIASED == 0x4300:
        a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
            assembly, OUTPUT_REGISTERS, [words, zeros, by], (gl.bfloat16,) * 8, is_pure=True, pack=1
        )
    else:
        a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
            assembly, OUTPUT_REGISTERS, [words, zeros, by], (gl.float16,) * 8, is_pure=True, pack=1
        )
    first, second = gl.join(gl.join(a, b), gl.join(c, d)), gl.join(gl.join(e, f), gl.join(g, h))
    every = gl.reshape(gl.join(first, second), [OUTPUTS, 4, 4, 2, 2, 2])  # output, j, q, i, p & 1, p >> 1
    tile = gl.reshape(gl.permute(every, (0, 2, 5, 4, 1, 3)), [OUTPUTS, 128])
    return gl.convert_layout(tile, gl.DotOperandLayout(0, layout, 2))


@gluon.jit
def _of_step(kept, step, PER: gl.constexpr, layout: gl.constexpr):
    """What is kept for a step: [OUTPUTS, PER, 1]."""
    OUTPUTS: gl.constexpr = kept.shape[1]
    whole: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    steps = kept._reinterpret(kept.dtype, [kept.shape[0] // PER, PER, OUTPUTS], whole)
    return gl.expand_dims(steps.index(step).permute((1, 0)).load(gl.SliceLayout(2, layout)), 2)


@gluon.jit
def _keep(kept, table, groups, first, outputs, steps, GROUP: gl.constexpr, BIASED: gl.constexpr):
    """Put scales or zeros of a program in shared memory [STEPS * PER, OUTPUTS]. Scales of part of a step: as pairs."""
    OUTPUTS: gl.constexpr = kept.shape[1]
    PER: gl.constexpr = max(128 // GROUP, 1)
    RUN: gl.constexpr = min(kept.shape[0], 64)  # of more, loads would not fit in registers
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [gl.num_warps(), 1], [1, 0])
    line = gl.program_id(0) * OUTPUTS + gl.arange(0, OUTPUTS, gl.SliceLayout(1, layout))
    begin = line.to(gl.int64)[:, None] * groups
    whole: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    runs = kept._reinterpret(kept.dtype, [kept.shape[0] // RUN, RUN, OUTPUTS], whole)
    for run in range(kept.shape[0] // RUN):
        step = run * RUN + gl.arange(0, RUN, gl.SliceLayout(0, layout))
        place = begin + ((first * PER + step) // max(GROUP // 128, 1))[None, :]
        found = gl.load(table + place, mask=(line < outputs)[:, None] & (step < steps * PER)[None, :])
        if kept.dtype == gl.float32:
            found = found.to(gl.float32)
        elif kept.dtype == gl.int32:
            if found.dtype == gl.uint8:
                found = (found.to(gl.int32) << 23).to(gl.float32, bitcast=True)
            half: gl.constexpr = gl.bfloat16 if BIASED == 0x4300 else gl.float16
            found = found.to(gl.float32).to(half).to(gl.uint16, bitcast=True).to(gl.int32) * 0x10001
        runs.index(run).permute((1, 0)).store(found)


@gluon.jit
def _multiply(
    out,
    bias,
    scale,
    zero,
    factor,
    partial,
    arrived,
    codes,
    values,
    scales,
    zeros,
    ready,
    empty,
    first,
    steps,
    rows,
    outputs,
    groups,
    CODE: gl.constexpr,
    GROUP: gl.constexpr,
    BIASED: gl.constexpr,
    SPLITS: gl.constexpr,
):
    STAGES: gl.constexpr = codes.shape[0]
    OUTPUTS: gl.constexpr = codes.shape[1]
    ROWS: gl.constexpr = values.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [OUTPUTS // 16, 1], [16, ROWS, 16])
    held: gl.constexpr = _words_layout(OUTPUTS)
    PER: gl.constexpr = max(128 // GROUP, 1)
    _keep(scales, scale, groups, first, outputs, steps, GROUP, BIASED)
    if zero is not None:
        _keep(zeros, zero, groups, first, outputs, steps, GROUP, BIASED)
    total = gl.zeros([OUTPUTS, ROWS], gl.float32, layout)
    nothing = gl.zeros([OUTPUTS, ROWS], gl.float32, layout)
    for step in range(steps):
        stage = step % STAGES
        mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
        words = gl.reshape(codes.index(stage).load(held), [OUTPUTS, PER, WORDS // PER])
        pairs: gl.constexpr = words.type.layout
        if zero is not None:
            zero_pairs = (_of_step(zeros, step, PER, pairs).to(gl.int32) + BIASED) * 0x10001
        else:
            zero_pairs = gl.full([OUTPUTS, PER, 1], (BIASED + MIDDLE) * 0x10001, gl.int32, pairs)
        tile_values = values.index(stage).permute((1, 0))
        if PER > 1:
            numbers = _numbers(words, zero_pairs, _of_step(scales, step, PER, pairs), CODE, True, BIASED, layout)
            total = warpgroup_mma(numbers, tile_values, total, is_async=True)
            total = warpgroup_mma_wait(0, deps=[total])
        else:
            numbers = _numbers(words, zero_pairs, zero_pairs, CODE, False, BIASED, layout)
            product = warpgroup_mma(numbers, tile_values, nothing, use_acc=False, is_async=True)
            by = scales.index(step).load(gl.SliceLayout(1, layout))
            product = warpgroup_mma_wait(0, deps=[product])
            total += product * by[:, None]
        mbarrier.arrive(empty.index(stage), count=1)
    if factor is not None:
        line = gl.program_id(0) * OUTPUTS + gl.arange(0, OUTPUTS, gl.SliceLayout(1, layout))
        total *= gl.load(factor + line, mask=line < outputs, other=0.0)[:, None]
    gdc_wait()
    write_sums(total, out, bias, partial, arrived, rows, outputs, SPLITS, 0)


@gluon.jit(do_not_specialize=["rows", "outputs", "steps"])
def _stream_packed_kernel(
    x_tiles,
    code_tiles,
    scale,
    zero,
    factor,
    bias,
    out,
    partial,
    arrived,
    rows,
    outputs,
    steps,
    groups,
    CODE: gl.constexpr,
    GROUP: gl.constexpr,
    BIASED: gl.constexpr,
    ROWS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    STAGES: gl.constexpr,
    SPLITS: gl.constexpr,
    STEPS: gl.constexpr,
):
    codes = gl.allocate_shared_memory(gl.int32, [STAGES, OUTPUTS, WORDS], code_tiles.layout)
    values = gl.allocate_shared_memory(x_tiles.dtype, [STAGES, ROWS, 8 * WORDS], x_tiles.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PER: gl.constexpr = max(128 // GROUP, 1)
    scales = gl.allocate_shared_memory(gl.int32 if PER > 1 else gl.float32, [STEPS * PER, OUTPUTS], plain)
    zeros = gl.allocate_shared_memory(gl.uint8, [STEPS * PER if zero is not None else 1, OUTPUTS], plain)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    span = (steps + SPLITS - 1) // SPLITS
    first = gl.program_id(1) * span
    own = gl.minimum(steps - first, span)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    out, bias, scale, zero, factor, partial, arrived, codes, values, scales, zeros, ready, empty,
                    first, own, rows, outputs, groups, CODE, GROUP, BIASED, SPLITS,
                ),
            ),
            (
                fetch,
                (code_tiles, x_tiles, codes, values, ready, empty, first * WORDS, own, outputs, False),
            ),
        ],
        [1],
        [FETCHING_REGISTERS],
    )  # fmt: skip


def steps_kept(inputs: int, splits: int) -> int:
    """Of so many steps a program keeps scales: a power of two."""
    return next_power_of_2(cdiv(inputs // STEP, splits))


def streams(weight: Packed, inputs: int, shape: StreamPackedShape, dtype: torch.dtype) -> bool:
    """Whether the kernel, so cut, multiplies activations of a dtype by a matrix: one whose groups are cut by steps.

    Numbers of e2m1, and scales of another dtype that are rounded to that of x, need the range of bfloat16.
    """
    assert weight.scale is not None
    small = weight.group < STEP
    ring = shape.stages * (shape.outputs * STEP // 2 + shape.rows * STEP * 2)
    kept = steps_kept(inputs, shape.splits) * max(STEP // weight.group, 1) * shape.outputs
    kept_bytes = kept * (4 if weight.zero is None else 5)
    result = shape.outputs * shape.rows * 2  # changes its layout in shared memory
    return (
        (weight.code == "int4" or (weight.code == "e2m1" and small and weight.zero is None))
        and weight.outputs_per_scale == 1
        and inputs % STEP == 0
        and (weight.group in (16, 32, 64) or weight.group % STEP == 0)
        and (dtype == torch.bfloat16 or (weight.code == "int4" and (not small or weight.scale.dtype == dtype)))
        and (weight.zero is None or weight.zero.dtype == torch.uint8)
        and ring + kept_bytes + result + BARRIER_BYTES <= SHARED_MEMORY[90] << 10
    )


def stream_packed_product(
    x: torch.Tensor,
    weight: Packed,
    bias: torch.Tensor | None,
    shape: StreamPackedShape,
    arrived: torch.Tensor,
) -> torch.Tensor:
    """`x @ weight.T + bias`, sums in float32: [T, inputs] of 16 bits -> [T, outputs].

    x         in lanes, as `arrange` makes it
    weight    that `streams` knows
    arrived   if the shape has splits: an int32 zero for every tile, which is zero again afterwards

    A row's result depends on the shape of the tiles alone. Moves the codes and scales once for `shape.rows` rows.
    """
    rows, inputs = x.shape
    outputs = weight.codes.shape[0]
    tiles, steps = cdiv(outputs, shape.outputs), inputs // STEP
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    partial = out
    if shape.splits > 1:
        partial = torch.empty(tiles, shape.splits, shape.outputs, shape.rows, dtype=torch.float32, device=x.device)
    code_tiles = tiles_of(weight.codes.view(torch.int32), shape.outputs, STEP // 8)
    for first in range(0, rows, shape.rows):  # one after the other: counters and sums of parts are the next one's too
        _stream_packed_kernel[(tiles, shape.splits)](
            tiles_of(x[first : first + shape.rows], shape.rows, STEP),
            code_tiles,
            weight.scale,
            weight.zero,
            weight.factor,
            bias,
            out[first:],
            partial,
            arrived,
            min(rows - first, shape.rows),
            outputs,
            steps,
            cdiv(inputs, weight.group),
            weight.code,
            weight.group,
            BIASED[x.dtype],
            shape.rows,
            shape.outputs,
            shape.stages,
            shape.splits,
            steps_kept(inputs, shape.splits),
            num_warps=shape.outputs // 16,
            maxnreg=registers_of(shape),
            launch_pdl=True,
        )
    return out
