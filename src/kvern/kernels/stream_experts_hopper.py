"""The experts of few rows on Hopper GPUs (compute capability 9.0), bound by the bytes of their weights.

    x [T, inputs] @ weight[expert].T -> [pairs, outputs], or activation(gate) * up of the two halves of an expert's rows

Of 16 bits, or codes of eight bits, both e4m3 or int8, with a scale for each row.

A program stays on its processor while there are tiles of a block's rows and 128 outputs: four warps stream weights
through TMA, and rows of x that lie apart through ordinary copies, into a ring of shared memory; four others multiply,
with outputs as the rows of the matrix units' tiles. The ring goes on filling while a tile is written. Where the blocks
are known before the kernel before has ended, weights are on their way by then.

The matrix units add products of e4m3 in about 14 bits: sums of a step are added to others in float32.
"""

import torch
import triton
import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvern.kernels.hopper import KINDS, activate_by, barriers, fetch_weights, processors, tiles_of
from kvern.kernels.moe_routing import Alignment
from kvern.kernels.product_hopper import RowScales

OUTPUTS, INPUT_BYTES = 128, 128
"""The sizes of a tile. Of gated ones, 64 outputs are gate's and 64 up's."""
STAGES = {16: 11, 32: 10, 64: 8}
"""The stages by the rows of a block: with what changes layouts they fill the shared memory."""
REGISTERS, PRODUCER_REGISTERS = {16: 88, 32: 104, 64: 128}, 56
"""The mean registers of a thread, so that programs of the next kernel have room; multiplying threads get what others
leave."""


