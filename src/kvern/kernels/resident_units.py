"""Units of a row of codes, 16 bytes each, and their products with inputs in pairs of float16, for `resident_row`."""

import triton
import triton.language as tl

from kvern.kernels.halves import e4m3_of_bits
from kvern.kernels.launch import has_ptx

HALF_BYTES_UNIT = tl.constexpr(16777216.0)
"""The factor of half bytes: it makes the least float16 one."""


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
def _piece(x, gain, unit, inputs, CODE: tl.constexpr, PIECE: tl.constexpr, NORM: tl.constexpr, EVEN: tl.constexpr):
    """Eight inputs of each unit `[UNITS, 8]` float32, with their gain, and their squares without it."""
    place = (unit * (8 * pieces_of(CODE)) + PIECE * 8)[:, None] + tl.arange(0, 8)[None, :]
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
    if has_ptx():
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
def half_of(word, SHIFT: tl.constexpr):
    """One float16 of a word, in float32."""
    return ((word >> SHIFT) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def four_words(words):
    """Splits the words of each unit: `[OUTPUTS, 4 * UNITS]` to four times `[OUTPUTS, UNITS]`."""
    even, odd = tl.split(tl.reshape(words, [words.shape[0], words.shape[1] // 4, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def sums_of_units(words, values, CODE: tl.constexpr):
    """The products of units added up, of both planes: `words [OUTPUTS, 4 * UNITS]` -> twice `[OUTPUTS, UNITS]`."""
    first, second, third, fourth = four_words(words)
    if has_ptx():
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
                added = one * half_of(values[at], 0) + other * half_of(values[at], 16)
                low += added if at % 2 == 0 else 0.0
                high += added if at % 2 == 1 else 0.0
            else:
                for plane in tl.static_range(2):
                    value = values[2 * at + plane]
                    one = (word >> (at % 2 * 8 + plane * 4)) & 15
                    other = (word >> (at % 2 * 8 + plane * 4 + 16)) & 15
                    added = one.to(tl.float32) * half_of(value, 0) + other.to(tl.float32) * half_of(value, 16)
                    if plane == 0:
                        low += added / HALF_BYTES_UNIT
                    else:
                        high += added * (16.0 / HALF_BYTES_UNIT)
        return low, high


@triton.jit
def values_of_units(x, gain, unit, inputs, CODE: tl.constexpr, NORM: tl.constexpr, EVEN: tl.constexpr):
    """Returns the units' inputs as words of pairs of float16, and the factors of their sums.

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
    APART: tl.constexpr = 1 if CODE == "e4m3" else 4
    one = one * up[:, None]
    two = two * up[:, None]
    low = tl.sum(one + two, axis=1) * down
    if CODE == "e4m3":
        return _pairs(one, APART) + _pairs(two, APART), down, low, low, tl.sum(squares)
    else:
        three = three * up[:, None]
        four = four * up[:, None]
        high = tl.sum(three + four, axis=1) * down
        values = _pairs(one, APART) + _pairs(two, APART) + _pairs(three, APART) + _pairs(four, APART)
        return values, down * HALF_BYTES_UNIT, low, high, tl.sum(squares)
