"""Products of few rows on Hopper GPUs (compute capability 9.0), bound by the bytes of the weights.

    x [T, inputs] @ weight.T -> [T, outputs], or activation(gate) * up of the two halves of the outputs

Of 16 bits, or codes of eight bits, both e4m3 or int8, with scales (`kernels/scaled_product.py`).

One warp of a program streams the weights of its outputs through TMA into a ring of shared memory, and begins while the
kernel before still runs; four warps multiply, with outputs as the rows of the matrix units' tiles. Programs may share
the inputs of the same outputs; whoever is last adds the sums of all, in their order.

The matrix units add products of e4m3 in about 14 bits: sums of a step are added to others in float32.
"""

import torch
import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvern.kernels.hopper import (
    KINDS,
    activate_by,
    barriers,
    fetch_weights,
    hopper_multiplies,
    place_of,
    thread_barrier,
    tiles_of,
)
from kvern.kernels.launch import Launcher, cdiv
from kvern.kernels.linear import StreamShape
from kvern.kernels.packed import Packed
from kvern.kernels.scaled_product import STEP

REGISTERS = {8: 64, 16: 64, 32: 80, 64: 104, 128: 128}
"""The registers of a thread by the rows of a tile, so that programs share a processor: one begins while the other ends.

Those that multiply get what the warp that fetches does not need.
"""
CODES_REGISTERS = {1 << 9: 64, 1 << 10: 64, 1 << 11: 72, 1 << 12: 96, 1 << 13: 128}
"""The registers by the numbers of a tile, for codes: sums of a step are held with those of all, and scales."""


@gluon.jit
def fetch(
    weight_tiles, x_tiles, weights, values, ready, empty, row_tiles, apart, begin, steps, outputs, GATED: gl.constexpr
):  # fmt: skip
    """Fill the ring. `begin` counts columns of the weights, of which each may be SPREAD inputs.

    Tiles of rows begin so many `apart`.
    """
    gdc_launch_dependents()
    STAGES: gl.constexpr = weights.shape[0]
    K: gl.constexpr = weights.shape[2]
    SPREAD: gl.constexpr = values.shape[2] // K
    WEIGHT_BYTES: gl.constexpr = weights.shape[1] * K * weights.dtype.primitive_bitwidth // 8
    VALUE_BYTES: gl.constexpr = values.shape[1] * K * SPREAD * values.dtype.primitive_bitwidth // 8
    BYTES: gl.constexpr = WEIGHT_BYTES + VALUE_BYTES
    tile, row_tile = place_of(row_tiles)
    row = row_tile * apart
    for early in gl.static_range(STAGES):
        bar = ready.index(early)
        place = begin + early * K
        mbarrier.expect(bar, BYTES, pred=early < steps)
        fetch_weights(weight_tiles, bar, weights.index(early), 0, tile, place, early < steps, outputs, GATED)
    gdc_wait()
    for early in gl.static_range(STAGES):
        place = begin + early * K
        tma.async_copy_global_to_shared(
            x_tiles, [row, place * SPREAD], ready.index(early), values.index(early), pred=early < steps
        )
    for step in range(STAGES, steps):
        stage = step % STAGES
        bar = ready.index(stage)
        mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(bar, BYTES)
        fetch_weights(weight_tiles, bar, weights.index(stage), 0, tile, begin + step * K, True, outputs, GATED)
        tma.async_copy_global_to_shared(x_tiles, [row, (begin + step * K) * SPREAD], bar, values.index(stage))


@gluon.jit
def write_sums(
    total,
    out,
    bias,
    partial,
    arrived,
    slot,
    tile,
    rows,
    outputs,
    SPLITS: gl.constexpr,
    KIND: gl.constexpr,
):
    """Stores a program's part of a tile [OUTPUTS, ROWS]; the last program that shares the tile joins the parts.

    `partial` and `arrived` have a slot for the tile.
    """
    OUTPUTS: gl.constexpr = total.shape[0]
    ROWS: gl.constexpr = total.shape[1]
    WIDE: gl.constexpr = OUTPUTS // 2 if KIND > 0 else OUTPUTS
    layout: gl.constexpr = total.type.layout
    plain: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, gl.num_warps()], [0, 1])
    line = gl.arange(0, OUTPUTS, gl.SliceLayout(1, layout))
    last = True
    if SPLITS > 1:
        inside = line[:, None] * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, layout))[None, :]
        part = partial + slot * (SPLITS * OUTPUTS * ROWS) + inside
        gl.store(part + gl.program_id(1) * (OUTPUTS * ROWS), total)
        thread_barrier()
        last = gl.atomic_add(arrived + slot, 1, sem="acq_rel") == SPLITS - 1
        if last:
            thread_barrier()
            total = gl.zeros([OUTPUTS, ROWS], gl.float32, layout)
            for other in gl.static_range(SPLITS):
                total += gl.load(part + other * (OUTPUTS * ROWS), cache_modifier=".cg")
            gl.atomic_xchg(arrived + slot, 0)
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


