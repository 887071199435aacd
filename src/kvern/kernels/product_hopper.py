"""Products of many rows on Hopper GPUs (compute capability 9.0), of a matrix or of a mixture's experts.

    x [T, inputs] @ weight.T -> [T, outputs], or activation(gate) * up of the two halves of the outputs

Of 16 bits; experts' of e4m3 codes too, whose rows have a scale each.

A program is three groups of warps, and stays on its processor while there are tiles of 128 rows and 256 outputs: one
group fetches tiles of x and of the weights through TMA (rows of x that lie apart through ordinary copies) into a ring
of shared memory, and two groups multiply 64 rows each; one whose rows are empty multiplies nothing. The next tile's
weights are on their way while a tile is written, and those of a matrix while the kernel before still runs.
"""

from typing import NamedTuple

import torch
import triton
import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvern.kernels.hopper import KINDS, activate_by, barriers, fetch_weights, processors, tiles_of
from kvern.kernels.linear import ProductShape
from kvern.kernels.moe_routing import Alignment

ROWS = 128
OUTPUTS = 256
INPUT_BYTES = 128
"""The sizes of a tile. Its sums take half of the registers that a thread can have."""
STAGES = 4
"""The stages of 48 KiB; with the 32 KiB being written they fill the shared memory."""
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232


@gluon.jit
def place_of(tile, group, columns):
    """The block of rows and the column of a tile: `group` blocks run side by side over the same weights."""
    inside = tile % (group * columns)
    return tile // (group * columns) * group + inside % group, inside // group


@gluon.jit
def _expect(ready, both, wanted, ROW_BYTES: gl.constexpr, WEIGHT_BYTES: gl.constexpr):
    """The weights, and one half of the rows or both."""
    mbarrier.expect(ready, WEIGHT_BYTES + 2 * ROW_BYTES, pred=both & wanted)
    mbarrier.expect(ready, WEIGHT_BYTES + ROW_BYTES, pred=(both == 0) & wanted)


