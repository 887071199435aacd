"""Products of a few rows with a large weight matrix, bound by the bytes of the weights.

`matvec` multiplies one row on the ordinary cores. It can take the norm of the row before the product, and the gated
activation or the residual's addition after it, so that a layer of one token is six launches:

    x -> [x / rms(x) * gain] -> x @ weight.T + bias -> [activation(gate) * up] -> [residual +]

`small_matmul` multiplies up to 128 rows on the matrix units. For Hopper GPUs there are `stream_hopper` and
`product_hopper` beside it.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvern.kernels.activation import activate
from kvern.kernels.launch import Launcher, cdiv, stages, wait_for_previous


class MatvecShape(NamedTuple):
    """The shape of a matrix-vector launch: outputs of one program, inputs of one step.

    `stages` steps' weights are on their way at once through shared memory, or `unroll` steps' through registers.
    """

    outputs: int
    inputs: int
    warps: int
    stages: int = 1
    unroll: int = 1


class MatmulShape(NamedTuple):
    """The shape of a product: rows, outputs and inputs of one tile; `stages` tiles are in flight at once.

    Where the card's shared memory holds fewer stages, there are fewer. `splits` programs share the inputs of the same
    outputs, where the outputs alone would not fill the card.
    """

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int
    splits: int = 1

    def stages_on(self, device: torch.device, element_size: int) -> int:
        """Returns the number of stages for numbers of so many bytes."""
        return stages(device, self.stages, (self.rows + self.outputs) * self.inputs * element_size)


class StreamShape(NamedTuple):
    """The shape of products of `stream_hopper.py`, like `MatmulShape`. A product with splits cannot activate."""

    rows: int
    outputs: int
    inputs: int
    stages: int
    splits: int


class StreamPackedShape(NamedTuple):
    """The shape of `stream_packed_product`, like `StreamShape`."""

    rows: int
    outputs: int
    stages: int
    splits: int = 1
    kind: str = "stream"


class ProductShape(NamedTuple):
    """The shape of `product`: the number of blocks of 128 rows side by side with the same weights."""

    group: int


class TileShape(NamedTuple):
    """The shape of `product_codes`: `splits` programs share a tile's inputs; `group` as in `ProductShape`."""

    splits: int
    group: int


class Around(NamedTuple):
    """Operations of `matvec` before and after the product.

    gain        [inputs] of a root-mean-square norm of the row, and its `epsilon`; None: no norm
    activation  gate and up are the two halves of the weight's rows, and the result is activation(gate) * up
    residual    [1, outputs], to which the result is added in place; it is what the product returns
    """

    gain: torch.Tensor | None = None
    epsilon: float = 0.0
    activation: str | None = None
    residual: torch.Tensor | None = None


NOTHING = Around()


@triton.jit
def _multiply_tile(x, gain, weights, column, inside, squares):
    values = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    if gain is not None:
        squares += values * values
        values *= tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
    return weights.to(tl.float32) * values[None, :], values, squares


@Launcher
@triton.jit
def _matvec_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor | None,
    gain: tl.tensor | None,
    out: tl.tensor,
    outputs,
    inputs,
    epsilon: tl.float32,
    ACTIVATION: tl.constexpr,
    RESIDUAL: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    STAGES: tl.constexpr,
    UNROLL: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    output = tl.program_id(0).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    known = output < outputs
    column = tl.arange(0, INPUTS)
    inside = column < inputs
    tile = weight + output[:, None] * inputs + column[None, :]
    mask = known[:, None] & inside[None, :]
    weights = tl.load(tile, mask=mask, other=0.0)
    if ACTIVATION != "":
        up_tile = tile + outputs.to(tl.int64) * inputs
        ups = tl.load(up_tile, mask=mask, other=0.0)
    wait_for_previous(OVERLAP)
    squares = tl.zeros([INPUTS], tl.float32)
    total, values, squares = _multiply_tile(x, gain, weights, column, inside, squares)
    if ACTIVATION != "":
        other = ups.to(tl.float32) * values[None, :]
    for start in tl.range(INPUTS, inputs, INPUTS, num_stages=STAGES, loop_unroll_factor=UNROLL):
        inside = start + column < inputs
        mask = known[:, None] & inside[None, :]
        weights = tl.load(tile + start, mask=mask, other=0.0)
        if ACTIVATION != "":
            ups = tl.load(up_tile + start, mask=mask, other=0.0)
        product, values, squares = _multiply_tile(x, gain, weights, start + column, inside, squares)
        total += product
        if ACTIVATION != "":
            other += ups.to(tl.float32) * values[None, :]
    result = tl.sum(total, axis=1)
    if gain is not None:
        inverse = tl.rsqrt(tl.sum(squares, axis=0) / inputs + epsilon)
        result *= inverse
    if bias is not None:
        result += tl.load(bias + output, mask=known, other=0.0).to(tl.float32)
    if ACTIVATION != "":
        up = tl.sum(other, axis=1)
        if gain is not None:
            up *= inverse
        if bias is not None:
            up += tl.load(bias + outputs + output, mask=known, other=0.0).to(tl.float32)
        result = activate(result, ACTIVATION) * up
    if RESIDUAL:
        result += tl.load(out + output, mask=known, other=0.0).to(tl.float32)
    tl.store(out + output, result.to(out.dtype.element_ty), mask=known)


