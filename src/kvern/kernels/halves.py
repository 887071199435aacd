"""The two halves of bytes as floating-point numbers, in one and a half instructions each."""

import struct

import triton
import triton.language as tl

from kvern.kernels.launch import has_ptx
from kvern.kernels.packed import NF4, NON_LINEAR

LOW_BIAS = tl.constexpr(2048.0)
HIGH_BIAS = tl.constexpr(128.0)

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
"""The operation (a & b) | c of four bytes at once: four bits of each get the exponent of their value, 0xea."""


@triton.jit
def _by(found, ASSEMBLY: tl.constexpr):
    """Two numbers of each byte, in float32, by assembly that takes four bytes at once."""
    return tl.inline_asm_elementwise(
        ASSEMBLY, "=r,=r,=r,=r,=r,=r,=r,=r,r", [found], (tl.float32, tl.float32), is_pure=True, pack=4
    )


@triton.jit
def biased_halves(found):
    """The low halves of bytes plus LOW_BIAS, and the high ones plus HIGH_BIAS, in float32."""
    if has_ptx():
        low, high = _by(found, HALVES)
    else:
        low, high = (found & 15).to(tl.float32) + LOW_BIAS, (found >> 4).to(tl.float32) + HIGH_BIAS
    return low, high


SMALL_FLOATS = tl.constexpr(
    "{ .reg .b32 word, rest; .reg .b16 one, other;"
    + "".join(
        f"{shift} and.b32 rest, word, 0x70007000; shr.b32 rest, rest, 3; lop3.b32 word, word, 0x80008000, rest, 0xea;"
        f"mov.b32 {{one, other}}, word; cvt.f32.f16 ${first}, one; cvt.f32.f16 ${first + 2}, other;"
        for shift, first in (
            ("shl.b32 word, $8, 12;", 0),
            ("shl.b32 word, $8, 4;", 1),
            ("shl.b32 word, $8, 8;", 4),
            ("mov.b32 word, $8;", 5),
        )
    )
    + "}"
)
"""The operation of four bytes at once that moves sign, exponent and fraction of two halves to those of two float16."""
SMALL_FLOATS_UNIT = tl.constexpr(16384.0)


@triton.jit
def small_floats(found):
    """The low and the high halves of bytes as numbers of e2m1, divided by SMALL_FLOATS_UNIT, in float32."""
    if has_ptx():
        low, high = _by(found, SMALL_FLOATS)
    else:
        low, high = small_float(found & 15), small_float(found >> 4)
    return low, high


@triton.jit
def small_float(half):
    """The numbers of e2m1, divided by SMALL_FLOATS_UNIT, of their bits: in float32."""
    bits = ((half.to(tl.int32) & 7) << 9) | ((half.to(tl.int32) & 8) << 12)
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def e4m3_of_bits(found):
    """The numbers of e4m3, for cards that do not know them, of their bits as int8: in float32."""
    bits = found.to(tl.int32)
    return (((bits & 0x7F) << 7) | ((bits & 0x80) << 8)).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 256


def lookup(values: tuple[float, ...]) -> str:
    """Returns assembly that looks up low and high halves of four bytes among 16 numbers as float16, four instructions
    each.

    Bytes of the numbers are permuted: those of the first eight by three bits of a half, those of the others too, and
    the fourth bit chooses, which a permutation spreads over a byte.
    """
    halves = [struct.pack("<e", value) for value in values]
    words = {
        f"{part}{first}": int.from_bytes(bytes(half[part] for half in halves[first : first + 4]), "little")
        for part in (0, 1)
        for first in (0, 4, 8, 12)
    }
    lines = ["{ .reg .b32 which, sign, bits, mask, one, other, lows, highs; .reg .b16 first, second;"]
    for shift, at in ((0, 0), (16, 2)):
        lines.append(f"shr.b32 sign, $8, {shift}; and.b32 which, sign, 0x7777; and.b32 sign, sign, 0xffff;")
        lines.append("prmt.b32 bits, 0x7f7f7f7f, 0x7f7f7f7f, sign; shl.b32 mask, bits, 1;")
        lines.append("lop3.b32 mask, mask, 0x80808080, bits, 0xea;")
        for part, name in ((0, "lows"), (1, "highs")):
            lines.append(f"prmt.b32 one, {words[f'{part}0']}, {words[f'{part}4']}, which;")
            lines.append(f"prmt.b32 other, {words[f'{part}8']}, {words[f'{part}12']}, which;")
            lines.append(f"lop3.b32 {name}, mask, one, other, 0xca;")
        for order, byte in ((0x5140, at), (0x7362, at + 1)):
            lines.append(f"prmt.b32 one, lows, highs, {order}; mov.b32 {{first, second}}, one;")
            lines.append(f"cvt.f32.f16 ${byte}, first; cvt.f32.f16 ${byte + 4}, second;")
    return " ".join([*lines, "}"])


NF4_LOOKUP = tl.constexpr(lookup(NF4))
NON_LINEAR_LOOKUP = tl.constexpr(lookup(NON_LINEAR))


@triton.jit
def nf4_numbers(found, table):
    """The numbers of NF4 that the low and the high halves of bytes stand for, in float32."""
    if has_ptx():
        low, high = _by(found, NF4_LOOKUP)
    else:
        low, high = tl.load(table + (found & 15)).to(tl.float32), tl.load(table + (found >> 4)).to(tl.float32)
    return low, high


@triton.jit
def non_linear_numbers(found, table):
    """The numbers of NON_LINEAR that the low and the high halves of bytes stand for, in float32."""
    if has_ptx():
        low, high = _by(found, NON_LINEAR_LOOKUP)
    else:
        table += 16
        low, high = tl.load(table + (found & 15)).to(tl.float32), tl.load(table + (found >> 4)).to(tl.float32)
    return low, high
