"""Products with weights of four bits on Hopper GPUs (compute capability 9.0), of few rows and of many.

    x [T, inputs] @ weight.T -> [T, outputs]

As `kernels/stream_hopper.py`, but the ring holds codes. The warps that multiply make numbers of them in registers, from
which the matrix units take their rows. Each 64 outputs are a part with four warps of its own, which wait for no other
part: some make numbers while the matrix units have those of others. Programs with the same outputs and other rows stand
side by side, so that codes come from memory once.
"""

import functools

import torch
import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.language.extra.cuda import gdc_wait

from kvern.kernels.hopper import barriers, place_of, tiles_of
from kvern.kernels.launch import SHARED_MEMORY, cdiv, next_power_of_2
from kvern.kernels.linear import StreamPackedShape
from kvern.kernels.packed import Packed
from kvern.kernels.stream_hopper import fetch, write_sums
from kvern.kernels.stream_packed_sums import (
    BIASED,
    PART,
    STEP,
    THREE_QUARTERS,
    WORDS,
    sums,
    sums_with_kept_scales,
)

REGISTERS = {8: 88, 16: 96, 32: 104, 64: 144, 128: 232}
"""The registers of a thread that multiplies, by the rows of a tile."""
MOST_KEEPING = 1 << 13
"""Numbers of a tile. Steps of larger ones take time enough, and room."""
BARRIER_BYTES = 1024
"""The most shared memory of barriers."""
PROCESSOR_REGISTERS = 1 << 16
FETCHING_REGISTERS = gl.constexpr(24)


@functools.cache
def registers_of(shape: StreamPackedShape) -> tuple[int, int]:
    """Returns the registers of a thread before any are given away, and those of multiplying threads after.

    Four parts get less than they would take.
    """
    parts = shape.outputs // PART.value
    needed = cdiv(parts * REGISTERS[shape.rows] + FETCHING_REGISTERS.value, parts + 1)
    at_first = min(8 * cdiv(needed, 8), PROCESSOR_REGISTERS // (128 * (parts + 1)) // 8 * 8)
    return at_first, ((parts + 1) * at_first - FETCHING_REGISTERS.value) // parts // 8 * 8


@gluon.jit
def _write(
    total, out, bias, factor, partial, arrived, slot, tile, row, rows, outputs, SPLITS: gl.constexpr
):  # fmt: skip
    """The sums of a part, from a row on."""
    if factor is not None:
        line = tile * PART + gl.arange(0, PART, gl.SliceLayout(1, total.type.layout))
        total *= gl.load(factor + line, mask=line < outputs, other=0.0)[:, None]
    gdc_wait()
    rows_of_out = out + row.to(gl.int64) * outputs
    write_sums(total, rows_of_out, bias, partial, arrived, slot, tile, rows - row, outputs, SPLITS, 0)


@gluon.jit
def _multiply(tensors, sizes, NUMBER: gl.constexpr, FORM: gl.constexpr):
    """Multiplies the part of this number."""
    out, bias, scale, zero, factor, partial, arrived, codes, values, scales, zeros, ready, empty = tensors
    first, steps, rows, outputs, groups, row_tiles = sizes
    CODE: gl.constexpr = FORM[0]
    GROUP: gl.constexpr = FORM[1]
    BIASED: gl.constexpr = FORM[2]
    SPLITS: gl.constexpr = FORM[3]
    USED: gl.constexpr = FORM[4]
    KEPT: gl.constexpr = FORM[5]
    PARTS: gl.constexpr = codes.shape[1] // PART
    PLACE: gl.constexpr = NUMBER * PART
    WHOLE: gl.constexpr = USED != THREE_QUARTERS
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, USED if WHOLE else 64, 16])
    rest_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
    tile, row_tile = place_of(row_tiles)
    tile = tile * PARTS + NUMBER
    known = outputs - tile * PART
    begin = (tile * PART).to(gl.int64) * groups
    if zero is not None:
        zero += begin
    if KEPT:
        lines: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        own_scales = scales.index(NUMBER)._reinterpret(scales.dtype, [scales.shape[1], PART], lines)
        own_zeros = zeros.index(NUMBER)._reinterpret(zeros.dtype, [zeros.shape[1], PART], lines)
        total = sums_with_kept_scales(
            codes, values, scale + begin, zero, own_scales, own_zeros, ready, empty, first, steps, groups, known,
            PLACE, CODE, GROUP, BIASED, layout,
        )  # fmt: skip
    else:
        total, rest = sums(
            codes, values, scale + begin, zero, ready, empty, first, steps, groups, known,
            USED, PLACE, CODE, GROUP, BIASED, layout, rest_layout,
        )  # fmt: skip
    row = row_tile * USED
    slot = gl.program_id(0) * PARTS + NUMBER
    _write(total, out, bias, factor, partial, arrived, slot, tile, row, rows, outputs, SPLITS)
    if not WHOLE:
        slots = gl.num_programs(0) * PARTS  # of the rows before
        partial += slots * (SPLITS * PART * 64)
        _write(rest, out, bias, factor, partial, arrived + slots, slot, tile, row + 64, rows, outputs, SPLITS)


