"""The product of one row with quantized weights, where the row stays in registers and programs go along the outputs.

For codes that outnumber the instructions a card has time for: products of a few numbers are added up in pairs of
float16, so that a weight takes one and a half instructions. A thread has the same 16 bytes of each row of codes, a
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
from kvern.kernels.codes import scales, scales_rows
from kvern.kernels.halves import COMPILED, HIGH_BIAS, LOW_BIAS, e4m3_of_bits
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


class ResidentShape(NamedTuple):
    """How a launch is cut: outputs of one step, warps of a program, programs a processor."""

    outputs: int
    warps: int
    programs: int


PROCESSOR_REGISTERS = 1 << 16
"""Of words, in each of a card's processors: programs share them, so that all programs run at once."""
UNIT_BYTES = tl.constexpr(16)
HALF_BYTES_UNIT = tl.constexpr(16777216.0)
"""What half bytes are multiplied by: the least float16 is one of it."""


def _half_bytes() -> str:
    lines = ["{ .reg .b32 word, part, low, high; .reg .b16 one, other; .reg .f32 first, second;"]
    lines.append("mov.b32 low, 0; mov.b32 high, 0;")
    for word in range(4):
        for shift in (0, 8):
            source = f"${2 + word}"
            if shift:
                lines.append(f"shr.b32 word, {source}, 8;")
                source = "word"
            at = 6 + 4 * word + shift // 4
            lines.append(f"and.b32 part, {source}, 0x000f000f; fma.rn.f16x2 low, part, ${at}, low;")
            lines.append(f"and.b32 part, {source}, 0x00f000f0; fma.rn.f16x2 high, part, ${at + 1}, high;")
    for total, out in (("low", 0), ("high", 1)):
        lines.append(f"mov.b32 {{one, other}}, {total}; cvt.f32.f16 first, one; cvt.f32.f16 second, other;")
        lines.append(f"add.f32 ${out}, first, second;")
    return " ".join([*lines, "}"])


def _eight_bit_floats() -> str:
    lines = ["{ .reg .b32 pair, low, high; .reg .b16 one, other; .reg .f32 first, second;"]
    lines.append("mov.b32 low, 0; mov.b32 high, 0;")
    for word in range(4):
        lines.append(f"mov.b32 {{one, other}}, ${2 + word};")
        for half, total, at in (("one", "low", 0), ("other", "high", 1)):
            lines.append(f"cvt.rn.f16x2.e4m3x2 pair, {half};")
            lines.append(f"fma.rn.f16x2 {total}, pair, ${6 + 2 * word + at}, {total};")
    for total, out in (("low", 0), ("high", 1)):
        lines.append(f"mov.b32 {{one, other}}, {total}; cvt.f32.f16 first, one; cvt.f32.f16 second, other;")
        lines.append(f"add.f32 ${out}, first, second;")
    return " ".join([*lines, "}"])


HALF_BYTES = tl.constexpr(_half_bytes())
EIGHT_BIT_FLOATS = tl.constexpr(_eight_bit_floats())


@triton.constexpr_function
def pieces_of(code: str) -> int:
    """Runs of eight inputs whose codes are in 16 bytes."""
    return 2 if code == "e4m3" else 4


@triton.jit
def _piece_place(unit, CODE: tl.constexpr, PIECE: tl.constexpr):
    """The first input of a piece of a unit. Half bytes of GGUF belong to neighbouring runs of 32 inputs."""
    if CODE == "q4_k":
        return unit // 2 * 64 + unit % 2 * 16 + PIECE % 2 * 8 + PIECE // 2 * 32
    else:
        return unit * (8 * pieces_of(CODE)) + PIECE * 8


@triton.jit
def _piece(x, gain, unit, inputs, CODE: tl.constexpr, PIECE: tl.constexpr, NORM: tl.constexpr, EVEN: tl.constexpr):
    """Eight inputs of each unit `[UNITS, 8]` float32, with their gain, and their squares without it."""
    place = _piece_place(unit, CODE, PIECE)[:, None] + tl.arange(0, 8)[None, :]
    known = place < inputs
    value = (tl.load(x + place) if EVEN else tl.load(x + place, mask=known, other=0.0)).to(tl.float32)
    squares = value * value
    if NORM:
        value *= (tl.load(gain + place) if EVEN else tl.load(gain + place, mask=known, other=0.0)).to(tl.float32)
    return value, squares


@triton.jit
def _float16_bits(value):
    return value.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)


