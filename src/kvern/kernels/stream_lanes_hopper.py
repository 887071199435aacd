"""The experts in MXFP4 on Hopper GPUs (compute capability 9.0), of few rows and of many.

    x [T, inputs] @ weight[expert].T -> [pairs, outputs], or the gated activation of the two halves of an expert's rows

As `kernels/stream_experts_hopper.py`, but the ring holds codes and their scales, in lanes (`kernels/expert_lanes.py`).
The warps that multiply make numbers of them in registers, from which the matrix units take their rows. Each 64 outputs,
or 32 of gate and the same of up, are a part with four warps of its own, which wait for no other part: some make numbers
while the matrix units have those of others. The sixteen rows of a warp are eight of gate and eight of up, so that a
lane has both sums of an output.
"""

from typing import NamedTuple

import torch
import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvern.kernels.expert_lanes import STEP, LaneWeight
from kvern.kernels.hopper import KINDS, activate_gated_by, barriers, fetch_weights, processors, tiles_of
from kvern.kernels.launch import cdiv
from kvern.kernels.moe_routing import Alignment

PART = gl.constexpr(64)
"""Outputs that four warps multiply."""
WORDS = gl.constexpr(STEP // 8)
"""The words of a row's codes in a step."""
SCALED_BY = gl.constexpr(2.0**64)
"""Weights are that much too small for it, so that those of large scales are numbers of bfloat16."""


class LaneShape(NamedTuple):
    """The shape of products: 64 outputs for each part, stages of the ring, programs of a processor and their registers.

    `registers` are those of a thread on average, `fetching` those of one that fetches, `multiplying` of another.
    """

    parts: int
    stages: int
    programs: int
    registers: int
    fetching: int
    multiplying: int


ALONE = LaneShape(1, 10, 3, 80, 56, 104)
"""The shape for one or a few rows in each of few blocks: processors share the outputs evenly."""
SHAPES = {
    8: LaneShape(4, 10, 1, 96, 56, 104),
    16: LaneShape(4, 9, 1, 96, 56, 104),
    32: LaneShape(4, 8, 1, 96, 56, 104),
    64: LaneShape(4, 5, 1, 96, 56, 104),
    128: LaneShape(4, 3, 1, 96, 64, 104),
}
"""Shapes by the rows of a block."""


@gluon.constexpr_function
def _assembly():
    """Returns assembly that turns a word of eight codes, $8, and a pair of scales, $9, into numbers; codes four apart
    pair.

    Exponent and fraction go where bfloat16 has its own, which is 2**126 times too small, and the sign above. Signs of
    every second code are shifted together: the other one falls where the mask takes exponents, or out of the word.
    """
    lines = ["{ .reg .b32 odd, even, sign, pair; and.b32 odd, $8, 0x80808080; and.b32 even, $8, 0x08080808;"]
    shifts = (
        "shl.b32 sign, even, 12; shl.b32 pair, $8, 6;",
        "shl.b32 sign, odd, 8; shl.b32 pair, $8, 2;",
        "shl.b32 sign, even, 4; shr.b32 pair, $8, 2;",
        "mov.b32 sign, odd; shr.b32 pair, $8, 6;",
    )
    for place in range(4):
        lines.append(f"{shifts[place]} lop3.b32 pair, pair, 0x01c001c0, sign, 0xe2; mul.bf16x2 pair, pair, $9;")
        lines.append(f"mov.b32 {{${2 * place}, ${2 * place + 1}}}, pair;")
    return " ".join([*lines, "}"])


NUMBER_REGISTERS = gl.constexpr(",".join(["=h"] * 8) + ",r,r")


@gluon.jit
def _numbers(words, scales, HALF: gl.constexpr, layout: gl.constexpr):
    """Returns the operand of half a step, [PART, 64], from words [PART, 8] and the rows' scales."""
    words = gl.reshape(words, [PART, 4, 2])  # j, q
    held: gl.constexpr = words.type.layout
    scales = gl.convert_layout(scales, gl.SliceLayout(1, gl.SliceLayout(2, held)))
    scales = gl.expand_dims(gl.expand_dims(scales, 1), 2)
    word = gl.expand_dims(gl.expand_dims(gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(0, held))), 0), 0)
    by = ((scales >> (16 * HALF + 8 * word)) & 255) * 0x00800080 + 0x1F001F00  # as exponents of bfloat16, plus 62
    assembly: gl.constexpr = _assembly()
    a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
        assembly, NUMBER_REGISTERS, [words, by], (gl.bfloat16,) * 8, is_pure=True, pack=1
    )
    first, second = gl.join(gl.join(a, b), gl.join(c, d)), gl.join(gl.join(e, f), gl.join(g, h))
    every = gl.reshape(gl.join(first, second), [PART, 4, 2, 2, 2, 2])  # output, j, q, i, p & 1, p >> 1
    tile = gl.reshape(gl.permute(every, (0, 2, 5, 4, 1, 3)), [PART, 64])
    return gl.convert_layout(tile, gl.DotOperandLayout(0, layout, 2))