@gluon.jit
def _run_scales(scale, line, step, last, runs, STEPS: gl.constexpr):
    """Returns the scales of lines of codes in a step, or of the last one in later steps. 0 steps: of whole lines."""
    run = gl.minimum(step, last) // STEPS if STEPS > 0 else 0
    return gl.load(scale + line * runs + run).to(gl.float32)


@gluon.jit
def _sums_of_steps(
    x_scale, scale, weights, values, ready, empty, first, steps, last, row, line, x_runs, runs,
    X_STEPS: gl.constexpr, STEPS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """The sum of all steps. Where scales belong to runs of a row, the sum of each step is multiplied by its scales."""
    STAGES: gl.constexpr = weights.shape[0]
    OUTPUTS: gl.constexpr = weights.shape[1]
    ROWS: gl.constexpr = values.shape[1]
    INTEGERS: gl.constexpr = weights.dtype == gl.int8
    SCALED: gl.constexpr = X_STEPS + STEPS > 0
    total = gl.zeros([OUTPUTS, ROWS], gl.float32, layout)
    part = gl.zeros([OUTPUTS, ROWS], gl.int32 if INTEGERS else gl.float32, layout)
    if SCALED:
        gdc_wait()
        by_row = _run_scales(x_scale, row, first, last, x_runs, X_STEPS)
        by_line = _run_scales(scale, line, first, last, runs, STEPS)
    for step in range(steps):
        stage = step % STAGES
        if SCALED:
            next_by_row = _run_scales(x_scale, row, first + step + 1, last, x_runs, X_STEPS)
            next_by_line = _run_scales(scale, line, first + step + 1, last, runs, STEPS)
        mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
        tile_values = values.index(stage).permute((1, 0))
        part = warpgroup_mma(weights.index(stage), tile_values, part, use_acc=False, is_async=True)
        part = warpgroup_mma_wait(0, deps=[part])
        mbarrier.arrive(empty.index(stage), count=1)
        if SCALED:
            total += part.to(gl.float32) * by_line[:, None] * by_row[None, :]
            by_row = next_by_row
            by_line = next_by_line
        else:
            total += part
    return total


@gluon.jit
def _multiply(
    out,
    bias,
    x_scale,
    scale,
    partial,
    arrived,
    weights,
    values,
    ready,
    empty,
    first,
    steps,
    last_step,
    rows,
    outputs,
    x_runs,
    runs,
    SPLITS: gl.constexpr,
    KIND: gl.constexpr,
    PER: gl.constexpr,
    X_STEPS: gl.constexpr,
    STEPS: gl.constexpr,
):
    STAGES: gl.constexpr = weights.shape[0]
    OUTPUTS: gl.constexpr = weights.shape[1]
    ROWS: gl.constexpr = values.shape[1]
    WIDE: gl.constexpr = OUTPUTS // 2 if KIND > 0 else OUTPUTS
    INTEGERS: gl.constexpr = weights.dtype == gl.int8
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, ROWS, 256 // weights.dtype.primitive_bitwidth]
    )
    if x_scale is not None:
        scaled = gl.arange(0, OUTPUTS, gl.SliceLayout(1, layout))
        scaled = gl.minimum(gl.program_id(0) * WIDE + scaled % WIDE, outputs - 1) + scaled // WIDE * outputs
        scaled = scaled // PER
        x_row = gl.minimum(gl.arange(0, ROWS, gl.SliceLayout(0, layout)), rows - 1)
    if x_scale is not None and (not INTEGERS or X_STEPS + STEPS > 0):
        total = _sums_of_steps(
            x_scale, scale, weights, values, ready, empty, first, steps, last_step, x_row, scaled, x_runs, runs,
            X_STEPS, STEPS, layout,
        )  # fmt: skip
    else:
        sums = gl.zeros([OUTPUTS, ROWS], gl.int32 if INTEGERS else gl.float32, layout)
        for step in range(steps):
            stage = step % STAGES
            mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
            tile_values = values.index(stage).permute((1, 0))
            sums = warpgroup_mma(weights.index(stage), tile_values, sums, is_async=True)
            sums = warpgroup_mma_wait(1, deps=[sums])
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=step > 0)
        total = warpgroup_mma_wait(0, deps=[sums]).to(gl.float32)
    gdc_wait()
    if x_scale is not None and X_STEPS + STEPS == 0:
        total *= gl.load(scale + scaled).to(gl.float32)[:, None]
        total *= gl.load(x_scale + x_row)[None, :]
    tile = gl.program_id(0)
    write_sums(total, out, bias, partial, arrived, tile, tile, rows, outputs, SPLITS, KIND)


