"""Products of few rows on Hopper GPUs (compute capability 9.0), bound by the bytes of the weights, in 16 bits.

    x [T, inputs] @ weight.T -> [T, outputs], or activation(gate) * up of the two halves of the outputs

One warp of a program streams the weights of its outputs through TMA into a ring of shared memory, and begins while the
kernel before still runs; four warps multiply, with outputs as the rows of the matrix units' tiles. Programs may share
the inputs of the same outputs; whoever is last adds the sums of all, in their order.
"""

import torch
import triton
import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvern.kernels.hopper import KINDS, activate_by, fetch_weights, tiles_of
from kvern.kernels.linear import StreamShape

REGISTERS = {8: 64, 16: 64, 32: 80, 64: 104, 128: 128}
"""Of a thread, by the rows of a tile, so that programs share a processor: one begins while the other ends.

Those that multiply get what the warp that fetches does not need.
"""


@gluon.jit
def fetch(weight_tiles, x_tiles, weights, values, ready, empty, begin, steps, outputs, GATED: gl.constexpr):
    """Fill the ring. `begin` counts columns of the weights, of which each may be SPREAD inputs."""
    gdc_launch_dependents()
    STAGES: gl.constexpr = weights.shape[0]
    K: gl.constexpr = weights.shape[2]
    SPREAD: gl.constexpr = values.shape[2] // K
    WEIGHT_BYTES: gl.constexpr = weights.shape[1] * K * weights.dtype.primitive_bitwidth // 8
    BYTES: gl.constexpr = WEIGHT_BYTES + values.shape[1] * K * SPREAD * 2
    tile = gl.program_id(0)
    for early in gl.static_range(STAGES):
        bar = ready.index(early)
        place = begin + early * K
        mbarrier.expect(bar, BYTES, pred=early < steps)
        fetch_weights(weight_tiles, bar, weights.index(early), 0, tile, place, early < steps, outputs, GATED)
    gdc_wait()
    for early in gl.static_range(STAGES):
        place = begin + early * K
        tma.async_copy_global_to_shared(
            x_tiles, [0, place * SPREAD], ready.index(early), values.index(early), pred=early < steps
        )
    for step in range(STAGES, steps):
        stage = step % STAGES
        bar = ready.index(stage)
        mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(bar, BYTES)
        fetch_weights(weight_tiles, bar, weights.index(stage), 0, tile, begin + step * K, True, outputs, GATED)
        tma.async_copy_global_to_shared(x_tiles, [0, (begin + step * K) * SPREAD], bar, values.index(stage))


@gluon.jit
def write_sums(
    total,
    out,
    bias,
    partial,
    arrived,
    rows,
    outputs,
    SPLITS: gl.constexpr,
    KIND: gl.constexpr,
    ADDS: gl.constexpr = False,
):
    """What a program has of its outputs [OUTPUTS, ROWS]: joined by the last of those that share them, and written.

    ADDS: to what is in `out`.
    """
    OUTPUTS: gl.constexpr = total.shape[0]
    ROWS: gl.constexpr = total.shape[1]
    WIDE: gl.constexpr = OUTPUTS // 2 if KIND > 0 else OUTPUTS
    layout: gl.constexpr = total.type.layout
    plain: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, gl.num_warps()], [0, 1])
    tile = gl.program_id(0)
    line = gl.arange(0, OUTPUTS, gl.SliceLayout(1, layout))
    last = True
    if SPLITS > 1:
        inside = line[:, None] * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, layout))[None, :]
        part = partial + tile * (SPLITS * OUTPUTS * ROWS) + inside
        gl.store(part + gl.program_id(1) * (OUTPUTS * ROWS), total)
        gl.thread_barrier()
        last = gl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLITS - 1
        if last:
            gl.thread_barrier()
            total = gl.zeros([OUTPUTS, ROWS], gl.float32, layout)
            for other in gl.static_range(SPLITS):
                total += gl.load(part + other * (OUTPUTS * ROWS), cache_modifier=".cg")
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
        mask = (row < rows)[None, :] & (output < outputs)[:, None]
        if ADDS:
            result = (result.to(gl.float32) + gl.load(target, mask=mask, other=0.0).to(gl.float32)).to(result.dtype)
        gl.store(target, result, mask=mask)


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
    steps,
    rows,
    outputs,
    SPLITS: gl.constexpr,
    KIND: gl.constexpr,
):
    STAGES: gl.constexpr = weights.shape[0]
    OUTPUTS: gl.constexpr = weights.shape[1]
    ROWS: gl.constexpr = values.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    total = gl.zeros([OUTPUTS, ROWS], gl.float32, layout)
    for step in range(steps):
        stage = step % STAGES
        mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
        tile_values = values.index(stage).permute((1, 0))
        total = warpgroup_mma(weights.index(stage), tile_values, total, is_async=True)
        total = warpgroup_mma_wait(1, deps=[total])
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=step > 0)
    total = warpgroup_mma_wait(0, deps=[total])
    gdc_wait()
    write_sums(total, out, bias, partial, arrived, rows, outputs, SPLITS, KIND)


@gluon.jit(do_not_specialize=["rows", "outputs", "steps"])
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
    KIND: gl.constexpr,
    ROWS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    INPUTS: gl.constexpr,
    STAGES: gl.constexpr,
    SPLITS: gl.constexpr,
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
    span = (steps + SPLITS - 1) // SPLITS
    first = gl.program_id(1) * span
    own = gl.minimum(steps - first, span)
    gl.warp_specialize(
        [
            (
                _multiply,
                (out, bias, partial, arrived, weights, values, ready, empty, own, rows, outputs, SPLITS, KIND),
            ),
            (
                fetch,
                (weight_tiles, x_tiles, weights, values, ready, empty, first * INPUTS, own, outputs, KIND > 0),
            ),
        ],
        [1],
        [24],
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

    arrived     if the shape has splits: an int32 zero for every tile, which is zero again afterwards
    activation  gate and up are the two halves of the outputs, and the result is activation(gate) * up

    A row's result depends on the shape of the tiles alone, not on how many rows there are. Moves the weights once.
    """
    rows, inputs = x.shape
    outputs = weight.shape[0] // (1 if activation is None else 2)
    wide = shape.outputs if activation is None else shape.outputs // 2
    tiles = triton.cdiv(outputs, wide)
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    partial = out
    if shape.splits > 1:
        partial = torch.empty(tiles, shape.splits, shape.outputs, shape.rows, dtype=torch.float32, device=x.device)
    _stream_kernel[(tiles, shape.splits)](
        tiles_of(x, shape.rows, shape.inputs),
        tiles_of(weight, wide, shape.inputs),
        bias,
        out,
        partial,
        arrived,
        rows,
        outputs,
        triton.cdiv(inputs, shape.inputs),
        KINDS.index(activation),
        shape.rows,
        shape.outputs,
        shape.inputs,
        shape.stages,
        shape.splits,
        num_warps=4,
        maxnreg=REGISTERS[shape.rows],
        launch_pdl=True,
    )
    return out