@gluon.jit
def _words(codes, NUMBER: gl.constexpr, GATED: gl.constexpr):
    """Returns a part's words in a stage: of the first and of the second half of a step, [PART, 8] each."""
    registers: gl.constexpr = [[0, 1], [0, 8]]
    lanes: gl.constexpr = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    if GATED:
        layout: gl.constexpr = gl.DistributedLinearLayout(registers, lanes, [[8, 0], [16, 0]], [], [32, 16])
        gate = codes.slice(32 * NUMBER, 32).load(layout)
        up = codes.slice(codes.shape[0] // 2 + 32 * NUMBER, 32).load(layout)
        both = gl.permute(gl.reshape(gl.join(gate, up), [4, 8, WORDS, 2]), (0, 3, 1, 2))
        words = gl.reshape(both, [PART, WORDS])
    else:
        whole: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 1], [0, 8], [8, 0]], lanes, [[16, 0], [32, 0]], [], [64, 16]
        )
        words = codes.slice(PART * NUMBER, PART).load(whole)
    return gl.split(gl.permute(gl.reshape(words, [PART, 2, 8]), (0, 2, 1)))


@gluon.jit
def _sums(codes, scales, values, ready, empty, taken, steps, NUMBER: gl.constexpr, GATED: gl.constexpr):
    """Returns the sums of a part of a tile, `[PART, ROWS]` float32."""
    STAGES: gl.constexpr = codes.shape[0]
    ROWS: gl.constexpr = values.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    lines: gl.constexpr = gl.DistributedLinearLayout([[8]], [[0], [0], [1], [2], [4]], [[16], [32]], [], [64])
    total = gl.zeros([PART, ROWS], gl.float32, layout)
    for step in range(steps):
        stage = (taken + step) % STAGES
        mbarrier.wait(ready.index(stage), ((taken + step) // STAGES) & 1)
        first, second = _words(codes.index(stage), NUMBER, GATED)
        scale = scales.index(stage).slice(PART * NUMBER, PART).load(lines)
        for half in gl.static_range(2):
            numbers = _numbers(first if half == 0 else second, scale, half, layout)
            tile_values = values.index(stage).slice(64 * half, 64, 1).permute((1, 0))
            total = warpgroup_mma(numbers, tile_values, total, is_async=True)
            total = warpgroup_mma_wait(0, deps=[total])
        mbarrier.arrive(empty.index(stage), count=1)
    return total * SCALED_BY


@gluon.jit
def _multiply(own, NUMBER: gl.constexpr, KIND: gl.constexpr):
    """Multiplies the part of this number."""
    gdc_wait()
    out, bias, pair_weights, sorted_pairs, block_experts, codes, scales, values, ready, empty, sizes = own
    tiles, columns, steps, pairs, outputs = sizes
    ROWS: gl.constexpr = values.shape[1]
    GATED: gl.constexpr = KIND > 0
    WIDE: gl.constexpr = PART // 2 if GATED else PART
    PARTS: gl.constexpr = codes.shape[1] // PART
    THREADS: gl.constexpr = WIDE // 4
    plain: gl.constexpr = gl.BlockedLayout([4, 1], [THREADS, 32 // THREADS], [1, 4], [0, 1])
    plain_line = gl.arange(0, WIDE, gl.SliceLayout(1, plain))
    plain_row = gl.arange(0, ROWS, gl.SliceLayout(0, plain))
    tile = gl.program_id(0)
    expert = gl.load(block_experts + tile // columns)
    taken = 0
    while expert >= 0:
        following = tile + gl.num_programs(0)
        next_expert = gl.load(block_experts + following // columns, mask=following < tiles, other=-1)
        begin = sorted_pairs + tile // columns * ROWS
        column = (tile % columns * PARTS + NUMBER) * WIDE
        total = _sums(codes, scales, values, ready, empty, taken, steps, NUMBER, GATED)
        taken += steps
        layout: gl.constexpr = total.type.layout
        if GATED:
            both = gl.permute(gl.reshape(total, [4, 2, 8, ROWS]), (0, 2, 3, 1))
            gate, up = gl.split(gl.reshape(both, [WIDE, ROWS, 2]))
            if bias is not None:
                line = column + gl.arange(0, WIDE, gl.SliceLayout(1, gate.type.layout))
                place = bias + expert * (2 * outputs) + line
                gate += gl.load(place, mask=line < outputs, other=0.0).to(gl.float32)[:, None]
                up += gl.load(place + outputs, mask=line < outputs, other=0.0).to(gl.float32)[:, None]
            total = activate_gated_by(gate, up, KIND)
        else:
            if bias is not None:
                line = column + gl.arange(0, WIDE, gl.SliceLayout(1, layout))
                added = gl.load(bias + expert * outputs + line, mask=line < outputs, other=0.0)
                total += added.to(gl.float32)[:, None]
            pair = gl.load(begin + gl.arange(0, ROWS, gl.SliceLayout(0, layout)))
            total *= gl.load(pair_weights + pair, mask=pair < pairs, other=0.0)[None, :]
        result = gl.convert_layout(total.to(out.dtype.element_ty), plain)
        target = gl.load(begin + plain_row)
        output = column + plain_line
        places = out + target.to(gl.int64)[None, :] * outputs + output[:, None]
        gl.store(places, result, mask=(target < pairs)[None, :] & (output < outputs)[:, None])
        tile = following
        expert = next_expert


@gluon.jit
def _fetch(
    x, code_tiles, scale, sorted_pairs, block_experts, codes, scales, values, ready, empty, sizes, x_stride, inputs,
    lines, TOP_K: gl.constexpr, GATED: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Fill the ring. `lines`: rows of all experts' weights. EARLY: as `stream_experts` has it."""
    tiles, columns, steps, pairs, outputs = sizes
    STAGES: gl.constexpr = codes.shape[0]
    OUTPUTS: gl.constexpr = codes.shape[1]
    ROWS: gl.constexpr = values.shape[1]
    K: gl.constexpr = values.shape[2]
    WIDE: gl.constexpr = OUTPUTS // 2 if GATED else OUTPUTS
    BYTES: gl.constexpr = OUTPUTS * WORDS * 4
    tile = gl.program_id(0)
    if EARLY:
        expert = gl.load(block_experts + tile // columns, cache_modifier=".cg")
        for early in gl.static_range(STAGES):
            bar = ready.index(early)
            wanted = (expert >= 0) & (early < steps)
            mbarrier.expect(bar, BYTES, pred=wanted)
            into = codes.index(early)
            fetch_weights(code_tiles, bar, into, expert, tile % columns, early * WORDS, wanted, outputs, GATED)
    gdc_wait()
    gdc_launch_dependents()  # so late that the next one may read what was there before this one
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    inside = gl.arange(0, K, gl.SliceLayout(0, layout))[None, :]
    line = gl.arange(0, OUTPUTS, gl.BlockedLayout([1], [32], [4], [0]))
    if GATED:  # as warps hold them: eight of gate, eight of up
        line = line // 16 * 8 + line % 8 + line // 8 % 2 * outputs
    expert = gl.load(block_experts + tile // columns)
    fetched = 0
    while expert >= 0:
        following = tile + gl.num_programs(0)
        next_expert = gl.load(block_experts + following // columns, mask=following < tiles, other=-1)
        pair = gl.load(sorted_pairs + tile // columns * ROWS + row)
        source = (pair // TOP_K)[:, None] * x_stride + inside  # few registers: not as pointers
        live = (pair < pairs)[:, None]
        place = expert * (outputs * (2 if GATED else 1)) + tile % columns * WIDE + line
        for step in range(steps):
            stage = fetched % STAGES
            bar = ready.index(stage)
            mbarrier.wait(empty.index(stage), ((fetched // STAGES) & 1) ^ 1)
            wanted = fetched >= gl.minimum(steps, STAGES) if EARLY else True  # the others are on their way
            mbarrier.expect(bar, BYTES, pred=wanted)
            into = codes.index(stage)
            fetch_weights(code_tiles, bar, into, expert, tile % columns, step * WORDS, wanted, outputs, GATED)
            of_step = scale + (step * lines + place)
            async_copy.async_copy_global_to_shared(scales.index(stage), of_step, mask=place < lines)
            mask = live & (inside < inputs - step * K)
            async_copy.async_copy_global_to_shared(values.index(stage), x + (source + step * K), mask=mask)
            async_copy.mbarrier_arrive(bar, increment_count=False)
            fetched += 1
        tile = following
        expert = next_expert


@gluon.jit(do_not_specialize=["tiles", "columns", "steps", "pairs"])
def _stream_lanes_kernel(
    x, code_tiles, scale, bias, out, pair_weights, sorted_pairs, block_experts, tiles, columns, steps, pairs, outputs,
    x_stride, inputs, lines, TOP_K: gl.constexpr, KIND: gl.constexpr, EARLY: gl.constexpr, ROWS: gl.constexpr,
    PARTS: gl.constexpr, STAGES: gl.constexpr, MULTIPLYING: gl.constexpr, FETCHING: gl.constexpr,
):  # fmt: skip
    OUTPUTS: gl.constexpr = PARTS * PART
    dtype: gl.constexpr = x.dtype.element_ty
    shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, 8 * WORDS], dtype)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    codes = gl.allocate_shared_memory(gl.int32, [STAGES, OUTPUTS, WORDS], code_tiles.layout)
    values = gl.allocate_shared_memory(dtype, [STAGES, ROWS, 8 * WORDS], shared)
    scales = gl.allocate_shared_memory(gl.int32, [STAGES, OUTPUTS], plain)
    ready, empty = barriers(STAGES, 129, PARTS)  # each thread's copies, and the codes
    sizes = (tiles, columns, steps, pairs, outputs)
    own = (out, bias, pair_weights, sorted_pairs, block_experts, codes, scales, values, ready, empty, sizes)
    fetched = (
        x, code_tiles, scale, sorted_pairs, block_experts, codes, scales, values, ready, empty, sizes, x_stride,
        inputs, lines, TOP_K, KIND > 0, EARLY,
    )  # fmt: skip
    if PARTS == 1:
        gl.warp_specialize([(_multiply, (own, 0, KIND)), (_fetch, fetched)], [4], [FETCHING])
    else:
        gl.warp_specialize(
            [
                (_multiply, (own, 0, KIND)),
                (_multiply, (own, 1, KIND)),
                (_multiply, (own, 2, KIND)),
                (_multiply, (own, 3, KIND)),
                (_fetch, fetched),
            ],
            [4, 4, 4, 4],
            [MULTIPLYING, MULTIPLYING, MULTIPLYING, FETCHING],
        )


def stream_lanes(
    x: torch.Tensor,
    weight: LaneWeight,
    out: torch.Tensor,
    blocks: Alignment,
    shape: LaneShape,
    *,
    top_k: int = 1,
    activation: str | None = None,
    bias: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    early: bool = False,
) -> None:
    """A product of each pair of token and expert: rows of x with their experts' weights.

    x        [T, inputs] bfloat16, a row for each `top_k` pairs
    weight   [experts * outputs, inputs]; with an activation those of gate, then of up
    out      [pairs, outputs]
    blocks   of so many rows as `SHAPES` knows
    bias     [experts, outputs], with an activation [experts, 2 * outputs], or None
    weights  [pairs] float32 that multiply the results: without an activation
    early    the kernel before lets this one start only when those before it have ended, `align` among them

    Moves the codes and scales of each expert that is chosen once for each of its blocks.
    """
    (pairs, outputs), rows = out.shape, blocks.rows
    inputs = x.shape[1]
    wide = PART.value * shape.parts // (1 if activation is None else 2)
    columns = cdiv(outputs, wide)
    tiles = blocks.experts.shape[0] * columns
    _stream_lanes_kernel[(min(shape.programs * processors(x.device), tiles),)](
        x,
        tiles_of(weight.codes, wide, WORDS.value),
        weight.scales,
        bias,
        out,
        weights,
        blocks.pairs,
        blocks.experts,
        tiles,
        columns,
        cdiv(inputs, STEP),
        pairs,
        outputs,
        x.stride(0),
        inputs,
        weight.codes.shape[0],
        top_k,
        KINDS.index(activation),
        early,
        rows,
        shape.parts,
        shape.stages,
        shape.multiplying,
        shape.fetching,
        num_warps=4,
        maxnreg=shape.registers,
        launch_pdl=True,
    )