@gluon.jit
def fetch(
    x, x_tiles, weight_tiles, sorted_pairs, block_experts, values, weights, ready, empty, sizes, x_stride, inputs,
    TOP_K: gl.constexpr, EVEN: gl.constexpr, GATED: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """Fill the ring for a program's tiles. SPLITS: a tile is so many, each of so many `steps` behind one another."""
    gdc_launch_dependents()
    tiles, columns, group, steps, rows, outputs = sizes
    STAGES: gl.constexpr = empty.shape[0]
    HALF: gl.constexpr = values.shape[1]
    K: gl.constexpr = values.shape[2]
    EXPERTS: gl.constexpr = block_experts is not None
    GATHER: gl.constexpr = x is not None
    BITS: gl.constexpr = weights.dtype.primitive_bitwidth
    ROW_BYTES: gl.constexpr = HALF * K * (BITS // 8)
    WEIGHT_BYTES: gl.constexpr = weights.shape[1] * K * (BITS // 8)
    if not EXPERTS:
        block, column = place_of(gl.program_id(0) // SPLITS, group, columns)
        begin = gl.program_id(0) % SPLITS * steps
        for early in gl.static_range(STAGES):
            bar = ready.index(early)
            _expect(bar, (2 * block + 1) * HALF < rows, early < steps, ROW_BYTES, WEIGHT_BYTES)
            start = (begin + early) * K
            fetch_weights(weight_tiles, bar, weights.index(early), 0, column, start, early < steps, outputs, GATED)
    gdc_wait()
    layout: gl.constexpr = gl.BlockedLayout([1, 128 // BITS], [4, 8], [4, 1], [1, 0])
    fetched = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        block, column = place_of(tile // SPLITS, group, columns)
        begin = tile % SPLITS * steps
        expert = 0
        both = (2 * block + 1) * HALF < rows
        if EXPERTS:
            expert = gl.load(block_experts + block)
            both = gl.load(sorted_pairs + (2 * block + 1) * HALF) < rows
        if expert >= 0:
            if GATHER:
                row = gl.arange(0, HALF, gl.SliceLayout(1, layout))
                inside = gl.arange(0, K, gl.SliceLayout(0, layout))[None, :]
                pair = gl.load(sorted_pairs + 2 * block * HALF + row)
                other = gl.load(sorted_pairs + (2 * block + 1) * HALF + row)
                source = x + (pair // TOP_K).to(gl.int64)[:, None] * x_stride + inside
                other_source = x + (other // TOP_K).to(gl.int64)[:, None] * x_stride + inside
                live, other_live = (pair < rows)[:, None], (other < rows)[:, None]
            for step in range(steps):
                stage = fetched % STAGES
                bar = ready.index(stage)
                mbarrier.wait(empty.index(stage), ((fetched // STAGES) & 1) ^ 1)
                wanted = True if EXPERTS else fetched >= gl.minimum(steps, STAGES)  # the others are on their way
                if GATHER:
                    mbarrier.expect(bar, WEIGHT_BYTES)
                else:
                    _expect(bar, both, wanted, ROW_BYTES, WEIGHT_BYTES)
                tile_weights = weights.index(stage)
                start = (begin + step) * K
                fetch_weights(weight_tiles, bar, tile_weights, expert, column, start, wanted, outputs, GATED)
                first, second = values.index(2 * stage), values.index(2 * stage + 1)
                if GATHER:
                    mask, other_mask = live, other_live
                    if not EVEN:
                        mask, other_mask = (
                            mask & (inside < inputs - step * K),
                            other_mask & (inside < inputs - step * K),
                        )
                    async_copy.async_copy_global_to_shared(first, source + step * K, mask=mask)
                    async_copy.async_copy_global_to_shared(second, other_source + step * K, mask=other_mask)
                    async_copy.mbarrier_arrive(bar, increment_count=False)
                else:
                    tma.async_copy_global_to_shared(x_tiles, [2 * block * HALF, start], bar, first)
                    next_half = (2 * block + 1) * HALF
                    tma.async_copy_global_to_shared(x_tiles, [next_half, start], bar, second, pred=both)
                fetched += 1


@gluon.jit
def _output(column, outputs, WIDE: gl.constexpr, GATED: gl.constexpr, layout: gl.constexpr):
    """The outputs of a tile's columns, of gate's half and up's, and whether there are such."""
    place = gl.arange(0, WIDE, layout)
    output = column * WIDE + place
    known = output < outputs
    if GATED:
        output = column * (WIDE // 2) + place % (WIDE // 2)
        known = output < outputs
        output += place // (WIDE // 2) * outputs
    return output, known


@gluon.jit
def write(out_tiles, staged, result, row, column):
    """Through shared memory, once what was there before has left it."""
    tma.store_wait(0)
    staged.store(result.to(staged.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out_tiles, [row, column], staged)


@gluon.jit
def _multiply(
    out_tiles, bias, x_scale, scale, sorted_pairs, block_experts, values, weights, staged, ready, empty, sizes,
    TOP_K: gl.constexpr, PER: gl.constexpr, PART: gl.constexpr, KIND: gl.constexpr,
):  # fmt: skip
    gdc_wait()
    tiles, columns, group, steps, rows, outputs = sizes
    STAGES: gl.constexpr = empty.shape[0]
    HALF: gl.constexpr = values.shape[1]
    WIDE: gl.constexpr = weights.shape[1]
    EXPERTS: gl.constexpr = block_experts is not None
    GATED: gl.constexpr = KIND > 0
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, WIDE, 256 // weights.dtype.primitive_bitwidth]
    )
    taken = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        block, column = place_of(tile, group, columns)
        expert = 0
        row = (2 * block + PART) * HALF
        first_row = row
        if EXPERTS:
            expert = gl.load(block_experts + block)
            first_row = gl.load(sorted_pairs + row)
        if expert >= 0:
            if first_row < rows:
                if x_scale is not None:
                    place = row + gl.arange(0, HALF, gl.SliceLayout(1, layout))
                    line, live = place, place >= 0
                    if TOP_K > 0:
                        pair = gl.load(sorted_pairs + place)
                        line, live = pair // TOP_K, pair < rows
                    x_by = gl.load(x_scale + line, mask=live, other=0.0)
                total = gl.zeros([HALF, WIDE], gl.float32, layout)
                for step in range(steps):
                    stage = taken % STAGES
                    mbarrier.wait(ready.index(stage), (taken // STAGES) & 1)
                    tile_weights = weights.index(stage).permute((1, 0))
                    total = warpgroup_mma(values.index(2 * stage + PART), tile_weights, total, is_async=True)
                    total = warpgroup_mma_wait(1, deps=[total])
                    mbarrier.arrive(empty.index((taken + STAGES - 1) % STAGES), count=1, pred=step > 0)
                    taken += 1
                total = warpgroup_mma_wait(0, deps=[total])
                mbarrier.arrive(empty.index((taken + STAGES - 1) % STAGES), count=1)
                if x_scale is not None:
                    output, known = _output(column, outputs, WIDE, GATED, gl.SliceLayout(0, layout))
                    output += expert * (outputs * (2 if GATED else 1))
                    by = gl.load(scale + output // PER, mask=known, other=0.0)
                    total = total * x_by[:, None] * by[None, :]
                if bias is not None:
                    output, known = _output(column, outputs, WIDE, GATED, gl.SliceLayout(0, layout))
                    total += gl.load(bias + output, mask=known, other=0.0).to(gl.float32)[None, :]
                first, second = gl.split(gl.permute(gl.reshape(total, [HALF, 2, WIDE // 2]), (0, 2, 1)))
                if GATED:
                    write(out_tiles, staged, activate_by(first, KIND) * second, row, column * (WIDE // 2))
                else:
                    write(out_tiles, staged, first, row, column * WIDE)
                    write(out_tiles, staged, second, row, column * WIDE + WIDE // 2)
            else:
                for _ in range(steps):
                    stage = taken % STAGES
                    mbarrier.wait(ready.index(stage), (taken // STAGES) & 1)
                    mbarrier.arrive(empty.index(stage), count=1)
                    taken += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles", "columns", "group", "steps", "rows", "outputs"])
def _product_kernel(
    x, x_tiles, weight_tiles, out_tiles, bias, x_scale, scale, sorted_pairs, block_experts, tiles, columns, group,
    steps, rows, outputs, x_stride, inputs, TOP_K: gl.constexpr, EVEN: gl.constexpr, PER: gl.constexpr,
    KIND: gl.constexpr, ROWS: gl.constexpr, OUTPUTS: gl.constexpr, INPUTS: gl.constexpr, STAGES: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
):  # fmt: skip
    GATHER: gl.constexpr = x is not None
    dtype: gl.constexpr = weight_tiles.dtype
    shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS // 2, INPUTS], dtype)
    values = gl.allocate_shared_memory(dtype, [2 * STAGES, ROWS // 2, INPUTS], shared)
    weights = gl.allocate_shared_memory(dtype, [STAGES, OUTPUTS, INPUTS], shared)
    staged = gl.allocate_shared_memory(out_tiles.dtype, [2, ROWS // 2, OUTPUTS // 2], out_tiles.layout)
    ready, empty = barriers(STAGES, 129 if GATHER else 1, 2)  # each thread's copies, and the weights
    sizes = (tiles, columns, group, steps, rows, outputs)
    gathered: gl.constexpr = TOP_K if GATHER else 0
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    out_tiles, bias, x_scale, scale, sorted_pairs, block_experts, values, weights, staged.index(0),
                    ready, empty, sizes, gathered, PER, 0, KIND,
                ),
            ),
            (
                _multiply,
                (
                    out_tiles, bias, x_scale, scale, sorted_pairs, block_experts, values, weights, staged.index(1),
                    ready, empty, sizes, gathered, PER, 1, KIND,
                ),
            ),
            (
                fetch,
                (
                    x, x_tiles, weight_tiles, sorted_pairs, block_experts, values, weights, ready, empty, sizes,
                    x_stride, inputs, TOP_K, EVEN, KIND > 0, 1,
                ),
            ),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, shape: ProductShape, activation: str | None = None
) -> torch.Tensor:
    """`x @ weight.T + bias`: [T, inputs], [outputs, inputs] -> [T, outputs], sums in float32; rows of x may have gaps.

    activation  gate and up are the two halves of the outputs, and the result is activation(gate) * up

    A row's result does not depend on how many rows there are.
    """
    rows, outputs = x.shape[0], weight.shape[0] // (1 if activation is None else 2)
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    _launch(x, weight, bias, out, activation, rows, triton.cdiv(rows, ROWS), shape.group)
    return out


class RowScales(NamedTuple):
    """The scales of codes: `x [T, 1]` and `weight [experts * outputs / per, 1]`, float32."""

    x: torch.Tensor
    weight: torch.Tensor
    per: int


def experts_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    blocks: Alignment,
    pairs: int,
    group: int,
    activation: str | None = None,
    gathered: int = 0,
    scales: RowScales | None = None,
) -> None:
    """A product of rows with their experts' weights: `out [blocks * 128, outputs]` in the order of `blocks.pairs`.

    weight    [experts * outputs, inputs], with an activation those of gate, then of up
    blocks    of 128 rows, a multiple of `group`
    gathered  rows of x are those of tokens, so many for each; 0: they lie as the blocks' rows
    scales    of codes

    Moves the weights of each expert that is chosen once for each `group` blocks.
    """
    _launch(x, weight, None, out, activation, pairs, blocks.experts.shape[0], group, blocks, gathered, scales)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    activation: str | None,
    rows: int,
    blocks: int,
    group: int,
    experts: Alignment | None = None,
    gathered: int = 0,
    scales: RowScales | None = None,
) -> None:
    """`gathered`: rows of x are those of the sorted pairs, so many for a row; 0: they lie as they are multiplied."""
    outputs, inputs = out.shape[1], INPUT_BYTES // x.element_size()
    if experts is None:
        group = triton.cdiv(blocks, triton.cdiv(blocks, group))  # so that few are empty
    wide = OUTPUTS if activation is None else OUTPUTS // 2
    columns = triton.cdiv(outputs, wide)
    tiles = triton.cdiv(blocks, group) * group * columns
    _product_kernel[(min(processors(x.device), tiles),)](
        x if gathered else None,
        None if gathered else tiles_of(x, ROWS // 2, inputs),
        tiles_of(weight, wide, inputs),
        tiles_of(out, ROWS // 2, OUTPUTS // 2),
        bias,
        None if scales is None else scales.x,
        None if scales is None else scales.weight,
        None if experts is None else experts.pairs,
        None if experts is None else experts.experts,
        tiles,
        columns,
        group,
        triton.cdiv(x.shape[1], inputs),
        rows,
        outputs,
        x.stride(0) if gathered else 0,
        x.shape[1] if gathered else 0,
        max(1, gathered),
        not gathered or x.shape[1] % inputs == 0,
        1 if scales is None else scales.per,
        KINDS.index(activation),
        ROWS,
        OUTPUTS,
        inputs,
        STAGES,
        PRODUCER_REGISTERS,
        CONSUMER_REGISTERS,
        num_warps=4,
        launch_pdl=True,
    )
