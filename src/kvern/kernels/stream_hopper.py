"""Products of few rows on Hopper GPUs (compute capability 9.0), bound by the bytes of the weights, in 16 bits.

    x [T, inputs] @ weight.T -> [T, outputs], or activation(gate) * up of the two halves of the outputs

All tiles of the weights, one output's after the other, are cut into equal shares, one for each processor, whatever the
shape of the matrix. A program's first warp streams its share through TMA into a ring of shared memory, and begins while
the kernel before still runs; four warps multiply, with outputs as the rows of the matrix units' tiles. Where a border
of shares cuts through the inputs of some outputs, whoever is last adds the sums of all, in their order.
"""

import torch
import triton
import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvern.kernels.linear import StreamShape
from kvern.kernels.product_hopper import KINDS, activate_by, processors, tiles_of


@gluon.jit
def _fetch_weights(weight_tiles, ready, weights, tile, begin, wanted, outputs, GATED: gl.constexpr):
    WIDE: gl.constexpr = weights.shape[0]
    HALF: gl.constexpr = WIDE // 2
    if GATED:
        gate = tile * HALF
        tma.async_copy_global_to_shared(weight_tiles, [gate, begin], ready, weights.slice(0, HALF), pred=wanted)
        up = weights.slice(HALF, HALF)
        tma.async_copy_global_to_shared(weight_tiles, [gate + outputs, begin], ready, up, pred=wanted)
    else:
        tma.async_copy_global_to_shared(weight_tiles, [tile * WIDE, begin], ready, weights, pred=wanted)


