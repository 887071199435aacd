"""The two halves of bytes as floating-point numbers, in one and a half instructions each."""

import os

import triton
import triton.language as tl

LOW_BIAS = tl.constexpr(2048.0)
HIGH_BIAS = tl.constexpr(128.0)
COMPILED = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")
"""The interpreter knows no assembly."""

HALVES = tl.constexpr(
    """
    {
    .reg .b32 word;
    shl.b32 word, $8, 12;
    lop3.b32 $0, word, 0x0000f000, 0x45000000, 0xea;
    lop3.b32 $4, word, 0x000f0000, 0x43000000, 0xea;
    shl.b32 word, $8, 4;
    lop3.b32 $1, word, 0x0000f000, 0x45000000, 0xea;
    lop3.b32 $5, word, 0x000f0000, 0x43000000, 0xea;
    shr.b32 word, $8, 4;
    lop3.b32 $2, word, 0x0000f000, 0x45000000, 0xea;
    lop3.b32 $6, word, 0x000f0000, 0x43000000, 0xea;
    shr.b32 word, $8, 12;
    lop3.b32 $3, word, 0x0000f000, 0x45000000, 0xea;
    lop3.b32 $7, word, 0x000f0000, 0x43000000, 0xea;
    }
    """
)
"""Of four bytes at once: four bits of them under the exponent that gives them their worth, 0xea: (a & b) | c."""


@triton.jit
def biased_halves(found):
    """The low halves of bytes plus LOW_BIAS, and the high ones plus HIGH_BIAS, in float32."""
    if COMPILED:
        low, high = tl.inline_asm_elementwise(
            HALVES, "=r,=r,=r,=r,=r,=r,=r,=r,r", [found], (tl.float32, tl.float32), is_pure=True, pack=4
        )
    else:
        low, high = (found & 15).to(tl.float32) + LOW_BIAS, (found >> 4).to(tl.float32) + HIGH_BIAS
    return low, high
