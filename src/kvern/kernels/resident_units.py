"""Units of a row of codes, 16 bytes each, and their products with inputs in pairs of float16, for `resident_row`."""

import triton
import triton.language as tl

from kvern.kernels.halves import SMALL_FLOATS_UNIT, e4m3_of_bits, small_float
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


def _small_floats(sums: int) -> str:
    """Returns assembly for four words of codes of e2m1: one sum of their products, or one of each half of the unit.

    A code is moved to the bits 9 to 12 of a float16, and 7 is added to its sign: this carries the sign to bit 15, or
    the mask takes the 7 away. Other codes of the word are below bit 9, or beyond the word. Masks and shifts share
    units that multiplications leave free, and the compiler would shift by factors that it knows: so it reads them as
    multiples of a dimension of the grid that is 1.
    """
    lines = ["{ .reg .b32 word, part, bias, far, near, low, high; .reg .b16 one, other; .reg .f32 first, second;"]
    lines.append("mov.b32 low, 0; mov.b32 high, 0; mov.b32 bias, 0x70007000;")
    lines.append("mov.u32 near, %nctaid.y; shl.b32 far, near, 9; shl.b32 near, near, 1;")
    first = sums + 4
    for word in range(4):
        total = "low" if word < 2 else "high"
        for place in (0, 2, 1, 3):
            if place == 0:
                lines.append(f"and.b32 word, ${sums + word}, 0x0f0f0f0f;")
            elif place == 1:
                lines.append(f"shr.b32 word, ${sums + word}, 4; and.b32 word, word, 0x0f0f0f0f;")
            factor = "far" if place < 2 else "near"
            lines.append(f"mad.lo.u32 part, word, {factor}, bias; and.b32 part, part, 0x8e008e00;")
            lines.append(f"fma.rn.f16x2 {total}, part, ${first + 4 * word + place}, {total};")
    if sums == 1:
        lines.append("add.f16x2 low, low, high;")
    for total, out in (("low", 0), ("high", 1))[:sums]:
        lines.append(f"mov.b32 {{one, other}}, {total}; cvt.f32.f16 first, one; cvt.f32.f16 second, other;")
        lines.append(f"add.f32 ${out}, first, second;")
    return " ".join([*lines, "}"])


HALF_BYTES = tl.constexpr(_half_bytes())
SMALL_FLOATS = tl.constexpr(_small_floats(1))
SMALL_FLOATS_OF_HALVES = tl.constexpr(_small_floats(2))
TWO_SCALES = tl.constexpr(
    "{ .reg .b32 pair; .reg .b16 one, other; cvt.rn.f16x2.e4m3x2 pair, $2; mov.b32 {one, other}, pair;"
    "cvt.f32.f16 $0, one; cvt.f32.f16 $1, other; }"
)
EIGHT_BIT_FLOATS = tl.constexpr(_eight_bit_floats())


@triton.constexpr_function
def pieces_of(code: str) -> int:
    """Runs of eight inputs whose codes are in 16 bytes."""
    return 2 if code == "e4m3" else 4


@triton.jit
def _eight(x, unit, inputs, CODE: tl.constexpr, PIECE: tl.constexpr, EVEN: tl.constexpr):
    """Eight inputs of each unit `[UNITS, 8]`, zero beyond the last."""
    place = (unit * (8 * pieces_of(CODE)) + PIECE * 8)[:, None] + tl.arange(0, 8)[None, :]
    return tl.load(x + place) if EVEN else tl.load(x + place, mask=place < inputs, other=0.0)


@triton.jit
def gains_of_units(gain, unit, inputs, CODE: tl.constexpr, EVEN: tl.constexpr):
    """The gains of the units' inputs: `[UNITS, 8]` for each of their pieces."""
    one = _eight(gain, unit, inputs, CODE, 0, EVEN)
    two = _eight(gain, unit, inputs, CODE, 1, EVEN)
    if pieces_of(CODE) == 2:
        return one, two
    else:
        return one, two, _eight(gain, unit, inputs, CODE, 2, EVEN), _eight(gain, unit, inputs, CODE, 3, EVEN)


