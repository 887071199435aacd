"""What the blocks of GGUF's types mean, for `kernels/codes.py`; scales stand among the codes.

A row is a run of blocks: `codes [outputs, inputs / block, bytes]` uint8. The layouts are those of ggml's
`ggml-common.h`. Whole blocks are multiplied, so steps are multiples of a block and no step ends within one.
"""

from collections.abc import Mapping

import triton
import triton.language as tl

from kvern.kernels.halves import HIGH_BIAS, LOW_BIAS, biased_halves

BLOCKS: Mapping[str, tuple[int, int, int, int]] = {
    "q8_0": (1, 32, 32, 34),
    "q4_0": (2, 16, 32, 18),
}
"""By the type's name: planes, columns that share a scale, inputs of a block, bytes of a block."""


@triton.jit
def block_places(first, CODE: tl.constexpr, INPUTS: tl.constexpr, PLANE: tl.constexpr):
    """See `places` in `kernels/codes.py`."""
    if CODE == "q8_0":
        return first + tl.arange(0, INPUTS)
    else:
        column = tl.arange(0, INPUTS // 2)
        return first + column // 16 * 32 + column % 16 + 16 * PLANE


@triton.jit
def half_at(codes, place, known):
    """A float16 whose two bytes lie at any place."""
    low = tl.load(codes + place, mask=known, other=0).to(tl.uint16)
    high = tl.load(codes + place + 1, mask=known, other=0).to(tl.uint16)
    return (low | (high << 8)).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def block_numbers(codes, row, first, inputs, CODE: tl.constexpr, INPUTS: tl.constexpr, EVEN: tl.constexpr):
    """See `numbers` in `kernels/codes.py`."""
    if CODE == "q8_0":
        column = tl.arange(0, INPUTS)
        place = (first // 32 + column // 32) * 34 + 2 + column % 32
        tile = codes + row[:, None] * (inputs // 32 * 34) + place[None, :]
        found = tl.load(tile, mask=(first + column < inputs)[None, :], other=0)
        return (found.to(tl.int8, bitcast=True).to(tl.float32),)
    else:
        column = tl.arange(0, INPUTS // 2)
        block = first // 32 + column // 16
        tile = codes + row[:, None] * (inputs // 32 * 18) + (block * 18 + 2 + column % 16)[None, :]
        return biased_halves(tl.load(tile, mask=(block * 32 < inputs)[None, :], other=0))


@triton.jit
def block_scales(
    codes,
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
    BYTES: tl.constexpr = 34 if CODE == "q8_0" else 18
    block = first // 32 + tl.arange(0, INPUTS // PLANES // CHUNK) * (CHUNK * PLANES) // 32
    place = row[:, None] * (inputs // 32 * BYTES) + (block * BYTES)[None, :]
    by = half_at(codes, place, (block * 32 < inputs)[None, :])
    if CODE == "q8_0":
        return by, by * 0.0
    else:
        return by, by * (8.0 + (LOW_BIAS if PLANE == 0 else HIGH_BIAS))
