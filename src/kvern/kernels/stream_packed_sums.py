"""The sums of products with weights of four bits on Hopper GPUs, which four warps make of a ring of codes and inputs.

In small tiles, if a group is no less than a step, what is multiplied is exact, codes less their zero, and a step's
product is multiplied by the scale in float32. Otherwise weights are multiplied by their scales in the dtype of x; PER
scales are those of a row in a step. Small tiles, of few rows, are bound by the weights' bytes: scales are kept in
shared memory before. In large ones, bound by arithmetic, those of a step are read while that before is multiplied.

A lane holds the columns 16b + 8h + 2j + i of two rows of the matrix units' operand, where j is its number modulo 4, and
i, h and b count up to 2, 2 and 8. Of 128 inputs it reads 16 bytes that stand together: the inputs 32j + 8q + p + 4i of
the words q, of which p counts pairs that a mask takes out of a word at once, so that 2b + h = 4q + p. Not the weights
but x is put in that order: `kernels/arrange.py`.
"""

import torch
import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

STEP = 128
"""Inputs of a step, and of each product that a scale multiplies."""
WORDS = gl.constexpr(STEP // 8)

BIASED = {torch.bfloat16: 0x4300, torch.float16: 0x6400}
"""The bits of the number, 128 or 1024, whose last four bits are worth 8, 4, 2 and 1."""
MIDDLE = gl.constexpr(8)
"""The zero of a matrix without zeros."""
PART = gl.constexpr(64)
"""Outputs that four warps multiply."""
THREE_QUARTERS = gl.constexpr(96)
"""Rows of a tile of 128 that are multiplied, if that is enough for all tiles."""
WORDS_LAYOUT = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 16]
    )
)
"""[PART, WORDS]: a lane has four words that stand together, of two rows."""