@gluon.jit(do_not_specialize=["rows", "outputs", "steps", "row_tiles"])
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
    row_tiles,
    CODE: gl.constexpr,
    GROUP: gl.constexpr,
    BIASED: gl.constexpr,
    ROWS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    STAGES: gl.constexpr,
    SPLITS: gl.constexpr,
    STEPS: gl.constexpr,
    USED: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    codes = gl.allocate_shared_memory(gl.int32, [STAGES, OUTPUTS, WORDS], code_tiles.layout)
    values = gl.allocate_shared_memory(x_tiles.dtype, [STAGES, ROWS, 8 * WORDS], x_tiles.layout)
    PARTS: gl.constexpr = OUTPUTS // PART
    PER: gl.constexpr = max(128 // GROUP, 1)
    KEPT: gl.constexpr = max(STEPS * PER, 1)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    scales = gl.allocate_shared_memory(gl.int32 if PER > 1 else gl.float32, [PARTS, KEPT, PART], plain)
    zeros = gl.allocate_shared_memory(gl.uint8, [PARTS, KEPT if zero is not None else 1, PART], plain)
    ready, empty = barriers(STAGES, 1, PARTS)
    span = (steps + SPLITS - 1) // SPLITS
    first = gl.program_id(1) * span
    own = gl.minimum(steps - first, span)
    tensors = (out, bias, scale, zero, factor, partial, arrived, codes, values, scales, zeros, ready, empty)
    sizes = (first, own, rows, outputs, groups, row_tiles)
    fetched = (code_tiles, x_tiles, codes, values, ready, empty, row_tiles, USED, first * WORDS, own, outputs, False)
    form: gl.constexpr = (CODE, GROUP, BIASED, SPLITS, USED, STEPS > 0)
    if PARTS == 1:
        gl.warp_specialize([(_multiply, (tensors, sizes, 0, form)), (fetch, fetched)], [1], [FETCHING_REGISTERS])
    elif PARTS == 2:
        gl.warp_specialize(
            [(_multiply, (tensors, sizes, 0, form)), (_multiply, (tensors, sizes, 1, form)), (fetch, fetched)],
            [4, 1],
            [REGISTERS, FETCHING_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (tensors, sizes, 0, form)),
                (_multiply, (tensors, sizes, 1, form)),
                (_multiply, (tensors, sizes, 2, form)),
                (_multiply, (tensors, sizes, 3, form)),
                (fetch, fetched),
            ],
            [4, 4, 4, 1],
            [REGISTERS, REGISTERS, REGISTERS, FETCHING_REGISTERS],
        )


def steps_kept(inputs: int, shape: StreamPackedShape) -> int:
    """Returns for how many steps a program keeps scales, a power of two; 0 if it reads those of a step while it
    multiplies."""
    few = shape.rows * shape.outputs <= MOST_KEEPING
    return next_power_of_2(cdiv(inputs // STEP, shape.splits)) if few else 0


def streams(weight: Packed, inputs: int, shape: StreamPackedShape, dtype: torch.dtype) -> bool:
    """True if the kernel of this shape multiplies activations of a dtype by a matrix whose groups are cut by steps.

    Numbers of e2m1, and scales of another dtype that are rounded to that of x, need the range of bfloat16.
    """
    assert weight.scale is not None
    small, steps = weight.group < STEP, steps_kept(inputs, shape)
    scaled = small or steps == 0
    ring = shape.stages * (shape.outputs * STEP // 2 + shape.rows * STEP * 2)
    kept = steps * max(STEP // weight.group, 1) * shape.outputs
    kept_bytes = kept * (4 if weight.zero is None else 5)
    result = shape.outputs * shape.rows * 2  # changes its layout in shared memory
    return (
        (weight.code == "int4" or (weight.code == "e2m1" and small and weight.zero is None))
        and weight.outputs_per_scale == 1
        and inputs % STEP == 0
        and (weight.group in (16, 32, 64) or weight.group % STEP == 0)
        and (dtype == torch.bfloat16 or (weight.code == "int4" and (not scaled or weight.scale.dtype == dtype)))
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
    arrived   if the shape has splits: two int32 zeros for each 64 outputs of every tile, zero again afterwards

    A row's result depends on the shape of the tiles alone. Moves the codes and scales once: tiles of the same outputs
    run side by side.
    """
    rows, inputs = x.shape
    outputs = weight.codes.shape[0]
    row_tiles = cdiv(rows, shape.rows)
    few = shape.rows == 128 and cdiv(rows, row_tiles) <= THREE_QUARTERS.value
    used = THREE_QUARTERS.value if few else shape.rows
    tiles = row_tiles * cdiv(outputs, shape.outputs)
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    partial = out
    if shape.splits > 1:
        if arrived.numel() * PART.value < 2 * tiles * shape.outputs:
            raise ValueError("a product with splits needs a counter for every tile")
        partial = torch.empty(tiles, shape.splits, shape.outputs, shape.rows, dtype=torch.float32, device=x.device)
    at_first, registers = registers_of(shape)
    _stream_packed_kernel[(tiles, shape.splits)](
        tiles_of(x, shape.rows, STEP),
        tiles_of(weight.codes.view(torch.int32), shape.outputs, STEP // 8),
        weight.scale,
        weight.zero,
        weight.factor,
        bias,
        out,
        partial,
        arrived,
        rows,
        outputs,
        inputs // STEP,
        cdiv(inputs, weight.group),
        row_tiles,
        weight.code,
        weight.group,
        BIASED[x.dtype],
        shape.rows,
        shape.outputs,
        shape.stages,
        shape.splits,
        steps_kept(inputs, shape),
        used,
        registers,
        num_warps=4,
        maxnreg=at_first,
        launch_pdl=True,
    )
    return out