def matvec(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    shape: MatvecShape,
    around: Around = NOTHING,
) -> torch.Tensor:
    """`x @ weight.T + bias` of one row, in float32: [1, inputs], [outputs, inputs] -> [1, outputs].

    Moves the weights once: 2 * outputs * inputs bytes in bfloat16.
    """
    inputs = x.shape[1]
    outputs = weight.shape[0] // (1 if around.activation is None else 2)
    out = around.residual
    if out is None:
        out = torch.empty(1, outputs, dtype=x.dtype, device=x.device)
    _matvec_kernel[(cdiv(outputs, shape.outputs),)](
        x,
        weight,
        bias,
        around.gain,
        out,
        outputs,
        inputs,
        around.epsilon,
        around.activation or "",
        around.residual is not None,
        shape.outputs,
        shape.inputs,
        shape.stages,
        shape.unroll,
        num_warps=shape.warps,
    )
    return out


@triton.jit
def sum_of_tile(
    x,
    weight,
    row,
    output,
    rows,
    outputs,
    inputs,
    x_stride,
    split,
    EVEN: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """`weight @ x.T` of a tile, over the inputs of one split: [OUTPUTS, ROWS] in float32.

    Beyond the last output the last is read again: no mask. Outputs are the tile's rows, as the matrix units take 64 of
    those at a time, but any 8 columns.
    """
    column = tl.arange(0, INPUTS)
    in_rows = (row < rows)[None, :]
    x_tile = x + row.to(tl.int64)[None, :] * x_stride + column[:, None]
    weight_tile = weight + tl.minimum(output, outputs - 1)[:, None] * inputs + column[None, :]
    span = tl.cdiv(tl.cdiv(inputs, INPUTS), SPLITS) * INPUTS
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for start in tl.range(split * span, tl.minimum(split * span + span, inputs), INPUTS):
        if EVEN:
            weights = tl.load(weight_tile + start)
            values = tl.load(x_tile + start, mask=in_rows, other=0.0)
        else:
            inside = start + column < inputs
            weights = tl.load(weight_tile + start, mask=inside[None, :], other=0.0)
            values = tl.load(x_tile + start, mask=in_rows & inside[:, None], other=0.0)
        total = tl.dot(weights, values, total, input_precision="ieee")
    return total


@triton.jit
def join_splits(
    total, partial, arrived, place, known, split, size, SPLITS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr
):
    """Whoever arrives last gets the sum of all parts, in their order, so that the order of arrival changes nothing.

    Returns whether this is the last, and the sum. `size`: of each split's part of `partial`.
    """
    part = partial + place
    tl.store(part + split * size, total, mask=known)
    tl.debug_barrier()
    counter = arrived + tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    last = tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1
    if last:
        tl.debug_barrier()
        total = tl.zeros([OUTPUTS, ROWS], tl.float32)
        for other in tl.static_range(SPLITS):
            total += tl.load(part + other * size, mask=known, other=0.0, cache_modifier=".cg")
        tl.atomic_xchg(counter, 0)
    return last, total


@Launcher
@triton.jit(do_not_specialize=["rows"])
def _small_matmul_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor | None,
    out: tl.tensor,
    partial: tl.tensor,
    arrived: tl.tensor,
    rows,
    outputs,
    inputs,
    x_stride,
    EVEN: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous(OVERLAP)
    split = tl.program_id(1)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(0).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    total = sum_of_tile(
        x, weight, row, output, rows, outputs, inputs, x_stride, split, EVEN, SPLITS, ROWS, OUTPUTS, INPUTS
    )
    place = row.to(tl.int64)[None, :] * outputs + output[:, None]
    known = (row < rows)[None, :] & (output < outputs)[:, None]
    last = True
    if SPLITS > 1:
        size = rows.to(tl.int64) * outputs
        last, total = join_splits(total, partial, arrived, place, known, split, size, SPLITS, ROWS, OUTPUTS)
    if last:
        if bias is not None:
            total += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[:, None]
        tl.store(out + place, total.to(out.dtype.element_ty), mask=known)


def small_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    shape: MatmulShape,
    arrived: torch.Tensor | None = None,
) -> torch.Tensor:
    """`x @ weight.T + bias`: [rows, inputs], [outputs, inputs] -> [rows, outputs], sums in float32.

    arrived   if the shape has splits: an int32 zero for every tile, which is zero again afterwards

    A row's result depends on the shape of the tiles alone, not on how many rows there are. Moves the weights once for
    each `shape.rows` rows.
    """
    rows, inputs = x.shape
    outputs = weight.shape[0]
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    partial = counters = out
    if shape.splits > 1:
        if arrived is None:
            raise ValueError("a product with splits needs counters")
        partial = torch.empty(shape.splits, rows, outputs, dtype=torch.float32, device=x.device)
        counters = arrived
    _small_matmul_kernel[(cdiv(outputs, shape.outputs), shape.splits, cdiv(rows, shape.rows))](
        x,
        weight,
        bias,
        out,
        partial,
        counters,
        rows,
        outputs,
        inputs,
        x.stride(0),
        inputs % shape.inputs == 0,
        shape.splits,
        shape.rows,
        shape.outputs,
        shape.inputs,
        num_warps=shape.warps,
        num_stages=shape.stages_on(x.device, x.element_size()),
    )
    return out
