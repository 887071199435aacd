"""Products of codes of eight bits with codes of eight bits, e4m3 or int8, on the matrix units that know them.

    x [T, inputs] codes with scales of rows, or of runs of inputs of a row
    weight [outputs, inputs] codes with scales of rows, of runs of inputs, or of blocks

The sums of a step are made plain by the scales of both before they are added up, so that of e4m3 no more than a step is
summed in less than float32; whole rows of int8 are summed as integers.
"""

from collections.abc import Iterable

import torch
import triton
import triton.language as tl

from kvern.kernels.launch import Launcher, capability, cdiv, stages, wait_for_previous
from kvern.kernels.linear import MatmulShape
from kvern.kernels.packed import Packed

FIRST_CARDS = {"e4m3": 89, "int8": 80}
"""The first compute capability whose matrix units multiply such codes by such codes."""
STEP = 128
"""Inputs that a step multiplies."""


def multiplies_codes(code: str, groups: Iterable[int], inputs: int, device: torch.device) -> bool:
    """True if codes are multiplied by codes on this card, with scales of either for `groups` of the inputs.

    No step reaches from one scale's inputs into another's.
    """
    known = 0 < FIRST_CARDS.get(code, 0) <= (capability(device) or 90)
    return known and all(group == inputs or group % STEP == 0 for group in groups)


SIDE_BY_SIDE = 8
"""Tiles of rows over the same weights, which are read once for them."""


@triton.jit
def _step_scales(scale, line, start, columns, PER: tl.constexpr, GROUP: tl.constexpr):
    """Returns the scales of a tile's lines in a step from the input `start` on."""
    return tl.load(scale + (line // PER) * columns + start // GROUP).to(tl.float32)


@Launcher
@triton.jit(do_not_specialize=["rows"])
def _scaled_product_kernel(
    x: tl.tensor,
    x_scale: tl.tensor,
    codes: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor | None,
    out: tl.tensor,
    rows,
    outputs,
    inputs,
    X_GROUP: tl.constexpr,
    GROUP: tl.constexpr,
    PER: tl.constexpr,
    WHOLE: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    SIDE_BY_SIDE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """WHOLE: both have scales of whole rows."""
    wait_for_previous(OVERLAP)
    row_tiles, output_tiles = tl.cdiv(rows, ROWS), tl.cdiv(outputs, OUTPUTS)
    tile = tl.program_id(0)
    first = tile // (SIDE_BY_SIDE * output_tiles) * SIDE_BY_SIDE
    beside = tl.minimum(row_tiles - first, SIDE_BY_SIDE)
    inside = tile % (SIDE_BY_SIDE * output_tiles)
    row = (first + inside % beside) * ROWS + tl.arange(0, ROWS)
    output = inside // beside * OUTPUTS + tl.arange(0, OUTPUTS)
    line = tl.minimum(row, rows - 1).to(tl.int64)
    weight_line = tl.minimum(output, outputs - 1).to(tl.int64)
    column = tl.arange(0, INPUTS)
    x_tile = x + line[:, None] * inputs + column[None, :]
    weight_tile = codes + weight_line[None, :] * inputs + column[:, None]
    INTEGERS: tl.constexpr = codes.dtype.element_ty == tl.int8
    total = tl.zeros([ROWS, OUTPUTS], tl.int32 if INTEGERS and WHOLE else tl.float32)
    for start in tl.range(0, inputs, INPUTS):
        if EVEN:
            values, weights = tl.load(x_tile + start), tl.load(weight_tile + start)
        else:
            known = start + column < inputs
            values = tl.load(x_tile + start, mask=known[None, :], other=0.0)
            weights = tl.load(weight_tile + start, mask=known[:, None], other=0.0)
        if INTEGERS and WHOLE:
            total = tl.dot(values, weights, total, out_dtype=tl.int32)
        elif WHOLE:
            total += tl.dot(values, weights)
        else:
            part = tl.dot(values, weights, out_dtype=tl.int32 if INTEGERS else tl.float32).to(tl.float32)
            by = _step_scales(x_scale, line, start, tl.cdiv(inputs, X_GROUP), 1, X_GROUP)
            weight_by = _step_scales(scale, weight_line, start, tl.cdiv(inputs, GROUP), PER, GROUP)
            total += part * by[:, None] * weight_by[None, :]
    result = total.to(tl.float32)
    if WHOLE:
        by, weight_by = tl.load(x_scale + line), tl.load(scale + weight_line // PER).to(tl.float32)
        result *= by[:, None] * weight_by[None, :]
    if bias is not None:
        result += tl.load(bias + weight_line).to(tl.float32)[None, :]
    place = row.to(tl.int64)[:, None] * outputs + output[None, :]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (output < outputs)[None, :])


def scaled_product(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: Packed,
    bias: torch.Tensor | None,
    shape: MatmulShape,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`(x * x_scale) @ weight.T + bias` in `dtype`: [T, inputs], a matrix without zeros -> [T, outputs].

    x         [T, inputs] contiguous, of the dtype of the weight's codes
    x_scale   [T, inputs / n] float32, contiguous: of runs of n inputs

    Where scales are of less than rows, they are of a multiple of `shape.inputs` inputs. A row's result depends on the
    shape of the tiles alone.
    """
    rows, inputs = x.shape
    outputs = weight.codes.shape[0]
    assert weight.scale is not None and weight.zero is None
    whole = x_scale.shape[1] == 1 and weight.group == inputs
    x_group = inputs if x_scale.shape[1] == 1 else -(-inputs // x_scale.shape[1])
    if not whole and any(group != inputs and group % shape.inputs for group in (x_group, weight.group)):
        raise ValueError(f"steps of {shape.inputs} inputs do not fit scales of {x_group} and {weight.group}")
    out = torch.empty(rows, outputs, dtype=dtype, device=x.device)
    _scaled_product_kernel[(cdiv(rows, shape.rows) * cdiv(outputs, shape.outputs),)](
        x,
        x_scale,
        weight.codes,
        weight.scale,
        bias,
        out,
        rows,
        outputs,
        inputs,
        x_group,
        weight.group,
        weight.outputs_per_scale,
        whole,
        inputs % shape.inputs == 0,
        shape.rows,
        shape.outputs,
        shape.inputs,
        SIDE_BY_SIDE,
        num_warps=shape.warps,
        num_stages=stages(x.device, shape.stages, (shape.rows + shape.outputs) * shape.inputs),
    )
    return out