@triton.jit
def _piece(x, gains, unit, inputs, CODE: tl.constexpr, PIECE: tl.constexpr, EVEN: tl.constexpr):
    """Eight inputs of each unit `[UNITS, 8]` float32, with their gain if there is one, and their squares without it."""
    value = _eight(x, unit, inputs, CODE, PIECE, EVEN).to(tl.float32)
    squares = value * value
    if gains is not None:
        value *= gains[PIECE].to(tl.float32)
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
def sums_of_units(words, values, CODE: tl.constexpr, HALVES: tl.constexpr):
    """The products of units added up, of both planes: `words [OUTPUTS, 4 * UNITS]` -> twice `[OUTPUTS, UNITS]`.

    Of e2m1: of both halves of a unit, if HALVES, or of all of it, twice the same.
    """
    first, second, third, fourth = four_words(words)
    if has_ptx():
        words = (first, second, third, fourth) + values  # noqa: RUF005
        if CODE == "e4m3":
            low, high = tl.inline_asm_elementwise(
                EIGHT_BIT_FLOATS, "=f,=f" + ",r" * 12, words,
                (tl.float32, tl.float32), is_pure=True, pack=1,
            )  # fmt: skip
        elif CODE == "e2m1" and not HALVES:
            low = tl.inline_asm_elementwise(SMALL_FLOATS, "=f" + ",r" * 20, words, tl.float32, is_pure=True, pack=1)
            high = low
        else:
            ASSEMBLY: tl.constexpr = SMALL_FLOATS_OF_HALVES if CODE == "e2m1" else HALF_BYTES
            low, high = tl.inline_asm_elementwise(
                ASSEMBLY, "=f,=f" + ",r" * 20, words,
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
                    if CODE == "e2m1":
                        added = small_float(one) * half_of(value, 0) + small_float(other) * half_of(value, 16)
                        low += added if at < 4 else 0.0
                        high += added if at >= 4 else 0.0
                    else:
                        added = one.to(tl.float32) * half_of(value, 0) + other.to(tl.float32) * half_of(value, 16)
                        low += added / HALF_BYTES_UNIT if plane == 0 else 0.0
                        high += added * (16.0 / HALF_BYTES_UNIT) if plane == 1 else 0.0
        if CODE == "e2m1" and not HALVES:
            low += high
            high = low
        return low, high


@triton.jit
def values_of_units(x, gains, unit, inputs, CODE: tl.constexpr, EVEN: tl.constexpr):
    """Returns the units' inputs as words of pairs of float16, and the factors of their sums.

    Behind them the sums of the inputs of both planes, and of all squares: `(words, by, low, high, squares)`. `gains`:
    of `gains_of_units`, or None.
    """
    one, squares = _piece(x, gains, unit, inputs, CODE, 0, EVEN)
    two, more = _piece(x, gains, unit, inputs, CODE, 1, EVEN)
    squares += more
    largest = tl.maximum(tl.max(tl.abs(one), axis=1), tl.max(tl.abs(two), axis=1))
    if CODE != "e4m3":
        three, more = _piece(x, gains, unit, inputs, CODE, 2, EVEN)
        squares += more
        four, more = _piece(x, gains, unit, inputs, CODE, 3, EVEN)
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
        UNIT: tl.constexpr = SMALL_FLOATS_UNIT if CODE == "e2m1" else HALF_BYTES_UNIT
        return values, down * UNIT, low, high, tl.sum(squares)


@triton.jit
def byte_scale(bits, dtype: tl.constexpr):
    """Scales of one byte of a type, of their bits: in float32, exponents if they have no sign."""
    if dtype == tl.uint8:
        return (bits << 23).to(tl.float32, bitcast=True)
    else:
        return e4m3_of_bits(bits)


@triton.jit
def two_scales(both, dtype: tl.constexpr):
    """The scales of the two halves of units, of one byte each, of their bits as int16."""
    if has_ptx() and dtype == tl.float8e4nv:
        return tl.inline_asm_elementwise(TWO_SCALES, "=f,=f,h", [both], (tl.float32, tl.float32), is_pure=True, pack=1)
    else:
        both = both.to(tl.int32)
        return byte_scale(both & 255, dtype), byte_scale((both >> 8) & 255, dtype)