@gluon.constexpr_function
def _assembly(code: str, scaled: bool, biased: int):
    """Returns assembly for a word of eight codes, $8, pairs of codes four apart, of biased zeros, $9, and of scales,
    $10.

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


@gluon.jit
def _numbers(words, zeros, by, CODE: gl.constexpr, SCALED: gl.constexpr, BIASED: gl.constexpr, layout: gl.constexpr):
    """Returns the operand, [PART, 8 * n], of n words of each line [PART, PER, n / PER], and the matching pairs."""
    COLUMNS: gl.constexpr = 8 * words.shape[1] * words.shape[2]
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
    every = gl.reshape(gl.join(first, second), [PART, 4, COLUMNS // 32, 2, 2, 2])  # output, j, q, i, p & 1, p >> 1
    tile = gl.reshape(gl.permute(every, (0, 2, 5, 4, 1, 3)), [PART, COLUMNS])
    return gl.convert_layout(tile, gl.DotOperandLayout(0, layout, 2))


@gluon.jit
def _halves(words):
    """Splits words [PART, WORDS] into those of a step's first inputs, in the units' order, and the others."""
    first, second = gl.split(gl.permute(gl.reshape(words, [PART, 4, 2, 2]), (0, 1, 3, 2)))
    return first, second


@gluon.jit
def _scale_pairs(found, BIASED: gl.constexpr):
    """Scales, rounded to the dtype of x."""
    half: gl.constexpr = gl.bfloat16 if BIASED == 0x4300 else gl.float16
    if found.dtype == gl.uint8:
        found = (found.to(gl.int32) << 23).to(gl.float32, bitcast=True)
    return found.to(gl.float32).to(half).to(gl.uint16, bitcast=True).to(gl.int32) * 0x10001


@gluon.jit
def _of_step(kept, step, PER: gl.constexpr, layout: gl.constexpr):
    """Returns the kept numbers of an iteration of the loop: [PART, PER, 1]."""
    whole: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    steps = kept._reinterpret(kept.dtype, [kept.shape[0] // PER, PER, PART], whole)
    return gl.expand_dims(steps.index(step).permute((1, 0)).load(gl.SliceLayout(2, layout)), 2)


@gluon.jit
def _keep(kept, table, groups, first, outputs, steps, GROUP: gl.constexpr, BIASED: gl.constexpr):
    """Put scales or zeros of a part in shared memory [STEPS * PER, PART]. Scales of part of a step: as pairs."""
    PER: gl.constexpr = max(128 // GROUP, 1)
    RUN: gl.constexpr = min(kept.shape[0], 64)  # of more, loads would not fit in registers
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [4, 1], [1, 0])
    line = gl.arange(0, PART, gl.SliceLayout(1, layout))
    whole: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    runs = kept._reinterpret(kept.dtype, [kept.shape[0] // RUN, RUN, PART], whole)
    for run in range(kept.shape[0] // RUN):
        step = run * RUN + gl.arange(0, RUN, gl.SliceLayout(0, layout))
        place = (line * groups)[:, None] + ((first * PER + step) // max(GROUP // 128, 1))[None, :]
        found = gl.load(table + place, mask=(line < outputs)[:, None] & (step < steps * PER)[None, :])
        if kept.dtype == gl.float32:
            found = found.to(gl.float32)
        elif kept.dtype == gl.int32:
            found = _scale_pairs(found, BIASED)
        runs.index(run).permute((1, 0)).store(found)


@gluon.jit
def sums_with_kept_scales(
    codes, values, scale, zero, scales, zeros, ready, empty, first, steps, groups, known,
    PLACE: gl.constexpr, CODE: gl.constexpr, GROUP: gl.constexpr, BIASED: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Returns the sums of small tiles."""
    STAGES: gl.constexpr = codes.shape[0]
    ROWS: gl.constexpr = values.shape[1]
    PER: gl.constexpr = max(128 // GROUP, 1)
    _keep(scales, scale, groups, first, known, steps, GROUP, BIASED)
    if zero is not None:
        _keep(zeros, zero, groups, first, known, steps, GROUP, BIASED)
    total = gl.zeros([PART, ROWS], gl.float32, layout)
    nothing = gl.zeros([PART, ROWS], gl.float32, layout)
    for step in range(steps):
        stage = step % STAGES
        mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
        words = gl.reshape(codes.index(stage).slice(PLACE, PART).load(WORDS_LAYOUT), [PART, PER, WORDS // PER])
        pairs: gl.constexpr = words.type.layout
        if zero is not None:
            zero_pairs = (_of_step(zeros, step, PER, pairs).to(gl.int32) + BIASED) * 0x10001
        else:
            zero_pairs = gl.full([PART, PER, 1], (BIASED + MIDDLE) * 0x10001, gl.int32, pairs)
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
    return total


@gluon.jit
def _read(table, groups, step, known, HALF: gl.constexpr, GROUP: gl.constexpr, layout: gl.constexpr):
    """Scales or zeros of half a step, for each of four lanes: [PART, 4, 1]."""
    line = gl.minimum(gl.arange(0, PART, gl.SliceLayout(1, gl.SliceLayout(2, layout))), known - 1)
    lane = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    group = gl.minimum((step * 128 + lane * 32 + HALF * 16) // GROUP, groups - 1)
    return gl.expand_dims(gl.load(table + (line * groups)[:, None] + group[None, :]), 2)


@gluon.jit
def sums(
    codes, values, scale, zero, ready, empty, first, steps, groups, known,
    USED: gl.constexpr, PLACE: gl.constexpr, CODE: gl.constexpr, GROUP: gl.constexpr, BIASED: gl.constexpr,
    layout: gl.constexpr, rest_layout: gl.constexpr,
):  # fmt: skip
    """Returns the sums of large tiles: a step is multiplied in two halves, so that its numbers fit in the registers.

    A lane has inputs of one group of 32, of both groups of 16 one in each half. Of THREE_QUARTERS of the rows, those
    behind half of a tile come second; there is no other number that is no power of two.
    """
    STAGES: gl.constexpr = codes.shape[0]
    ROWS: gl.constexpr = 64 if USED == THREE_QUARTERS else USED
    APART: gl.constexpr = GROUP < 32
    pairs: gl.constexpr = _halves(gl.full([PART, WORDS], 0, gl.int32, WORDS_LAYOUT))[0].type.layout
    total = gl.zeros([PART, ROWS], gl.float32, layout)
    rest = gl.zeros([PART, 32], gl.float32, rest_layout)
    zero_pairs = gl.full([PART, 4, 1], (BIASED + MIDDLE) * 0x10001, gl.int32, pairs)
    other_zero_pairs = zero_pairs
    next_by = _read(scale, groups, first, known, 0, GROUP, pairs)
    next_other_by = _read(scale, groups, first, known, 1, GROUP, pairs) if APART else next_by
    if zero is not None:
        next_zero = _read(zero, groups, first, known, 0, GROUP, pairs)
        next_other_zero = _read(zero, groups, first, known, 1, GROUP, pairs) if APART else next_zero
    for step in range(steps):
        stage = step % STAGES
        behind = first + gl.minimum(step + 1, steps - 1)
        by = _scale_pairs(next_by, BIASED)
        other_by = _scale_pairs(next_other_by, BIASED)
        next_by = _read(scale, groups, behind, known, 0, GROUP, pairs)
        next_other_by = _read(scale, groups, behind, known, 1, GROUP, pairs) if APART else next_by
        if zero is not None:
            zero_pairs = (next_zero.to(gl.int32) + BIASED) * 0x10001
            other_zero_pairs = (next_other_zero.to(gl.int32) + BIASED) * 0x10001
            next_zero = _read(zero, groups, behind, known, 0, GROUP, pairs)
            next_other_zero = _read(zero, groups, behind, known, 1, GROUP, pairs) if APART else next_zero
        mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
        words, others = _halves(codes.index(stage).slice(PLACE, PART).load(WORDS_LAYOUT))
        for half in gl.static_range(2):
            if half == 0:
                numbers = _numbers(words, zero_pairs, by, CODE, True, BIASED, layout)
            else:
                numbers = _numbers(others, other_zero_pairs, other_by, CODE, True, BIASED, layout)
            tile_values = values.index(stage).slice(64 * half, 64, 1)
            total = warpgroup_mma(numbers, tile_values.slice(0, ROWS).permute((1, 0)), total, is_async=True)
            if USED == THREE_QUARTERS:
                numbers = gl.convert_layout(numbers, gl.DotOperandLayout(0, rest_layout, 2))
                rest = warpgroup_mma(numbers, tile_values.slice(ROWS, 32).permute((1, 0)), rest, is_async=True)
                total, rest = warpgroup_mma_wait(0, deps=[total, rest])
            else:
                total = warpgroup_mma_wait(0, deps=[total])
        mbarrier.arrive(empty.index(stage), count=1)
    return total, rest
