"""Products with quantized weights, whose numbers are made of their codes inside the product (`kernels/codes.py`).

`packed_row` multiplies one row on the ordinary cores, with what is around it, as `kernels/linear.py` does with plain
weights: scales multiply the sums of neighbouring columns, not each weight. `packed_product` multiplies more rows on the
matrix units: a tile of weights is made of its codes in registers, in the dtype of x, for few rows and for many.
"""

import torch
import triton
import triton.language as tl

from kvern.kernels.activation import activate
from kvern.kernels.codes import (
    Matrix,
    form_of,
    interleaved,
    matrix_of,
    numbers,
    places,
    planes_of,
    row_values,
    scales,
    times_rows,
    weights,
)
from kvern.kernels.launch import Launcher, cdiv, ended, stages, wait_for_previous
from kvern.kernels.linear import NOTHING, Around, MatmulShape, MatvecShape, join_splits
from kvern.kernels.packed import Packed

MOST_CHUNK = 16
"""Columns whose numbers one thread adds up: the bytes of the widest load."""


@triton.jit
def _add_step(total, tile, value, by, offset, CHUNK: tl.constexpr, SCALES_ROWS: tl.constexpr):
    """Returns the contribution of a step's plane to the sums `total [OUTPUTS, COLUMNS / CHUNK]`."""
    OUTPUTS: tl.constexpr = tile.shape[0]
    COLUMNS: tl.constexpr = tile.shape[1]
    products = tl.sum(tl.reshape(tile * value[None, :], [OUTPUTS, COLUMNS // CHUNK, CHUNK]), axis=2)
    if SCALES_ROWS:
        return total + products
    else:
        values = tl.sum(tl.reshape(value, [COLUMNS // CHUNK, CHUNK]), axis=1)
        return total + by * products - offset * values[None, :]


@triton.jit
def add_row_step(
    total, other, squares, x, gain, matrix, row, ups, start, inputs, FORM: tl.constexpr, GATED: tl.constexpr,
    WAIT: tl.constexpr,
):  # fmt: skip
    """The sums of two runs of rows, the second if GATED, and of the squares of x if it has a gain, after a step."""
    tiles = numbers(matrix, row, start, inputs, FORM)
    if GATED:
        up_tiles = numbers(matrix, ups, start, inputs, FORM)
    wait_for_previous(WAIT)
    values = row_values(x, start, inputs, FORM)
    if gain is not None:
        gains = row_values(gain, start, inputs, FORM)
    for plane in tl.static_range(planes_of(FORM.code)):
        value = values[plane]
        if gain is not None:
            squares += value * value
            value *= gains[plane]
        by, offset = 0.0, 0.0
        if not FORM.scales_rows:
            by, offset = scales(matrix, row, start, inputs, plane, FORM)
        total = _add_step(total, tiles[plane], value, by, offset, FORM.chunk, FORM.scales_rows)
        if GATED:
            if not FORM.scales_rows:
                by, offset = scales(matrix, ups, start, inputs, plane, FORM)
            other = _add_step(other, up_tiles[plane], value, by, offset, FORM.chunk, FORM.scales_rows)
    return total, other, squares


@triton.jit
def ended_sums(total, matrix, row, known, bias, FORM: tl.constexpr):
    """The sums of rows, with what multiplies whole rows, and the bias."""
    total = times_rows(total, matrix, row, FORM)
    if bias is not None:
        total += tl.load(bias + row, mask=known, other=0.0).to(tl.float32)
    return total


@Launcher
@triton.jit
def _packed_row_kernel(
    x, matrix: Matrix, bias, gain, out, outputs, inputs, epsilon: tl.float32, FORM: tl.constexpr,
    ACTIVATION: tl.constexpr, RESIDUAL: tl.constexpr, OUTPUTS: tl.constexpr, UNROLL: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    GATED: tl.constexpr = ACTIVATION != ""
    INPUTS: tl.constexpr = FORM.inputs
    output = tl.program_id(0).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    known = output < outputs
    row = tl.minimum(output, outputs - 1)
    ups = row + outputs
    COLUMNS: tl.constexpr = INPUTS // planes_of(FORM.code)
    total = tl.full([OUTPUTS, COLUMNS // FORM.chunk], 0.0, tl.float32)
    other = tl.full([OUTPUTS, COLUMNS // FORM.chunk], 0.0, tl.float32)
    squares = tl.full([COLUMNS], 0.0, tl.float32)
    total, other, squares = add_row_step(
        total, other, squares, x, gain, matrix, row, ups, 0, inputs, FORM, GATED, OVERLAP
    )
    for start in tl.range(INPUTS, inputs, INPUTS, loop_unroll_factor=UNROLL):
        total, other, squares = add_row_step(
            total, other, squares, x, gain, matrix, row, ups, start, inputs, FORM, GATED, False
        )
    result = tl.sum(total, axis=1)
    inverse = 1.0
    if gain is not None:
        inverse = tl.rsqrt(tl.sum(squares, axis=0) / inputs + epsilon)
        result *= inverse
    result = ended_sums(result, matrix, row, known, bias, FORM)
    if GATED:
        up = tl.sum(other, axis=1)
        if gain is not None:
            up *= inverse
        up = ended_sums(up, matrix, ups, known, bias, FORM)
        result = activate(result, ACTIVATION) * up
    if RESIDUAL:
        result += tl.load(out + output, mask=known, other=0.0).to(tl.float32)
    tl.store(out + output, result.to(out.dtype.element_ty), mask=known)


def packed_row(
    x: torch.Tensor, weight: Packed, bias: torch.Tensor | None, shape: MatvecShape, around: Around = NOTHING
) -> torch.Tensor:
    """`x @ weight.T + bias` of one row, in float32: [1, inputs], a matrix without an order -> [1, outputs].

    Moves the codes and scales once.
    """
    inputs = x.shape[1]
    rows = weight.codes.shape[0]
    outputs = rows // (1 if around.activation is None else 2)
    out = around.residual
    if out is None:
        out = torch.empty(1, outputs, dtype=x.dtype, device=x.device)
    _packed_row_kernel[(cdiv(outputs, shape.outputs),)](
        x,
        matrix_of(weight),
        bias,
        around.gain,
        out,
        outputs,
        inputs,
        around.epsilon,
        form_of(weight, inputs, shape.inputs, MOST_CHUNK),
        around.activation or "",
        around.residual is not None,
        shape.outputs,
        shape.unroll,
        num_warps=shape.warps,
    )
    return out


@Launcher
@triton.jit(do_not_specialize=["rows"])
def _packed_product_kernel(
    x, matrix: Matrix, bias, out, partial, arrived, rows, outputs, inputs, x_stride, FORM: tl.constexpr,
    SPLITS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    INPUTS: tl.constexpr = FORM.inputs
    wait_for_previous(OVERLAP)
    split = tl.program_id(1)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(0).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    line = tl.minimum(output, outputs - 1)
    in_rows = (row < rows)[None, :]
    x_tile = x + row.to(tl.int64)[None, :] * x_stride
    span = tl.cdiv(tl.cdiv(inputs, INPUTS), SPLITS) * INPUTS
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for start in tl.range(split * span, tl.minimum(split * span + span, inputs), INPUTS):
        total = ended(total)
        tiles = weights(matrix, line, start, inputs, FORM)
        for plane in tl.static_range(planes_of(FORM.code)):
            place = places(start, plane, FORM)
            inside = place < inputs
            if interleaved(FORM.code):  # x has the even inputs before the odd ones
                place = plane * (inputs // 2) + start // 2 + tl.arange(0, INPUTS // 2)
            mask = in_rows if FORM.even else in_rows & inside[:, None]
            values = tl.load(x_tile + place[:, None], mask=mask, other=0.0)
            total = tl.dot(tiles[plane].to(values.dtype), values, total, input_precision="ieee")
    place = row.to(tl.int64)[None, :] * outputs + output[:, None]
    known = (row < rows)[None, :] & (output < outputs)[:, None]
    last = True
    if SPLITS > 1:
        size = rows.to(tl.int64) * outputs
        last, total = join_splits(total, partial, arrived, place, known, split, size, SPLITS, ROWS, OUTPUTS)
    if last:
        total = times_rows(total, matrix, line, FORM)
        if bias is not None:
            total += tl.load(bias + line).to(tl.float32)[:, None]
        tl.store(out + place, total.to(out.dtype.element_ty), mask=known)


def packed_product(
    x: torch.Tensor,
    weight: Packed,
    bias: torch.Tensor | None,
    shape: MatmulShape,
    arrived: torch.Tensor | None = None,
) -> torch.Tensor:
    """`x @ weight.T + bias`, sums in float32: [rows, inputs], a matrix `[outputs, inputs]` -> [rows, outputs].

    x         if the code's inputs are interleaved, or the matrix has an order: as `arrange` makes it
    arrived   if the shape has splits: an int32 zero for every tile, which is zero again afterwards

    A row's result depends on the shape of the tiles alone. Moves the codes and scales once for `shape.rows` rows.
    """
    rows, inputs = x.shape
    outputs = weight.codes.shape[0]
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    partial = counters = out
    if shape.splits > 1:
        if arrived is None or arrived.numel() < cdiv(outputs, shape.outputs) * cdiv(rows, shape.rows):
            raise ValueError("a product with splits needs a counter for every tile")
        partial = torch.empty(shape.splits, rows, outputs, dtype=torch.float32, device=x.device)
        counters = arrived
    columns = shape.inputs // planes_of(weight.code)
    size = x.element_size()
    tile_bytes = shape.rows * shape.inputs * size + weight.bytes_of_step(shape.outputs, shape.inputs, inputs)
    _packed_product_kernel[(cdiv(outputs, shape.outputs), shape.splits, cdiv(rows, shape.rows))](
        x,
        matrix_of(weight),
        bias,
        out,
        partial,
        counters,
        rows,
        outputs,
        inputs,
        x.stride(0),
        form_of(weight, inputs, shape.inputs),
        shape.splits,
        shape.rows,
        shape.outputs,
        num_warps=shape.warps,
        num_stages=stages(x.device, shape.stages, tile_bytes, shape.outputs * columns * size),
    )
    return out
