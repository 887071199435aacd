"""The product of one row with quantized weights, where the row stays in registers and programs go along the outputs.

For codes that outnumber the instructions a card has time for: products of a few numbers are added up in pairs of
float16, so that a weight takes an instruction and a half. A thread has the same 16 bytes of each row of codes, a
unit, whose inputs it has multiplied by a power of two, so that nothing overflows and what is rounded is small beside
the unit's largest input: half bytes as they stand are float16 below the least normal one, without a bias. Sums of units
are float32. Two tiles of rows are in registers, of which one is on its way while the other is multiplied; the first two
are before the previous kernel has ended.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvern.kernels.activation import activate
from kvern.kernels.block_codes import six_bits
from kvern.kernels.codes import scales_rows
from kvern.kernels.launch import (
    Launcher,
    capability,
    cdiv,
    next_power_of_2,
    overlaps,
    processors,
    wait_for_previous,
)
from kvern.kernels.linear import NOTHING, Around
from kvern.kernels.packed import Packed
from kvern.kernels.packed_product import ended_sums
from kvern.kernels.resident_units import four_words, half_of, pieces_of, sums_of_units, values_of_units


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
def _fetch(
    codes, scale, zero, output, first, outputs, inputs, CODE: tl.constexpr, GROUP: tl.constexpr, PER: tl.constexpr,
    ZERO: tl.constexpr, SCALES_ROWS: tl.constexpr, INPUTS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Returns the words of codes `[OUTPUTS, 4 * UNITS]` of rows from `first` on, and the units' scales and zeros.

    Of a row beyond the outputs no codes are read.
    """
    WIDTH: tl.constexpr = 8 * pieces_of(CODE)
    word = tl.arange(0, INPUTS // WIDTH * 4)
    row = first + tl.minimum(output, outputs - 1)
    known = (output < outputs)[:, None]
    if not EVEN:
        known = known & (word < inputs // WIDTH * 4)[None, :]
    place = row[:, None] * (inputs // WIDTH * 4) + word[None, :]
    words = tl.load(codes.to(tl.pointer_type(tl.int32)) + place, mask=known, other=0)
    by, less = row, row
    if CODE == "q4_k":  # of a block, for each of its units
        place = row[:, None] * (inputs // 256 * 4) + (word // 32 * 4 + word % 4)[None, :]
        by = tl.load(scale.to(tl.pointer_type(tl.int32)) + place, mask=known, other=0)
    elif not SCALES_ROWS:
        begin = tl.arange(0, INPUTS // WIDTH) * WIDTH
        place = (row // PER)[:, None] * tl.cdiv(inputs, GROUP) + (begin // GROUP)[None, :]
        by = tl.load(scale + place, mask=(begin < inputs)[None, :], other=0.0)
        if ZERO:
            less = tl.load(zero + place, mask=(begin < inputs)[None, :], other=0)
    return words, by, less


@triton.jit
def _result(
    tile, values, by, low, high, codes, scale, zero, row, inputs, factor, bias, inverse,
    CODE: tl.constexpr, GROUP: tl.constexpr, PER: tl.constexpr, ZERO: tl.constexpr, SCALES_ROWS: tl.constexpr,
    FACTOR: tl.constexpr, BIAS: tl.constexpr, INPUTS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The products of the rows `[OUTPUTS]` of a tile of `_fetch`."""
    words, scaled, less = tile
    first, second = sums_of_units(words, values, CODE)
    total = (first + second * (1.0 if CODE == "e4m3" else 0.0625)) * by[None, :]
    if CODE == "q4_k":
        both, one, two, three = four_words(scaled)
        wide, deep = six_bits(one, two, three, tl.arange(0, INPUTS // 32)[None, :] % 8)
        total = half_of(both, 0) * wide * total - half_of(both, 16) * deep * (low + high)[None, :]
    else:
        if ZERO:
            total -= less.to(tl.float32) * (low + high)[None, :]
        elif CODE == "int4":
            total -= 8.0 * (low + high)[None, :]
        if not SCALES_ROWS:
            total *= scaled.to(tl.float32)
    return ended_sums(
        tl.sum(total, axis=1) * inverse, row, row >= 0, scale, factor, bias, PER, SCALES_ROWS, FACTOR, BIAS
    )


@triton.jit
def _end_step(
    tile, up_tile, values, by, low, high, codes, scale, zero, output, outputs, inputs, factor, bias, inverse, out,
    CODE: tl.constexpr, GROUP: tl.constexpr, PER: tl.constexpr, ZERO: tl.constexpr, SCALES_ROWS: tl.constexpr,
    FACTOR: tl.constexpr, BIAS: tl.constexpr, INPUTS: tl.constexpr, EVEN: tl.constexpr, ACTIVATION: tl.constexpr,
    RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Stores the result of a tile."""
    known = output < outputs
    row = tl.minimum(output, outputs - 1)
    result = _result(
        tile, values, by, low, high, codes, scale, zero, row, inputs, factor, bias, inverse,
        CODE, GROUP, PER, ZERO, SCALES_ROWS, FACTOR, BIAS, INPUTS, EVEN,
    )  # fmt: skip
    if ACTIVATION != "":
        up = _result(
            up_tile, values, by, low, high, codes, scale, zero, row + outputs, inputs, factor, bias, inverse,
            CODE, GROUP, PER, ZERO, SCALES_ROWS, FACTOR, BIAS, INPUTS, EVEN,
        )  # fmt: skip
        result = activate(result, ACTIVATION) * up
    if RESIDUAL:
        result += tl.load(out + output, mask=known, other=0.0).to(tl.float32)
    tl.store(out + output, result.to(out.dtype.element_ty), mask=known)


@Launcher
@triton.jit
def _resident_row_kernel(
    x: tl.tensor,
    codes: tl.tensor,
    scale: tl.tensor,
    zero: tl.tensor,
    factor: tl.tensor,
    bias: tl.tensor,
    gain: tl.tensor,
    out: tl.tensor,
    outputs,
    inputs,
    step,
    epsilon: tl.float32,
    CODE: tl.constexpr,
    GROUP: tl.constexpr,
    PER: tl.constexpr,
    ZERO: tl.constexpr,
    SCALES_ROWS: tl.constexpr,
    FACTOR: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    RESIDUAL: tl.constexpr,
    EVEN: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    GATED: tl.constexpr = ACTIVATION != ""
    output = tl.program_id(0).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    one = _fetch(
        codes, scale, zero, output, 0, outputs, inputs,
        CODE, GROUP, PER, ZERO, SCALES_ROWS, INPUTS, EVEN,
    )  # fmt: skip
    two = _fetch(
        codes, scale, zero, output + step, 0, outputs, inputs,
        CODE, GROUP, PER, ZERO, SCALES_ROWS, INPUTS, EVEN,
    )  # fmt: skip
    one_up, two_up = one, two
    if GATED:
        one_up = _fetch(
            codes, scale, zero, output, outputs, outputs, inputs,
            CODE, GROUP, PER, ZERO, SCALES_ROWS, INPUTS, EVEN,
        )  # fmt: skip
        two_up = _fetch(
            codes, scale, zero, output + step, outputs, outputs, inputs,
            CODE, GROUP, PER, ZERO, SCALES_ROWS, INPUTS, EVEN,
        )  # fmt: skip
    if OVERLAP:
        wait_for_previous()
    unit = tl.arange(0, INPUTS // (8 * pieces_of(CODE)))
    values, by, low, high, squares = values_of_units(x, gain, unit, inputs, CODE, NORM, EVEN)
    inverse = 1.0
    if NORM:
        inverse = tl.rsqrt(squares / inputs + epsilon)
    # Where a tile was multiplied, the next but one is fetched into the same registers.
    for _ in tl.range(tl.program_id(0) * OUTPUTS, outputs, 2 * step):
        _end_step(
            one, one_up, values, by, low, high, codes, scale, zero, output, outputs, inputs, factor, bias, inverse,
            out, CODE, GROUP, PER, ZERO, SCALES_ROWS, FACTOR, BIAS, INPUTS, EVEN, ACTIVATION, RESIDUAL,
        )  # fmt: skip
        one = _fetch(
            codes, scale, zero, output + 2 * step, 0, outputs, inputs,
            CODE, GROUP, PER, ZERO, SCALES_ROWS, INPUTS, EVEN,
        )  # fmt: skip
        if GATED:
            one_up = _fetch(
                codes, scale, zero, output + 2 * step, outputs, outputs, inputs,
                CODE, GROUP, PER, ZERO, SCALES_ROWS, INPUTS, EVEN,
            )  # fmt: skip
        _end_step(
            two, two_up, values, by, low, high, codes, scale, zero, output + step, outputs, inputs, factor, bias,
            inverse, out, CODE, GROUP, PER, ZERO, SCALES_ROWS, FACTOR, BIAS, INPUTS, EVEN, ACTIVATION, RESIDUAL,
        )  # fmt: skip
        output += 2 * step
        two = _fetch(
            codes, scale, zero, output + step, 0, outputs, inputs,
            CODE, GROUP, PER, ZERO, SCALES_ROWS, INPUTS, EVEN,
        )  # fmt: skip
        if GATED:
            two_up = _fetch(
                codes, scale, zero, output + step, outputs, outputs, inputs,
                CODE, GROUP, PER, ZERO, SCALES_ROWS, INPUTS, EVEN,
            )  # fmt: skip


def keeps_row(code: str, group: int, inputs: int, device: torch.device) -> bool:
    """True if `resident_row` supports a code, and scales of whole units of rows of so many inputs."""
    if inputs > MOST_INPUTS:
        return False
    if code == "q4_k":
        return True
    if code == "e4m3" and 0 < capability(device) < 89:
        return False
    width = {"int4": 32, "e4m3": 16}.get(code, 0)
    return width > 0 and inputs % width == 0 and group % width == 0


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
    overlap = overlaps(x.device)
    programs = min(cdiv(outputs, shape.outputs), processors(x.device) * shape.programs)
    whole = next_power_of_2(inputs)
    _resident_row_kernel[(programs,)](
        x,
        weight.codes,
        x if weight.scale is None else weight.scale,
        x if weight.zero is None else weight.zero,
        x if weight.factor is None else weight.factor,
        x if bias is None else bias,
        x if around.gain is None else around.gain,
        out,
        outputs,
        inputs,
        programs * shape.outputs,
        around.epsilon,
        weight.code,
        weight.group,
        weight.outputs_per_scale,
        weight.zero is not None,
        scales_rows(weight.code, weight.group, inputs, weight.zero),
        weight.factor is not None,
        bias is not None,
        around.gain is not None,
        around.activation or "",
        around.residual is not None,
        inputs == whole,
        shape.outputs,
        whole,
        overlap,
        num_warps=shape.warps,
        maxnreg=min(255, PROCESSOR_REGISTERS // (32 * shape.warps * shape.programs) & -8),
        launch_pdl=overlap,
    )
    return out
