"""The blocks of GGUF's types, for `kernels/codes.py`.

The blocks of a row are taken apart so that loads are aligned: `codes [outputs, blocks, bytes]` has the bits of the
numbers, `scale [outputs, blocks, bytes]` what multiplies and what is subtracted (`formats/gguf/method.py`). A
block has 32 numbers or 256. But for q8_0, a byte has four bits of two numbers, of the two planes: those of neighbouring
runs of 16, 32 or 64 inputs; in q4_k and q6_k those of an even input and the odd one behind it. One or two more bits of
each number stand in words, one or two for 16 columns, and so do those of numbers of two and three bits.
"""

from collections.abc import Mapping

import triton
import triton.language as tl

from kvern.kernels.halves import (
    HIGH_BIAS,
    LOW_BIAS,
    SMALL_FLOATS_UNIT,
    biased_halves,
    non_linear_numbers,
    small_floats,
)

BLOCKS: Mapping[str, tuple[int, int, int]] = {
    "q8_0": (1, 32, 32),
    "q4_0": (2, 16, 32),
    "q4_1": (2, 16, 32),
    "q5_0": (2, 16, 32),
    "q5_1": (2, 16, 32),
    "iq4_nl": (2, 16, 32),
    "mxfp4": (2, 16, 32),
    "q2_k": (2, 16, 32),
    "q3_k": (2, 16, 32),
    "q4_k": (2, 16, 32),
    "q5_k": (2, 32, 64),
    "q6_k": (2, 8, 32),
    "iq4_xs": (2, 16, 32),
}
"""Types by name: planes, columns that share a scale, and a number that the inputs of a step are a multiple of."""

_BIAS = tl.constexpr(64.0)
"""The biases of numbers of five and six bits, and of two and three."""


@triton.constexpr_function
def _run(code: str) -> int:
    """Inputs of a plane that stand together."""
    return 32 if code == "q5_k" else 16


@triton.constexpr_function
def _scale_bytes(code: str) -> int:
    sizes = {"q4_1": 4, "q5_1": 4, "q2_k": 20, "q3_k": 14, "q4_k": 16, "q5_k": 16, "q6_k": 18, "iq4_xs": 8, "mxfp4": 1}
    return sizes.get(code, 2)


@triton.constexpr_function
def _is_among(code: str, names: str) -> bool:
    return code in names.split()


