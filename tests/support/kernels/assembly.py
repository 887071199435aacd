"""An interpreter of the PTX instructions that kernels contain as inline assembly."""

import re
import struct
from collections.abc import Callable

import torch

WORD = 0xFFFFFFFF


def run_assembly(assembly: str, known: dict[str, int]) -> dict[str, int]:
    """The contents of registers after instructions, given those of some registers before."""

    def value(name: str) -> int:
        return known[name] if name in known else int(name, 0)

    for line in re.split(r";", re.sub(r"\.reg[^;]*;", "", assembly.strip().strip("{}"))):
        parts = line.strip().split(None, 1)
        if not parts:
            continue
        operation, operands = parts[0], re.findall(r"\{[^}]*\}|[^,\s]+", parts[1])
        inputs = [value(name) for name in operands[1:]]
        if operands[0].startswith("{"):
            low, high = (name.strip() for name in operands[0].strip("{}").split(","))
            known[low], known[high] = inputs[0] & 0xFFFF, inputs[0] >> 16
        else:
            known[operands[0]] = OPERATIONS[operation](*inputs) & WORD
    return known


def choose(a: int, b: int, c: int, table: int) -> int:
    bits = ((a >> bit & 1, b >> bit & 1, c >> bit & 1) for bit in range(32))
    return sum((table >> (4 * x + 2 * y + z) & 1) << bit for bit, (x, y, z) in enumerate(bits))


def permute(a: int, b: int, selector: int) -> int:
    found = 0
    for place in range(4):
        which = selector >> 4 * place & 15
        byte = (a | b << 32) >> 8 * (which & 7) & 0xFF
        found |= ((0xFF if byte & 0x80 else 0) if which & 8 else byte) << 8 * place
    return found


def widen(half: int) -> int:
    number = struct.unpack("<e", struct.pack("<H", half))[0]
    return int(struct.unpack("<I", struct.pack("<f", number))[0])


def halves(compute: Callable[..., float]) -> Callable[..., int]:
    """An operation on pairs of float16, each rounded once."""

    def both(*pairs: int) -> int:
        numbers = [struct.unpack("<ee", struct.pack("<I", pair)) for pair in pairs]
        return int(
            struct.unpack("<I", struct.pack("<ee", *(compute(*inputs) for inputs in zip(*numbers, strict=True))))[0]
        )

    return both


def add(a: int, b: int) -> int:
    """The sum of two float32."""
    one, other = struct.unpack("<ff", struct.pack("<II", a, b))
    return int(struct.unpack("<I", struct.pack("<f", one + other))[0])


def eight_bits(pair: int) -> int:
    """Two float16 of two numbers of e4m3."""
    numbers = torch.tensor([pair & 0xFF, pair >> 8], dtype=torch.uint8).view(torch.float8_e4m3fn)
    return int(numbers.half().view(torch.int32)) & WORD


OPERATIONS: dict[str, Callable[..., int]] = {
    "shl.b32": lambda a, by: a << by,
    "shr.b32": lambda a, by: a >> by,
    "and.b32": lambda a, b: a & b,
    "mov.b32": lambda a: a,
    "mov.u32": lambda a: a,
    "lop3.b32": choose,
    "prmt.b32": permute,
    "cvt.f32.f16": widen,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "add.f32": add,
    "cvt.rn.f16x2.e4m3x2": eight_bits,
    "add.f16x2": halves(lambda a, b: a + b),
    "sub.f16x2": halves(lambda a, b: a - b),
    "mul.f16x2": halves(lambda a, b: a * b),
    "fma.rn.f16x2": halves(lambda a, b, c: a * b + c),
}