@triton.jit
def _pairs(value, APART: tl.constexpr):
    """Four words of two float16 each, of eight of them `[UNITS, 8]`: those that are APART, APART more behind them."""
    UNITS: tl.constexpr = value.shape[0]
    low, high = tl.split(tl.trans(tl.reshape(value, [UNITS, 4 // APART, 2, APART]), 0, 1, 3, 2))
    if COMPILED:
        both = tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", (low, high), tl.int32, is_pure=True, pack=1
        )
    else:
        both = (_float16_bits(low) & 0xFFFF) | (_float16_bits(high) << 16)
    even, odd = tl.split(tl.reshape(both, [UNITS, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _half(word, SHIFT: tl.constexpr):
    """One float16 of a word, in float32."""
    return ((word >> SHIFT) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _sums_of_units(words, values, CODE: tl.constexpr):
    """The products of units added up, of both planes: `words [OUTPUTS, 4 * UNITS]` -> twice `[OUTPUTS, UNITS]`."""
    even, odd = tl.split(tl.reshape(words, [words.shape[0], words.shape[1] // 4, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    if COMPILED:
        words = (first, second, third, fourth) + values  # noqa: RUF005
        if CODE == "e4m3":
            low, high = tl.inline_asm_elementwise(
                EIGHT_BIT_FLOATS, "=f,=f" + ",r" * 12, words,
                (tl.float32, tl.float32), is_pure=True, pack=1,
            )  # fmt: skip
        else:
            low, high = tl.inline_asm_elementwise(
                HALF_BYTES, "=f,=f" + ",r" * 20, words,
                (tl.float32, tl.float32), is_pure=True, pack=1,
            )  # fmt: skip
        return low, high
    else:
        low = tl.zeros(first.shape, tl.float32)
        high = tl.zeros(first.shape, tl.float32)
        four = (first, second, third, fourth)
        for at in tl.static_range(8):
            word = four[at // 2]
            if CODE == "e4m3":
                one = e4m3_of_bits((word >> (at % 2 * 16)) & 0xFF)
                other = e4m3_of_bits((word >> (at % 2 * 16 + 8)) & 0xFF)
                added = one * _half(values[at], 0) + other * _half(values[at], 16)
                low += added if at % 2 == 0 else 0.0
                high += added if at % 2 == 1 else 0.0
            else:
                for plane in tl.static_range(2):
                    value = values[2 * at + plane]
                    one = (word >> (at % 2 * 8 + plane * 4)) & 15
                    other = (word >> (at % 2 * 8 + plane * 4 + 16)) & 15
                    added = one.to(tl.float32) * _half(value, 0) + other.to(tl.float32) * _half(value, 16)
                    if plane == 0:
                        low += added / HALF_BYTES_UNIT
                    else:
                        high += added * (16.0 / HALF_BYTES_UNIT)
        return low, high


@triton.jit
def _row(x, gain, unit, inputs, CODE: tl.constexpr, NORM: tl.constexpr, EVEN: tl.constexpr):
    """What the units' inputs are multiplied as: words of pairs of float16, and what their sums are multiplied by.

    Behind them the sums of the inputs of both planes, and of all squares: `(words, by, low, high, squares)`.
    """
    one, squares = _piece(x, gain, unit, inputs, CODE, 0, NORM, EVEN)
    two, more = _piece(x, gain, unit, inputs, CODE, 1, NORM, EVEN)
    squares += more
    largest = tl.maximum(tl.max(tl.abs(one), axis=1), tl.max(tl.abs(two), axis=1))
    if CODE != "e4m3":
        three, more = _piece(x, gain, unit, inputs, CODE, 2, NORM, EVEN)
        squares += more
        four, more = _piece(x, gain, unit, inputs, CODE, 3, NORM, EVEN)
        squares += more
        largest = tl.maximum(largest, tl.maximum(tl.max(tl.abs(three), axis=1), tl.max(tl.abs(four), axis=1)))
    TOP: tl.constexpr = 3 if CODE == "e4m3" else 14
    exponent = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 27), 227)
    up = ((254 + TOP - exponent) << 23).to(tl.float32, bitcast=True)
    down = ((exponent - TOP) << 23).to(tl.float32, bitcast=True)
    APART: tl.constexpr = 4 if CODE == "int4" else 2 if CODE == "q4_k" else 1
    one = one * up[:, None]
    two = two * up[:, None]
    low = tl.sum(one + two, axis=1) * down
    if CODE == "e4m3":
        return _pairs(one, APART) + _pairs(two, APART), down, low, low, tl.sum(squares)
    else:
        three = three * up[:, None]
        four = four * up[:, None]
        high = tl.sum(three + four, axis=1) * down
        if CODE == "int4":
            values = _pairs(one, APART) + _pairs(two, APART) + _pairs(three, APART) + _pairs(four, APART)
        else:
            a, b, c, d = _pairs(one, APART)
            e, f, g, h = _pairs(three, APART)
            i, j, k, m = _pairs(two, APART)
            n, o, p, q = _pairs(four, APART)
            values = (a, e, b, f, c, g, d, h, i, n, j, o, k, p, m, q)
        return values, down * HALF_BYTES_UNIT, low, high, tl.sum(squares)


@triton.jit
def _fetch(
    codes, scale, zero, output, first, outputs, inputs, CODE: tl.constexpr, GROUP: tl.constexpr, PER: tl.constexpr,
    ZERO: tl.constexpr, SCALES_ROWS: tl.constexpr, INPUTS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Of rows from the row `first` on, the words of codes `[OUTPUTS, 4 * UNITS]`, and units' scales and zeros.

    Of a row beyond the outputs no codes are read. Scales that are not beside the codes are left to `_result`.
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
    if not SCALES_ROWS and CODE != "q4_k":
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
    first, second = _sums_of_units(words, values, CODE)
    if CODE == "q4_k":
        # the offsets of `scales` have biases in them
        scaled, offset = scales(codes, scale, zero, row, 0, inputs, CODE, GROUP, PER, ZERO, INPUTS, UNIT_BYTES, EVEN, 0)
        total = scaled * (first * by[None, :] + LOW_BIAS * low[None, :]) - offset * low[None, :]
        scaled, offset = scales(codes, scale, zero, row, 0, inputs, CODE, GROUP, PER, ZERO, INPUTS, UNIT_BYTES, EVEN, 1)
        total += scaled * (second * (by * 0.0625)[None, :] + HIGH_BIAS * high[None, :]) - offset * high[None, :]
    else:
        total = (first + second * (0.0625 if CODE == "int4" else 1.0)) * by[None, :]
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
    """What comes of a tile is stored."""
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
        codes, scale, zero, output, 0, outputs, inputs, CODE, GROUP, PER, ZERO, SCALES_ROWS, INPUTS, EVEN,
    )  # fmt: skip
    two = _fetch(
        codes, scale, zero, output + step, 0, outputs, inputs, CODE, GROUP, PER, ZERO, SCALES_ROWS, INPUTS, EVEN,
    )  # fmt: skip
    one_up, two_up = one, two
    if GATED:
        one_up = _fetch(
            codes, scale, zero, output, outputs, outputs, inputs, CODE, GROUP, PER, ZERO, SCALES_ROWS, INPUTS, EVEN,
        )  # fmt: skip
        two_up = _fetch(
            codes, scale, zero, output + step, outputs, outputs, inputs, CODE, GROUP, PER, ZERO, SCALES_ROWS, INPUTS, EVEN,
        )  # fmt: skip
    if OVERLAP:
        wait_for_previous()
    unit = tl.arange(0, INPUTS // (8 * pieces_of(CODE)))
    values, by, low, high, squares = _row(x, gain, unit, inputs, CODE, NORM, EVEN)
    inverse = 1.0
    if NORM:
        inverse = tl.rsqrt(squares / inputs + epsilon)
    # A tile is fetched where the one before it in the same registers was used, while the other is multiplied.
    for _ in tl.range(tl.program_id(0) * OUTPUTS, outputs, 2 * step):
        _end_step(
            one, one_up, values, by, low, high, codes, scale, zero, output, outputs, inputs, factor, bias, inverse, out,
            CODE, GROUP, PER, ZERO, SCALES_ROWS, FACTOR, BIAS, INPUTS, EVEN, ACTIVATION, RESIDUAL,
        )  # fmt: skip
        one = _fetch(
            codes, scale, zero, output + 2 * step, 0, outputs, inputs, CODE, GROUP, PER, ZERO, SCALES_ROWS, INPUTS, EVEN,
        )  # fmt: skip
        if GATED:
            one_up = _fetch(
                codes, scale, zero, output + 2 * step, outputs, outputs, inputs, CODE, GROUP, PER, ZERO, SCALES_ROWS, INPUTS, EVEN,
            )  # fmt: skip
        _end_step(
            two, two_up, values, by, low, high, codes, scale, zero, output + step, outputs, inputs, factor, bias, inverse, out,
            CODE, GROUP, PER, ZERO, SCALES_ROWS, FACTOR, BIAS, INPUTS, EVEN, ACTIVATION, RESIDUAL,
        )  # fmt: skip
        output += 2 * step
        two = _fetch(
            codes, scale, zero, output + step, 0, outputs, inputs, CODE, GROUP, PER, ZERO, SCALES_ROWS, INPUTS, EVEN,
        )  # fmt: skip
        if GATED:
            two_up = _fetch(
                codes, scale, zero, output + step, outputs, outputs, inputs, CODE, GROUP, PER, ZERO, SCALES_ROWS, INPUTS, EVEN,
            )  # fmt: skip


def keeps_row(code: str, group: int, inputs: int, device: torch.device) -> bool:
    """Whether `resident_row` knows a code, and scales of whole units of rows of so many inputs."""
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
    """As `packed_row`, of a matrix that `keeps_row`: products of units are rounded to float16, their sums are float32.

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
