"""Products of many rows of codes of eight bits with codes, both e4m3 or int8, on Hopper (compute capability 9.0).

    (x * x_scale) [T, inputs] @ weight.T -> [T, outputs]

Programs are those of `product_hopper.py`: one group of warps fetches, two multiply 64 rows each. The matrix units add
products of e4m3 in about 14 bits, so that the sums of each step are added to others in float32, times their scales
where those are of less than rows; both stand in registers, which is why tiles have 128 outputs. Where tiles alone would
not fill the card, programs share a tile's inputs; each leaves its sums in memory, and whoever comes last adds them up
in their order.
"""

import torch
import triton
import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_wait

from kvern.kernels.hopper import barriers, hopper_multiplies, processors, thread_barrier, tiles_of
from kvern.kernels.linear import TileShape
from kvern.kernels.packed import Packed
from kvern.kernels.product_hopper import CONSUMER_REGISTERS, PRODUCER_REGISTERS, ROWS, fetch, place_of, write
from kvern.kernels.scaled_product import STEP

OUTPUTS = gl.constexpr(128)
"""The outputs of a tile."""
INPUTS = 256
"""The inputs of a step, unless scales have fewer."""
RING = 192 << 10
"""Bytes of tiles that are on their way, or are multiplied."""


@gluon.jit
def _sums(
    x_scale, scale, values, weights, ready, empty, taken, begin, steps, last_step, line, x_runs, output, runs,
    HALF: gl.constexpr, PER: gl.constexpr, X_STEPS: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    """Returns the product of a tile, times the scales of both operands that stand for less than rows."""
    STAGES: gl.constexpr = empty.shape[0]
    ROWS: gl.constexpr = values.shape[1]
    INTEGERS: gl.constexpr = weights.dtype == gl.int8
    SCALED: gl.constexpr = X_STEPS + STEPS > 0
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OUTPUTS, 32])
    part = gl.zeros([ROWS, OUTPUTS], gl.int32 if INTEGERS else gl.float32, layout)
    total = gl.zeros([ROWS, OUTPUTS], gl.int32 if INTEGERS and not SCALED else gl.float32, layout)
    for step in range(steps):
        at = gl.minimum(begin + step, last_step)
        run = at // STEPS if STEPS > 0 else at
        by = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(1, layout))
        if X_STEPS > 0:
            by = gl.load(x_scale + line * x_runs + at // X_STEPS)
        stage = taken % STAGES
        mbarrier.wait(ready.index(stage), (taken // STAGES) & 1)
        tile = weights.index(stage).permute((1, 0))
        part = warpgroup_mma(values.index(2 * stage + HALF), tile, part, use_acc=False, is_async=True)
        part = warpgroup_mma_wait(0, deps=[part])
        mbarrier.arrive(empty.index(stage), count=1)
        if STEPS > 0:
            by *= gl.load(scale + (output // PER * runs + run))
        if SCALED:
            total += part.to(gl.float32) * by[:, None]
        else:
            total += part
        taken += 1
    return total.to(gl.float32), taken


@gluon.jit
def _joined(total, partial, arrived, place, split, SPLITS: gl.constexpr):
    """The sums of all programs that share a tile's inputs, and whether this one is the last, which knows them.

    Numbers lie in memory as in registers, four of a thread beside one another.
    """
    HALF: gl.constexpr = total.shape[0]
    SIZE: gl.constexpr = HALF * OUTPUTS
    flat: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    inside = gl.arange(0, SIZE, flat)
    first = partial + place * (SPLITS * SIZE)
    total = gl.permute(gl.reshape(total, [4, 2, 8, OUTPUTS // 8, 4, 2]), (3, 0, 2, 4, 1, 5))
    total = gl.convert_layout(gl.reshape(total, [SIZE]), flat, assert_trivial=True)
    gl.store(first + split * SIZE + inside, total)
    thread_barrier()
    last = gl.atomic_add(arrived + place, 1, sem="acq_rel") == SPLITS - 1
    if last:
        thread_barrier()
        total = gl.zeros([SIZE], gl.float32, flat)
        for other in range(SPLITS):
            total += gl.load(first + other * SIZE + inside, cache_modifier=".cg")
        gl.atomic_xchg(arrived + place, 0)
    total = gl.permute(gl.reshape(total, [OUTPUTS // 8, 4, 8, 4, 2, 2]), (1, 4, 2, 0, 3, 5))
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OUTPUTS, 32])
    return gl.convert_layout(gl.reshape(total, [HALF, OUTPUTS]), layout, assert_trivial=True), last


@gluon.jit
def _finish(
    total, out_tiles, staged, bias, x_by, scale, partial, arrived, place, split, row, output, outputs,
    PER: gl.constexpr, X_STEPS: gl.constexpr, STEPS: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """Write the sums of a tile, times the scales of whole rows."""
    layout: gl.constexpr = total.type.layout
    last = True
    if SPLITS > 1:
        total, last = _joined(total, partial, arrived, place, split, SPLITS)
    if last:
        column = output + gl.arange(0, OUTPUTS, gl.SliceLayout(0, layout))
        if X_STEPS == 0:
            total *= x_by[:, None]
        if STEPS == 0:
            total *= gl.load(scale + column // PER, mask=column < outputs, other=0.0)[None, :]
        if bias is not None:
            total += gl.load(bias + column, mask=column < outputs, other=0.0).to(gl.float32)[None, :]
        write(out_tiles, staged, total, row, output)


@gluon.jit
def _multiply(
    out_tiles, bias, x_scale, scale, partial, arrived, values, weights, staged, ready, empty, sizes, last_step, x_runs,
    runs, HALF: gl.constexpr, PER: gl.constexpr, X_STEPS: gl.constexpr, STEPS: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """HALF: of the rows of tiles."""
    gdc_wait()
    tiles, columns, group, steps, rows, outputs = sizes
    STAGES: gl.constexpr = empty.shape[0]
    ROWS: gl.constexpr = values.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OUTPUTS, 32])
    taken = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        block, column = place_of(tile // SPLITS, group, columns)
        split = tile % SPLITS
        row = (2 * block + HALF) * ROWS
        if row < rows:
            output = column * OUTPUTS
            line = gl.minimum(row + gl.arange(0, ROWS, gl.SliceLayout(1, layout)), rows - 1)
            x_by = gl.load(x_scale + line * x_runs)
            total, taken = _sums(
                x_scale, scale, values, weights, ready, empty, taken, split * steps, steps, last_step, line, x_runs,
                output, runs, HALF, PER, X_STEPS, STEPS,
            )  # fmt: skip
            _finish(
                total, out_tiles, staged, bias, x_by, scale, partial, arrived, tile // SPLITS * 2 + HALF, split, row,
                output, outputs, PER, X_STEPS, STEPS, SPLITS,
            )  # fmt: skip
        else:
            for _ in range(steps):
                stage = taken % STAGES
                mbarrier.wait(ready.index(stage), (taken // STAGES) & 1)
                mbarrier.arrive(empty.index(stage), count=1)
                taken += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles", "columns", "group", "steps", "rows", "outputs", "last_step", "x_runs", "runs"])
def _codes_kernel(
    x_tiles, weight_tiles, out_tiles, bias, x_scale, scale, partial, arrived, tiles, columns, group, steps, rows,
    outputs, last_step, x_runs, runs, PER: gl.constexpr, X_STEPS: gl.constexpr, STEPS: gl.constexpr,
    SPLITS: gl.constexpr, ROWS: gl.constexpr, INPUTS: gl.constexpr, STAGES: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = weight_tiles.dtype
    shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS // 2, INPUTS], dtype)
    values = gl.allocate_shared_memory(dtype, [2 * STAGES, ROWS // 2, INPUTS], shared)
    weights = gl.allocate_shared_memory(dtype, [STAGES, OUTPUTS, INPUTS], shared)
    staged = gl.allocate_shared_memory(out_tiles.dtype, [2, ROWS // 2, OUTPUTS], out_tiles.layout)
    ready, empty = barriers(STAGES, 1, 2)
    sizes = (tiles, columns, group, steps, rows, outputs)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    out_tiles, bias, x_scale, scale, partial, arrived, values, weights, staged.index(0), ready, empty,
                    sizes, last_step, x_runs, runs, 0, PER, X_STEPS, STEPS, SPLITS,
                ),
            ),
            (
                _multiply,
                (
                    out_tiles, bias, x_scale, scale, partial, arrived, values, weights, staged.index(1), ready, empty,
                    sizes, last_step, x_runs, runs, 1, PER, X_STEPS, STEPS, SPLITS,
                ),
            ),
            (
                fetch,
                (
                    None, x_tiles, weight_tiles, None, None, values, weights, ready, empty, sizes, 0, 0, 1, True,
                    False, SPLITS,
                ),
            ),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def tiles_codes(weight: Packed, outputs: int, inputs: int, dtype: torch.dtype) -> bool:
    """True if `product_codes` supports a matrix: without zeros, and with scales of rows or of whole tiles."""
    known = weight.code in ("e4m3", "int8") and dtype.itemsize == 2 and hopper_multiplies(torch.int8, inputs, outputs)
    if not known or weight.zero is not None:
        return False
    return weight.group == inputs or (weight.group % STEP == 0 and weight.outputs_per_scale % OUTPUTS.value == 0)


def product_codes(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: Packed,
    bias: torch.Tensor | None,
    shape: TileShape,
    arrived: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`(x * x_scale) @ weight.T + bias`: [T, outputs] of a dtype of 16 bits, by a matrix that the kernel knows.

    x         [T, inputs] contiguous, of the dtype of the weight's codes
    x_scale   [T, inputs / n] float32, contiguous: of runs of n inputs, which are all or a multiple of 128
    arrived   if the shape has splits: int32 zeros, two for a tile, which are zero again afterwards

    A row's result does not depend on how many rows there are. Raises ValueError where there are too few zeros.
    """
    (rows, inputs) = x.shape
    outputs = weight.codes.shape[0]
    scale = weight.scale
    assert scale is not None and weight.zero is None
    groups = inputs if x_scale.shape[1] == 1 else triton.cdiv(inputs, x_scale.shape[1]), weight.group
    step = INPUTS if all(group == inputs or group % INPUTS == 0 for group in groups) else STEP
    x_steps, steps = (0 if group == inputs else group // step for group in groups)
    blocks, columns = triton.cdiv(rows, ROWS), triton.cdiv(outputs, OUTPUTS.value)
    group = triton.cdiv(blocks, triton.cdiv(blocks, shape.group))  # so that few are empty
    tiles = triton.cdiv(blocks, group) * group * columns
    partial = out = torch.empty(rows, outputs, dtype=dtype, device=x.device)
    if shape.splits > 1:
        if 2 * tiles > arrived.shape[0]:
            raise ValueError(f"{rows} x {outputs} numbers are too many for programs that share inputs")
        size = tiles * shape.splits * ROWS * OUTPUTS.value
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
    tiles *= shape.splits
    _codes_kernel[(min(processors(x.device), tiles),)](
        tiles_of(x, ROWS // 2, step),
        tiles_of(weight.codes, OUTPUTS.value, step),
        tiles_of(out, ROWS // 2, OUTPUTS.value),
        bias,
        x_scale,
        scale,
        partial,
        arrived,
        tiles,
        columns,
        group,
        triton.cdiv(inputs, step * shape.splits),
        rows,
        outputs,
        triton.cdiv(inputs, step) - 1,
        x_scale.shape[1],
        scale.shape[1],
        weight.outputs_per_scale,
        x_steps,
        steps,
        shape.splits,
        ROWS,
        step,
        RING // ((ROWS + OUTPUTS.value) * step),
        PRODUCER_REGISTERS,
        CONSUMER_REGISTERS,
        num_warps=4,
        launch_pdl=True,
    )
    return out