@triton.jit
def block_places(first, CODE: tl.constexpr, INPUTS: tl.constexpr, PLANE: tl.constexpr):
    """See `places` in `kernels/codes.py`."""
    if CODE == "q8_0":
        return first + tl.arange(0, INPUTS)
    else:
        RUN: tl.constexpr = _run(CODE)
        column = tl.arange(0, INPUTS // 2)
        return first + column // RUN * (2 * RUN) + column % RUN + RUN * PLANE


@triton.jit
def _bytes(tile, known, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(tile)
    else:
        return tl.load(tile, mask=known, other=0)


@triton.jit
def _number(bits):
    """A number of up to six bits plus _BIAS, made by setting an exponent before them."""
    return ((bits << 17) | 0x42800000).to(tl.float32, bitcast=True)


@triton.jit
def _of_columns(word, WIDTH: tl.constexpr, FIRST: tl.constexpr):
    """Returns the bits of 16 columns in words [rows, units], WIDTH each from FIRST on: [rows, 16 * units]."""
    spread = word[:, :, None] >> (tl.arange(0, 16) * WIDTH + FIRST)[None, None, :]
    return tl.reshape(spread, [word.shape[0], word.shape[1] * 16])


@triton.jit
def block_numbers(codes, table, row, first, inputs, CODE: tl.constexpr, INPUTS: tl.constexpr, EVEN: tl.constexpr):
    """See `numbers` in `kernels/codes.py`."""
    if CODE == "q8_0":
        column = first + tl.arange(0, INPUTS)
        found = _bytes(codes + row[:, None] * inputs + column[None, :], (column < inputs)[None, :], EVEN)
        return (found.to(tl.int8, bitcast=True).to(tl.float32),)
    else:
        column = first // 2 + tl.arange(0, INPUTS // 2)
        known = (2 * column < inputs)[None, :]
        if _is_among(CODE, "q4_0 q4_1 q4_k iq4_nl iq4_xs mxfp4"):
            found = _bytes(codes + row[:, None] * (inputs // 32 * 16) + column[None, :], known, EVEN)
            if _is_among(CODE, "iq4_nl iq4_xs"):
                return non_linear_numbers(found, table)
            elif CODE == "mxfp4":
                return small_floats(found)
            else:
                return biased_halves(found)
        else:
            unit = first // 32 + tl.arange(0, INPUTS // 32)
            in_units = (unit * 32 < inputs)[None, :]
            words = codes.to(tl.pointer_type(tl.int32))
            if _is_among(CODE, "q5_0 q5_1"):
                block = codes + row[:, None] * (inputs // 32 * 20) + (column // 16 * 20 + column % 16)[None, :]
                found = _bytes(block, known, EVEN).to(tl.int32)
                high = _bytes(words + row[:, None] * (inputs // 32 * 5) + (unit * 5 + 4)[None, :], in_units, EVEN)
                return (
                    _number((found & 15) | ((_of_columns(high, 1, 0) & 1) << 4)),
                    _number((found >> 4) | ((_of_columns(high, 1, 16) & 1) << 4)),
                )
            elif CODE == "q5_k":
                block = codes + row[:, None] * (inputs // 256 * 160) + (column // 128 * 160 + column % 128)[None, :]
                found = _bytes(block, known, EVEN).to(tl.int32)
                place = row[:, None] * (inputs // 256 * 40) + (unit // 8 * 40 + 32 + unit % 8)[None, :]
                high = _bytes(words + place, in_units, EVEN)
                return (
                    _number((found & 15) | ((_of_columns(high, 1, 0) & 1) << 4)),
                    _number((found >> 4) | ((_of_columns(high, 1, 16) & 1) << 4)),
                )
            elif CODE == "q6_k":
                block = codes + row[:, None] * (inputs // 256 * 192) + (column // 128 * 192 + column % 128)[None, :]
                found = _bytes(block, known, EVEN).to(tl.int32)
                place = row[:, None] * (inputs // 256 * 48) + (unit // 8 * 48 + 32 + unit % 8 * 2)[None, :]
                low = _of_columns(_bytes(words + place, in_units, EVEN), 2, 0) & 3
                high = _of_columns(_bytes(words + place + 1, in_units, EVEN), 2, 0) & 3
                return _number((found & 15) | (low << 4)), _number((found >> 4) | (high << 4))
            else:
                WORDS: tl.constexpr = 16 if CODE == "q2_k" else 24
                place = row[:, None] * (inputs // 256 * WORDS) + (unit // 8 * WORDS + unit % 8 * 2)[None, :]
                low = _of_columns(_bytes(words + place, in_units, EVEN), 2, 0) & 3
                high = _of_columns(_bytes(words + place + 1, in_units, EVEN), 2, 0) & 3
                if CODE == "q2_k":
                    return _number(low), _number(high)
                else:
                    place = row[:, None] * (inputs // 256 * WORDS) + (unit // 8 * WORDS + 16 + unit % 8)[None, :]
                    third = _bytes(words + place, in_units, EVEN)
                    return (
                        _number(low | ((_of_columns(third, 1, 0) & 1) << 2)),
                        _number(high | ((_of_columns(third, 1, 16) & 1) << 2)),
                    )


@triton.jit
def block_scales(
    scale,
    row,
    first,
    inputs,
    CODE: tl.constexpr,
    INPUTS: tl.constexpr,
    CHUNK: tl.constexpr,
    EVEN: tl.constexpr,
    PLANE: tl.constexpr,
):
    """See `scales` in `kernels/codes.py`."""
    PLANES: tl.constexpr = 1 if CODE == "q8_0" else 2
    BYTES: tl.constexpr = _scale_bytes(CODE)
    column = first // PLANES + tl.arange(0, INPUTS // PLANES // CHUNK) * CHUNK
    known = (column * PLANES < inputs)[None, :]
    if _is_among(CODE, "q2_k q3_k q4_k q5_k q6_k iq4_xs"):
        within = (column % 128)[None, :]
        block = row[:, None] * (inputs // 256 * BYTES) + (column // 128 * BYTES)[None, :]
        return _large_scales(scale, block, within, known, CODE, EVEN, PLANE)
    else:
        block = row[:, None] * (inputs // 32) + (column * PLANES // 32)[None, :]
        if CODE == "mxfp4":
            exponent = _bytes(scale + block, known, EVEN).to(tl.int32)
            by = (exponent << 23).to(tl.float32, bitcast=True) * SMALL_FLOATS_UNIT
            return by, by * 0.0
        else:
            halves = scale.to(tl.pointer_type(tl.float16)) + block * (BYTES // 2)
            by = _bytes(halves, known, EVEN).to(tl.float32)
            if _is_among(CODE, "q8_0 iq4_nl"):
                return by, by * 0.0
            elif CODE == "q5_0":
                return by, by * (_BIAS + 16.0)
            else:
                BIAS: tl.constexpr = _BIAS if CODE == "q5_1" else LOW_BIAS if PLANE == 0 else HIGH_BIAS
                if CODE == "q4_0":
                    return by, by * (BIAS + 8.0)
                else:
                    return by, by * BIAS - _bytes(halves + 1, known, EVEN).to(tl.float32)


@triton.jit
def six_bits(low, middle, high, run):
    """Returns scale and minimum of a run of 32, float32, from the words of a block of q4_k or q5_k after its two
    halves."""
    shift = run % 4 * 8
    low = low >> shift
    middle = middle >> shift
    high = high >> shift
    scale = tl.where(run < 4, low & 63, (high & 15) | ((low >> 2) & 48))
    least = tl.where(run < 4, middle & 63, ((high >> 4) & 15) | ((middle >> 2) & 48))
    return scale.to(tl.float32), least.to(tl.float32)


@triton.jit
def _large_scales(
    scale, block, within, known, CODE: tl.constexpr, EVEN: tl.constexpr, PLANE: tl.constexpr
):  # fmt: skip
    """Returns scales of blocks of 256 numbers; `within` are the columns of a block, whose d comes first."""
    by = _bytes(scale.to(tl.pointer_type(tl.float16)) + block // 2, known, EVEN).to(tl.float32)
    if CODE == "iq4_xs":
        run = within // 16
        high = _bytes(scale + (block + 2 + run // 4), known, EVEN).to(tl.int32) >> (run % 4 * 2)
        low = _bytes(scale + (block + 4 + run // 2), known, EVEN).to(tl.int32) >> (run % 2 * 4)
        by *= (((low & 15) | ((high & 3) << 4)) - 32).to(tl.float32)
        return by, by * 0.0
    elif _is_among(CODE, "q4_k q5_k"):
        least = _bytes(scale.to(tl.pointer_type(tl.float16)) + (block // 2 + 1), known, EVEN).to(tl.float32)
        run = within // 16 if CODE == "q4_k" else within // 32 * 2 + PLANE
        words = scale.to(tl.pointer_type(tl.int32)) + block // 4
        low = _bytes(words + 1, known, EVEN)
        middle = _bytes(words + 2, known, EVEN)
        high = _bytes(words + 3, known, EVEN)
        wide, deep = six_bits(low, middle, high, run)
        by *= wide
        least *= deep
        BIAS: tl.constexpr = _BIAS if CODE == "q5_k" else LOW_BIAS if PLANE == 0 else HIGH_BIAS
        return by, by * BIAS + least
    else:
        run = within // 16 * 2 + PLANE
        if CODE == "q6_k":
            run = within // 8
        if CODE == "q6_k":
            by *= _bytes(scale + (block + 2 + run), known, EVEN).to(tl.int8, bitcast=True).to(tl.float32)
            return by, by * (_BIAS + 32.0)
        elif CODE == "q3_k":
            low = _bytes(scale + (block + 2 + run % 8), known, EVEN).to(tl.int32) >> (run // 8 * 4)
            high = _bytes(scale + (block + 10 + run % 4), known, EVEN).to(tl.int32) >> (run // 4 * 2)
            by *= (((low & 15) | ((high & 3) << 4)) - 32).to(tl.float32)
            return by, by * (_BIAS + 4.0)
        else:
            least = _bytes(scale.to(tl.pointer_type(tl.float16)) + (block // 2 + 1), known, EVEN).to(tl.float32)
            both = _bytes(scale + (block + 4 + run), known, EVEN).to(tl.int32)
            by *= (both & 15).to(tl.float32)
            return by, by * _BIAS + least * (both >> 4).to(tl.float32)
