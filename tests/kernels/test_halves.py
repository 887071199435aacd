"""What assembly makes of the halves of bytes: its instructions, followed on a CPU for every byte."""

import struct

import pytest

from kvern.kernels.halves import HALVES, HIGH_BIAS, LOW_BIAS, SMALL_FLOATS, SMALL_FLOATS_UNIT, lookup
from kvern.kernels.packed import E2M1, NF4
from tests.support.kernels.assembly import run_assembly


def follow(assembly: str, word: int) -> list[float]:
    """The eight float32 that are made of a word of four bytes."""
    known = run_assembly(assembly, {"$8": word})
    return [struct.unpack("<f", struct.pack("<I", known[f"${index}"]))[0] for index in range(8)]


@pytest.mark.parametrize(
    ("assembly", "low", "high"),
    [
        (HALVES.value, [LOW_BIAS.value + code for code in range(16)], [HIGH_BIAS.value + code for code in range(16)]),
        (SMALL_FLOATS.value, *[[number / SMALL_FLOATS_UNIT.value for number in E2M1]] * 2),
        (lookup(NF4), *[[struct.unpack("<e", struct.pack("<e", number))[0] for number in NF4]] * 2),
        (lookup(tuple(range(-7, 9))), *[[float(number) for number in range(-7, 9)]] * 2),
    ],
    ids=["int4", "e2m1", "nf4", "others"],
)
def test_every_byte(assembly: str, low: list[float], high: list[float]) -> None:
    for byte in range(256):
        four = [byte, byte * 7 + 3 & 255, 255 - byte, byte ^ 0x5A]
        found = follow(assembly, sum(one << 8 * place for place, one in enumerate(four)))
        assert found == [*(low[one & 15] for one in four), *(high[one >> 4] for one in four)]
