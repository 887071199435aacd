"""The product of one row with quantized weights, where the row stays in registers and programs go along the outputs.

For codes that outnumber the instructions a card has time for: products of a few numbers are added up in pairs of
float16, so that a weight takes an instruction and a half. A thread has the same 16 bytes of each row of codes, a
unit, whose inputs it has multiplied by a power of two, so that nothing overflows and what is rounded is small beside
the unit's largest input: half bytes as they stand are float16 below the least normal one, without a bias, and those of
e2m1 become float16 2^14 times too small, in one instruction and a half. Sums of units are float32. Two tiles of rows
are in registers, of which one is on its way while the other is multiplied; the first two, and the gains of a norm, are
before the previous kernel has ended.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvern.kernels.activation import activate
from kvern.kernels.block_codes import six_bits
from kvern.kernels.codes import Form, Matrix, matrix_of, scales_rows
from kvern.kernels.launch import (
    Launcher,
    architecture,
    capability,
    cdiv,
    next_power_of_2,
    processors,
    wait_for_previous,
)
from kvern.kernels.linear import NOTHING, Around
from kvern.kernels.packed import Packed
from kvern.kernels.packed_product import ended_sums
from kvern.kernels.resident_units import (
    byte_scale,
    four_words,
    gains_of_units,
    half_of,
    pieces_of,
    sums_of_units,
    two_scales,
    values_of_units,
)


class ResidentShape(NamedTuple):
    """The shape of a launch: outputs of one step, warps of a program, programs a processor."""

    outputs: int
    warps: int
    programs: int


PROCESSOR_REGISTERS = 1 << 16
"""The registers (words) of each processor: programs share them, so that all run at once."""
MOST_INPUTS = 1 << 15
"""The most inputs of a row: a program's threads hold no more in registers."""


@triton.jit
def _lines(start, outputs, OUTPUTS: tl.constexpr, GATED: tl.constexpr):
    """The outputs of a tile's lines from `start` on, and their rows; if GATED each has two, of gate and of up."""
    if GATED:
        line = tl.arange(0, 2 * OUTPUTS)
        output = start + line // 2
        return output, tl.minimum(output, outputs - 1) + line % 2 * outputs
    else:
        output = start + tl.arange(0, OUTPUTS)
        return output, tl.minimum(output, outputs - 1)