@Launcher
@gluon.jit(do_not_specialize=["rows", "outputs", "steps"])
def _stream_kernel(
    x_tiles,
    weight_tiles,
    bias,
    x_scale,
    scale,
    out,
    partial,
    arrived,
    rows,
    outputs,
    steps,
    x_runs,
    runs,
    KIND: gl.constexpr,
    ROWS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    INPUTS: gl.constexpr,
    STAGES: gl.constexpr,
    SPLITS: gl.constexpr,
    PER: gl.constexpr,
    X_STEPS: gl.constexpr,
    STEPS: gl.constexpr,
):
    dtype: gl.constexpr = x_tiles.dtype
    shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([OUTPUTS, INPUTS], dtype)
    weights = gl.allocate_shared_memory(dtype, [STAGES, OUTPUTS, INPUTS], shared)
    values = gl.allocate_shared_memory(dtype, [STAGES, ROWS, INPUTS], x_tiles.layout)
    ready, empty = barriers(STAGES, 1, 1)
    span = (steps + SPLITS - 1) // SPLITS
    first = gl.program_id(1) * span
    own = gl.minimum(steps - first, span)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    out, bias, x_scale, scale, partial, arrived, weights, values, ready, empty, first, own, steps - 1,
                    rows, outputs, x_runs, runs, SPLITS, KIND, PER, X_STEPS, STEPS,
                ),
            ),
            (
                fetch,
                (weight_tiles, x_tiles, weights, values, ready, empty, None, 0, first * INPUTS, own, outputs, KIND > 0),
            ),
        ],
        [1],
        [24],
    )  # fmt: skip


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
    return _launch(x, weight, bias, shape, arrived, activation, x.dtype, (None, None, None, None), (1, 0, 0))


def streams_codes(code: str, group: int, outputs: int, inputs: int) -> bool:
    """True if `stream_codes` supports a matrix of such codes, of which `group` inputs share a scale."""
    known = code in ("e4m3", "int8") and hopper_multiplies(torch.int8, inputs, outputs)
    return known and (group == inputs or group % STEP == 0)


def stream_codes(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: Packed,
    bias: torch.Tensor | None,
    shape: StreamShape,
    arrived: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Computes `stream_product` for codes: `(x * x_scale) @ weight.T + bias` in `dtype`; a matrix without zeros.

    x         [T, inputs] contiguous, of the dtype of the weight's codes
    x_scale   [T, inputs / n] float32, contiguous: of runs of n inputs

    Where scales are of less than rows, they are of a multiple of `shape.inputs` inputs.
    """
    inputs, scale = x.shape[1], weight.scale
    assert scale is not None and weight.zero is None
    groups = inputs if x_scale.shape[1] == 1 else -(-inputs // x_scale.shape[1]), weight.group
    x_steps, steps = (0 if group == inputs else group // shape.inputs for group in groups)
    if any(group != inputs and group % shape.inputs for group in groups):
        raise ValueError(f"steps of {shape.inputs} inputs do not fit scales of {groups[0]} and {groups[1]}")
    scales = x_scale, scale, x_scale.shape[1], scale.shape[1]
    per = weight.outputs_per_scale
    return _launch(x, weight.codes, bias, shape, arrived, None, dtype, scales, (per, x_steps, steps))


def _registers(shape: StreamShape, codes: bool) -> int:
    """Returns the registers of all threads of a program, as in `REGISTERS`."""
    return CODES_REGISTERS[shape.rows * shape.outputs] if codes else REGISTERS[shape.rows]


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    shape: StreamShape,
    arrived: torch.Tensor,
    activation: str | None,
    dtype: torch.dtype,
    scales: tuple[torch.Tensor, torch.Tensor, int, int] | tuple[None, None, None, None],
    of_scales: tuple[int, int, int],
) -> torch.Tensor:
    rows, inputs = x.shape
    outputs = weight.shape[0] // (1 if activation is None else 2)
    wide = shape.outputs if activation is None else shape.outputs // 2
    tiles = cdiv(outputs, wide)
    out = torch.empty(rows, outputs, dtype=dtype, device=x.device)
    partial = out
    if shape.splits > 1:
        partial = torch.empty(tiles, shape.splits, shape.outputs, shape.rows, dtype=torch.float32, device=x.device)
    x_scale, scale, x_runs, runs = scales
    _stream_kernel[(tiles, shape.splits)](
        tiles_of(x, shape.rows, shape.inputs),
        tiles_of(weight, wide, shape.inputs),
        bias,
        x_scale,
        scale,
        out,
        partial,
        arrived,
        rows,
        outputs,
        cdiv(inputs, shape.inputs),
        x_runs,
        runs,
        KINDS.index(activation),
        shape.rows,
        shape.outputs,
        shape.inputs,
        shape.stages,
        shape.splits,
        *of_scales,
        num_warps=4,
        maxnreg=_registers(shape, x_scale is not None),
        launch_pdl=True,
    )
    return out