@gluon.jit
def _fetch(weight_tiles, x_tiles, weights, values, ready, empty, begin, end, steps, outputs, GATED: gl.constexpr):
    gdc_launch_dependents()
    STAGES: gl.constexpr = weights.shape[0]
    K: gl.constexpr = weights.shape[2]
    BYTES: gl.constexpr = (weights.shape[1] + values.shape[1]) * K * 2
    for early in gl.static_range(STAGES):
        step = begin + early
        bar = ready.index(early)
        mbarrier.expect(bar, BYTES, pred=step < end)
        first = step % steps * K
        _fetch_weights(weight_tiles, bar, weights.index(early), step // steps, first, step < end, outputs, GATED)
    gdc_wait()
    for early in gl.static_range(STAGES):
        step = begin + early
        first = step % steps * K
        tma.async_copy_global_to_shared(x_tiles, [0, first], ready.index(early), values.index(early), pred=step < end)
    tile = (begin + STAGES) // steps
    place = (begin + STAGES) % steps
    for fetched in range(STAGES, end - begin):
        stage = fetched % STAGES
        bar = ready.index(stage)
        mbarrier.wait(empty.index(stage), ((fetched // STAGES) & 1) ^ 1)
        mbarrier.expect(bar, BYTES)
        _fetch_weights(weight_tiles, bar, weights.index(stage), tile, place * K, True, outputs, GATED)
        tma.async_copy_global_to_shared(x_tiles, [0, place * K], bar, values.index(stage))
        place += 1
        if place == steps:
            place = 0
            tile += 1


@gluon.jit
def _multiply(
    out,
    bias,
    partial,
    arrived,
    weights,
    values,
    ready,
    empty,
    begin,
    end,
    share,
    steps,
    rows,
    outputs,
    KIND: gl.constexpr,
):
    gdc_wait()
    STAGES: gl.constexpr = weights.shape[0]
    OUTPUTS: gl.constexpr = weights.shape[1]
    ROWS: gl.constexpr = values.shape[1]
    WIDE: gl.constexpr = OUTPUTS // 2 if KIND > 0 else OUTPUTS
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    plain: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    line = gl.arange(0, OUTPUTS, gl.SliceLayout(1, layout))
    inside = line[:, None] * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, layout))[None, :]
    for tile in range(begin // steps, (end + steps - 1) // steps):
        low = gl.maximum(begin, tile * steps)
        high = gl.minimum(end, tile * steps + steps)
        total = gl.zeros([OUTPUTS, ROWS], gl.float32, layout)
        for step in range(low, high):
            taken = step - begin
            stage = taken % STAGES
            mbarrier.wait(ready.index(stage), (taken // STAGES) & 1)
            tile_values = values.index(stage).permute((1, 0))
            total = warpgroup_mma(weights.index(stage), tile_values, total, is_async=True)
            total = warpgroup_mma_wait(1, deps=[total])
            mbarrier.arrive(empty.index((taken + STAGES - 1) % STAGES), count=1, pred=step > low)
        total = warpgroup_mma_wait(0, deps=[total])
        mbarrier.arrive(empty.index((high - 1 - begin) % STAGES), count=1)
        last = high - low == steps
        if high - low < steps:
            # A share cuts at most its first tile and its last: two places for each program.
            place = 2 * gl.program_id(0) + gl.where(tile == begin // steps, 0, 1)
            gl.store(partial + place * (OUTPUTS * ROWS) + inside, total)
            gl.thread_barrier()
            last = gl.atomic_add(arrived + tile, high - low, sem="acq_rel") + high - low == steps
            if last:
                gl.thread_barrier()
                total = gl.zeros([OUTPUTS, ROWS], gl.float32, layout)
                for other in range(tile * steps // share, (tile * steps + steps - 1) // share + 1):
                    place = 2 * other + gl.where(tile == other * share // steps, 0, 1)
                    total += gl.load(partial + place * (OUTPUTS * ROWS) + inside, cache_modifier=".cg")
                gl.atomic_xchg(arrived + tile, 0)
        if last:
            if bias is not None:
                place = tile * WIDE + line % WIDE
                added = gl.load(bias + place + line // WIDE * outputs, mask=place < outputs, other=0.0)
                total += added.to(gl.float32)[:, None]
            if KIND > 0:
                gate, up = gl.split(gl.permute(gl.reshape(total, [2, WIDE, ROWS]), (1, 2, 0)))
                result = gl.convert_layout((activate_by(gate, KIND) * up).to(out.dtype.element_ty), plain)
            else:
                result = gl.convert_layout(total.to(out.dtype.element_ty), plain)
            output = tile * WIDE + gl.arange(0, WIDE, gl.SliceLayout(1, plain))
            row = gl.arange(0, ROWS, gl.SliceLayout(0, plain))
            target = out + row.to(gl.int64)[None, :] * outputs + output[:, None]
            gl.store(target, result, mask=(row < rows)[None, :] & (output < outputs)[:, None])


@gluon.jit(do_not_specialize=["rows", "outputs", "steps", "share", "total"])
def _stream_kernel(
    x_tiles,
    weight_tiles,
    bias,
    out,
    partial,
    arrived,
    rows,
    outputs,
    steps,
    share,
    total,
    KIND: gl.constexpr,
    ROWS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    INPUTS: gl.constexpr,
    STAGES: gl.constexpr,
):
    dtype: gl.constexpr = x_tiles.dtype
    shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([OUTPUTS, INPUTS], dtype)
    weights = gl.allocate_shared_memory(dtype, [STAGES, OUTPUTS, INPUTS], shared)
    values = gl.allocate_shared_memory(dtype, [STAGES, ROWS, INPUTS], x_tiles.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    begin = gl.program_id(0) * share
    end = gl.minimum(begin + share, total)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    out,
                    bias,
                    partial,
                    arrived,
                    weights,
                    values,
                    ready,
                    empty,
                    begin,
                    end,
                    share,
                    steps,
                    rows,
                    outputs,
                    KIND,
                ),
            ),
            (
                _fetch,
                (weight_tiles, x_tiles, weights, values, ready, empty, begin, end, steps, outputs, KIND > 0),
            ),
        ],
        [1],
        [32],
    )


def stream_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    shape: StreamShape,
    arrived: torch.Tensor,
    activation: str | None = None,
) -> torch.Tensor:
    """`x @ weight.T + bias`: [T, inputs], [outputs, inputs] -> [T, outputs], T at most `shape.rows`, sums in float32.

    arrived     an int32 zero for every tile of outputs, which is zero again afterwards
    activation  gate and up are the two halves of the outputs, and the result is activation(gate) * up

    A row's result depends on the shape of the tiles and on the device, not on how many rows there are. Moves the
    weights once.
    """
    rows, inputs = x.shape
    outputs = weight.shape[0] // (1 if activation is None else 2)
    wide = shape.outputs if activation is None else shape.outputs // 2
    steps = triton.cdiv(inputs, shape.inputs)
    total = triton.cdiv(outputs, wide) * steps
    share = triton.cdiv(total, processors(x.device))
    programs = triton.cdiv(total, share)
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    partial = torch.empty(2 * programs, shape.outputs, shape.rows, dtype=torch.float32, device=x.device)
    _stream_kernel[(programs,)](
        tiles_of(x, shape.rows, shape.inputs),
        tiles_of(weight, wide, shape.inputs),
        bias,
        out,
        partial,
        arrived,
        rows,
        outputs,
        steps,
        share,
        total,
        KINDS.index(activation),
        shape.rows,
        shape.outputs,
        shape.inputs,
        shape.stages,
        num_warps=4,
        launch_pdl=True,
    )
    return out