@gluon.jit
def _fetch(
    x, weight_tiles, sorted_pairs, block_experts, values, weights, ready, empty, sizes, x_stride, inputs,
    TOP_K: gl.constexpr, EVEN: gl.constexpr, GATED: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    tiles, columns, steps, pairs, outputs = sizes
    STAGES: gl.constexpr = weights.shape[0]
    K: gl.constexpr = weights.shape[2]
    ROWS: gl.constexpr = values.shape[1]
    BITS: gl.constexpr = weights.dtype.primitive_bitwidth
    WEIGHT_BYTES: gl.constexpr = weights.shape[1] * K * (BITS // 8)
    tile = gl.program_id(0)
    if EARLY:
        expert = gl.load(block_experts + tile // columns, cache_modifier=".cg")
        for early in gl.static_range(STAGES):
            bar = ready.index(early)
            wanted = (expert >= 0) & (early < steps)
            mbarrier.expect(bar, WEIGHT_BYTES, pred=wanted)
            stage_weights = weights.index(early)
            fetch_weights(weight_tiles, bar, stage_weights, expert, tile % columns, early * K, wanted, outputs, GATED)
    gdc_wait()
    gdc_launch_dependents()  # so late that the next one may read what was there before this one
    layout: gl.constexpr = gl.BlockedLayout([1, 128 // BITS], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    inside = gl.arange(0, K, gl.SliceLayout(0, layout))[None, :]
    expert = gl.load(block_experts + tile // columns)
    fetched = 0
    while expert >= 0:
        following = tile + gl.num_programs(0)
        next_expert = gl.load(block_experts + following // columns, mask=following < tiles, other=-1)
        pair = gl.load(sorted_pairs + tile // columns * ROWS + row)
        source = x + (pair // TOP_K).to(gl.int64)[:, None] * x_stride + inside
        live = (pair < pairs)[:, None]
        for step in range(steps):
            stage = fetched % STAGES
            bar = ready.index(stage)
            mbarrier.wait(empty.index(stage), ((fetched // STAGES) & 1) ^ 1)
            wanted = fetched >= gl.minimum(steps, STAGES) if EARLY else True  # the others are on their way
            mbarrier.expect(bar, WEIGHT_BYTES, pred=wanted)
            stage_weights = weights.index(stage)
            fetch_weights(weight_tiles, bar, stage_weights, expert, tile % columns, step * K, wanted, outputs, GATED)
            mask = live
            if not EVEN:
                mask = live & (inside < inputs - step * K)
            async_copy.async_copy_global_to_shared(values.index(stage), source + step * K, mask=mask)
            async_copy.mbarrier_arrive(bar, increment_count=False)
            fetched += 1
        tile = following
        expert = next_expert


@gluon.jit
def _sums(weights, values, ready, empty, taken, steps, layout: gl.constexpr):
    """Returns the sums of a tile `[OUTPUTS, ROWS]` as float32."""
    STAGES: gl.constexpr = weights.shape[0]
    SHAPE: gl.constexpr = [weights.shape[1], values.shape[1]]
    BITS: gl.constexpr = weights.dtype.primitive_bitwidth
    INTEGERS: gl.constexpr = weights.dtype == gl.int8
    if BITS == 8 and not INTEGERS:
        total = gl.zeros(SHAPE, gl.float32, layout)
        part = total
        for step in range(steps):
            stage = (taken + step) % STAGES
            mbarrier.wait(ready.index(stage), ((taken + step) // STAGES) & 1)
            tile_values = values.index(stage).permute((1, 0))
            part = warpgroup_mma(weights.index(stage), tile_values, part, use_acc=False, is_async=True)
            part = warpgroup_mma_wait(0, deps=[part])
            mbarrier.arrive(empty.index(stage), count=1)
            total += part
        return total
    else:
        sums = gl.zeros(SHAPE, gl.int32 if INTEGERS else gl.float32, layout)
        for step in range(steps):
            stage = (taken + step) % STAGES
            mbarrier.wait(ready.index(stage), ((taken + step) // STAGES) & 1)
            tile_values = values.index(stage).permute((1, 0))
            sums = warpgroup_mma(weights.index(stage), tile_values, sums, is_async=True)
            sums = warpgroup_mma_wait(1, deps=[sums])
            mbarrier.arrive(empty.index((taken + step + STAGES - 1) % STAGES), count=1, pred=step > 0)
        sums = warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(empty.index((taken + steps + STAGES - 1) % STAGES), count=1)
        return sums.to(gl.float32)


@gluon.jit
def _multiply(
    out, x_scale, scale, pair_weights, sorted_pairs, block_experts, values, weights, ready, empty, sizes,
    TOP_K: gl.constexpr, PER: gl.constexpr, KIND: gl.constexpr,
):  # fmt: skip
    gdc_wait()
    tiles, columns, steps, pairs, outputs = sizes
    OUTPUTS: gl.constexpr = weights.shape[1]
    ROWS: gl.constexpr = values.shape[1]
    GATED: gl.constexpr = KIND > 0
    WIDE: gl.constexpr = OUTPUTS // 2 if GATED else OUTPUTS
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, ROWS, 256 // weights.dtype.primitive_bitwidth]
    )
    plain: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, 4], [0, 1])
    row = gl.arange(0, ROWS, gl.SliceLayout(0, layout))
    plain_row = gl.arange(0, ROWS, gl.SliceLayout(0, plain))
    line = gl.arange(0, OUTPUTS, gl.SliceLayout(1, layout))
    plain_line = gl.arange(0, WIDE, gl.SliceLayout(1, plain))
    tile = gl.program_id(0)
    expert = gl.load(block_experts + tile // columns)
    taken = 0
    while expert >= 0:
        following = tile + gl.num_programs(0)
        next_expert = gl.load(block_experts + following // columns, mask=following < tiles, other=-1)
        begin = sorted_pairs + tile // columns * ROWS
        column = tile % columns * WIDE
        target = gl.load(begin + plain_row)
        pair = gl.load(begin + row)
        if x_scale is not None:
            by_row = gl.load(x_scale + pair // TOP_K, mask=pair < pairs, other=0.0)
            output = column + line % WIDE
            weight_row = expert * (outputs * (OUTPUTS // WIDE)) + line // WIDE * outputs + output
            by_line = gl.load(scale + weight_row // PER, mask=output < outputs, other=0.0)
        if pair_weights is not None:
            by_pair = gl.load(pair_weights + pair, mask=pair < pairs, other=0.0)
        total = _sums(weights, values, ready, empty, taken, steps, layout)
        taken += steps
        if x_scale is not None:
            total = total * by_line[:, None] * by_row[None, :]
        if GATED:
            gate, up = gl.split(gl.permute(gl.reshape(total, [2, WIDE, ROWS]), (1, 2, 0)))
            total = activate_by(gate, KIND) * up
        elif pair_weights is not None:
            total *= by_pair[None, :]
        result = gl.convert_layout(total.to(out.dtype.element_ty), plain)
        output = column + plain_line
        places = out + target.to(gl.int64)[None, :] * outputs + output[:, None]
        gl.store(places, result, mask=(target < pairs)[None, :] & (output < outputs)[:, None])
        tile = following
        expert = next_expert


@gluon.jit(do_not_specialize=["tiles", "columns", "steps", "pairs"])
def _stream_experts_kernel(
    x, weight_tiles, out, x_scale, scale, pair_weights, sorted_pairs, block_experts, tiles, columns, steps, pairs,
    outputs, x_stride, inputs, TOP_K: gl.constexpr, EVEN: gl.constexpr, PER: gl.constexpr, KIND: gl.constexpr,
    EARLY: gl.constexpr, ROWS: gl.constexpr, OUTPUTS: gl.constexpr, INPUTS: gl.constexpr, STAGES: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = weight_tiles.dtype
    shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, INPUTS], dtype)
    weights_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([OUTPUTS, INPUTS], dtype)
    values = gl.allocate_shared_memory(dtype, [STAGES, ROWS, INPUTS], shared)
    weights = gl.allocate_shared_memory(dtype, [STAGES, OUTPUTS, INPUTS], weights_shared)
    ready, empty = barriers(STAGES, 129, 1)  # each thread's copies, and the weights
    sizes = (tiles, columns, steps, pairs, outputs)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    out, x_scale, scale, pair_weights, sorted_pairs, block_experts, values, weights, ready, empty,
                    sizes, TOP_K, PER, KIND,
                ),
            ),
            (
                _fetch,
                (
                    x, weight_tiles, sorted_pairs, block_experts, values, weights, ready, empty, sizes, x_stride,
                    inputs, TOP_K, EVEN, KIND > 0, EARLY,
                ),
            ),
        ],
        [4],
        [PRODUCER_REGISTERS],
    )  # fmt: skip


def stream_experts(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    blocks: Alignment,
    top_k: int = 1,
    activation: str | None = None,
    weights: torch.Tensor | None = None,
    scales: RowScales | None = None,
    early: bool = False,
) -> None:
    """A product of each pair of token and expert: rows of x with their experts' weights.

    x        [T, inputs], a row for each `top_k` pairs; codes with `scales`
    weight   [experts * outputs, inputs] of the dtype of x; with an activation those of gate, then of up
    out      [pairs, outputs]
    blocks   of so many rows as `STAGES` knows
    weights  [pairs] float32 that multiply the results, or None
    early    the kernel before lets this one start only when those before it have ended, `align` among them

    Moves the weights of each expert that is chosen once for each of its blocks.
    """
    (pairs, outputs), rows = out.shape, blocks.rows
    inputs = INPUT_BYTES // x.element_size()
    wide = OUTPUTS if activation is None else OUTPUTS // 2
    columns = triton.cdiv(outputs, wide)
    tiles = blocks.experts.shape[0] * columns
    _stream_experts_kernel[(min(processors(x.device), tiles),)](
        x,
        tiles_of(weight, wide, inputs),
        out,
        None if scales is None else scales.x,
        None if scales is None else scales.weight,
        weights,
        blocks.pairs,
        blocks.experts,
        tiles,
        columns,
        triton.cdiv(x.shape[1], inputs),
        pairs,
        outputs,
        x.stride(0),
        x.shape[1],
        top_k,
        x.shape[1] % inputs == 0,
        1 if scales is None else scales.per,
        KINDS.index(activation),
        early,
        rows,
        OUTPUTS,
        inputs,
        STAGES[rows],
        PRODUCER_REGISTERS,
        num_warps=4,
        maxnreg=REGISTERS[rows],
        launch_pdl=True,
    )