@triton.jit
def _fetch(
    matrix, start, outputs, inputs, FORM: tl.constexpr, OUTPUTS: tl.constexpr, GATED: tl.constexpr
):  # fmt: skip
    """Returns the words of codes `[LINES, 4 * UNITS]` of a tile, and the units' scales and zeros.

    Beyond the outputs no codes are read.
    """
    CODE: tl.constexpr = FORM.code
    INPUTS: tl.constexpr = FORM.inputs
    WIDTH: tl.constexpr = 8 * pieces_of(CODE)
    word = tl.arange(0, INPUTS // WIDTH * 4)
    output, row = _lines(start, outputs, OUTPUTS, GATED)
    row = row.to(tl.int64)
    known = (output < outputs)[:, None]
    if not FORM.even:
        known = known & (word < inputs // WIDTH * 4)[None, :]
    place = row[:, None] * (inputs // WIDTH * 4) + word[None, :]
    words = tl.load(matrix.codes.to(tl.pointer_type(tl.int32)) + place, mask=known, other=0)
    by, less = row, row
    if CODE == "q4_k":  # of a block, for each of its units
        place = row[:, None] * (inputs // 256 * 4) + (word // 32 * 4 + word % 4)[None, :]
        by = tl.load(matrix.scale.to(tl.pointer_type(tl.int32)) + place, mask=known, other=0)
    elif not FORM.scales_rows:
        scale = matrix.scale
        if CODE == "e2m1":  # a unit has one of a byte, or two, which come as one
            scale = scale.to(tl.pointer_type(tl.int16 if FORM.group < WIDTH else tl.uint8))
        GROUP: tl.constexpr = max(FORM.group, WIDTH)
        begin = tl.arange(0, INPUTS // WIDTH) * WIDTH
        place = (row // FORM.per)[:, None] * tl.cdiv(inputs, GROUP) + (begin // GROUP)[None, :]
        known = (begin < inputs)[None, :] if not FORM.even else None
        other = 0 if not FORM.even else None
        by = tl.load(scale + place, mask=known, other=other)
        if matrix.zero is not None:
            less = tl.load(matrix.zero + place, mask=known, other=other)
    return words, by, less


@triton.jit
def _result(tile, values, by, low, high, matrix, row, bias, inverse, FORM: tl.constexpr):
    """The products of the rows `[LINES]` of a tile of `_fetch`."""
    CODE: tl.constexpr = FORM.code
    words, scaled, less = tile
    first, second = sums_of_units(words, values, CODE, FORM.group == 16)
    if CODE == "e2m1":
        if FORM.group == 16:
            wide, deep = two_scales(scaled, matrix.scale.dtype.element_ty)
            total = (first * wide + second * deep) * by[None, :]
        else:
            total = first * by[None, :] * byte_scale(scaled.to(tl.int32), matrix.scale.dtype.element_ty)
    elif CODE == "q4_k":
        both, one, two, three = four_words(scaled)
        wide, deep = six_bits(one, two, three, tl.arange(0, FORM.inputs // 32)[None, :] % 8)
        total = (first + second * 0.0625) * by[None, :]
        total = half_of(both, 0) * wide * total - half_of(both, 16) * deep * (low + high)[None, :]
    else:
        total = (first + second * (1.0 if CODE == "e4m3" else 0.0625)) * by[None, :]
        if matrix.zero is not None:
            total -= less.to(tl.float32) * (low + high)[None, :]
        elif CODE == "int4":
            total -= 8.0 * (low + high)[None, :]
        if not FORM.scales_rows:
            total *= scaled.to(tl.float32)
    return ended_sums(tl.sum(total, axis=1) * inverse, matrix, row, row >= 0, bias, FORM)


@triton.jit
def _end_step(
    tile, values, by, low, high, matrix, start, outputs, bias, inverse, out, FORM: tl.constexpr,
    ACTIVATION: tl.constexpr, RESIDUAL: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """Stores the result of a tile."""
    GATED: tl.constexpr = ACTIVATION != ""
    _, row = _lines(start, outputs, OUTPUTS, GATED)
    result = _result(tile, values, by, low, high, matrix, row, bias, inverse, FORM)
    if GATED:
        gate, up = tl.split(tl.reshape(result, [OUTPUTS, 2]))
        result = activate(gate, ACTIVATION) * up
    output = start + tl.arange(0, OUTPUTS)
    known = output < outputs
    if RESIDUAL:
        result += tl.load(out + output, mask=known, other=0.0).to(tl.float32)
    tl.store(out + output, result.to(out.dtype.element_ty), mask=known)


@Launcher
@triton.jit
def _resident_row_kernel(
    x, matrix: Matrix, bias, gain, out, outputs, inputs, step, epsilon: tl.float32, FORM: tl.constexpr,
    ACTIVATION: tl.constexpr, RESIDUAL: tl.constexpr, OUTPUTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    CODE: tl.constexpr = FORM.code
    GATED: tl.constexpr = ACTIVATION != ""
    begin = tl.program_id(0) * OUTPUTS
    one = _fetch(matrix, begin, outputs, inputs, FORM, OUTPUTS, GATED)
    two = _fetch(matrix, begin + step, outputs, inputs, FORM, OUTPUTS, GATED)
    unit = tl.arange(0, FORM.inputs // (8 * pieces_of(CODE)))
    gains = None
    if gain is not None:
        gains = gains_of_units(gain, unit, inputs, CODE, FORM.even)
    wait_for_previous(OVERLAP)
    values, by, low, high, squares = values_of_units(x, gains, unit, inputs, CODE, FORM.even)
    inverse = 1.0
    if gain is not None:
        inverse = tl.rsqrt(squares / inputs + epsilon)
    # Where a tile was multiplied, the next but one is fetched into the same registers.
    for start in tl.range(begin, outputs, 2 * step):
        _end_step(
            one, values, by, low, high, matrix, start, outputs, bias, inverse, out, FORM, ACTIVATION, RESIDUAL, OUTPUTS
        )
        one = _fetch(matrix, start + 2 * step, outputs, inputs, FORM, OUTPUTS, GATED)
        _end_step(
            two, values, by, low, high, matrix, start + step, outputs, bias, inverse, out,
            FORM, ACTIVATION, RESIDUAL, OUTPUTS,
        )  # fmt: skip
        two = _fetch(matrix, start + 3 * step, outputs, inputs, FORM, OUTPUTS, GATED)


def keeps_row(code: str, group: int, inputs: int, device: torch.device) -> bool:
    """True if `resident_row` supports a code, and scales of whole units of rows of so many inputs.

    A unit of e2m1 may have two scales, which are of one byte, and no zeros.
    """
    if inputs > MOST_INPUTS:
        return False
    if code == "q4_k":
        return True
    if code == "e4m3" and 0 < capability(device) < 89:
        return False
    width = {"int4": 32, "e2m1": 32, "e4m3": 16}.get(code, 0)
    return width > 0 and inputs % width == 0 and (group % width == 0 or (code == "e2m1" and group == 16))


def resident_row(
    x: torch.Tensor,
    weight: Packed,
    bias: torch.Tensor | None,
    shape: ResidentShape,
    around: Around = NOTHING,
) -> torch.Tensor:
    """Computes `packed_row` for a matrix that `keeps_row`: products of units are rounded to float16, their sums are
    float32.

    Moves the codes and scales once.
    """
    inputs = x.shape[1]
    outputs = weight.codes.shape[0] // (1 if around.activation is None else 2)
    out = around.residual
    if out is None:
        out = torch.empty(1, outputs, dtype=x.dtype, device=x.device)
    programs = min(cdiv(outputs, shape.outputs), processors(x.device) * shape.programs)
    whole = next_power_of_2(inputs)
    scaled = scales_rows(weight.code, weight.group, inputs, weight.zero)
    registers = min(255, PROCESSOR_REGISTERS // (32 * shape.warps * shape.programs) & -8)
    limit = {} if isinstance(architecture(x.device), str) else {"maxnreg": registers}  # AMD's compiler has no limit
    _resident_row_kernel[(programs,)](
        x,
        matrix_of(weight),
        bias,
        around.gain,
        out,
        outputs,
        inputs,
        programs * shape.outputs,
        around.epsilon,
        Form(weight.code, weight.group, weight.outputs_per_scale, scaled, inputs == whole, whole, 0),
        around.activation or "",
        around.residual is not None,
        shape.outputs,
        num_warps=shape.warps,
        **limit,
    )
    return out
