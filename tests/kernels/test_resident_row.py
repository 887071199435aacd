"""The product of one row that stays in registers, beside float64, and its assembly's instructions."""

import os
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from kvern.formats.gpu.candidates import ONE_ROW, row_shape
from kvern.kernels.halves import SMALL_FLOATS_UNIT
from kvern.kernels.linear import NOTHING, Around, MatmulShape, MatvecShape
from kvern.kernels.packed import E2M1
from kvern.kernels.resident_row import ResidentShape, keeps_row, resident_row
from kvern.kernels.resident_units import (
    HALF_BYTES,
    HALF_BYTES_UNIT,
    SMALL_FLOATS,
    SMALL_FLOATS_OF_HALVES,
    TWO_SCALES,
)
from tests.kernels.packed_weights import make_packed, to_device
from tests.support.kernels.assembly import run_assembly
from tests.support.kernels.references import relative_error
from tests.support.kernels.references import rms_norm_reference as rms_norm

KINDS = ("e4m3 row", "e4m3 blocks", "int4", "int4 zero", "int4 g32", "mxfp4", "nvfp4", "gguf q4_k")
SHAPE = ResidentShape(4, 4, 1)


def _launches() -> Iterator[Callable[[], object]]:
    """For compilation: each kind with and without what is around it, inputs that fill the last step and not."""
    for kind in KINDS:
        for inputs in (1024, 1280):
            packed = make_packed(kind, 256, inputs, group=128).packed
            x = torch.empty(1, inputs, dtype=torch.bfloat16)
            for around in (NOTHING, Around(x[0], 1e-5, "silu")):
                yield partial(resident_row, x, packed, None, ResidentShape(4, 4, 2), around)


LAUNCHES = [*_launches()] if os.environ.get("TRITON_INTERPRET") != "1" else []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inputs", [512, 768])
def test_one_row(monkeypatch: pytest.MonkeyPatch, device: torch.device, kind: str, inputs: int) -> None:
    """As layers use it: inputs of very different sizes, several steps of a program and a last one that is not whole."""
    monkeypatch.setattr("kvern.kernels.resident_row.processors", lambda _: 2)
    outputs, gated = 22, inputs == 512
    generator = torch.Generator().manual_seed(3)
    made = make_packed(kind, outputs, inputs)
    packed = to_device(made.packed, device)
    assert keeps_row(packed.code, packed.group, inputs, device)
    x = torch.randn(1, inputs, generator=generator)
    x[:, 5] *= 30
    x[:, 64:128] *= 2.0**-30
    x[:, 128:192] = 0
    x = x.to(torch.bfloat16).to(torch.float32 if gated else torch.bfloat16).to(device)
    bias = torch.randn(outputs, generator=generator).to(torch.bfloat16).to(device)
    gain = torch.randn(inputs, generator=generator).to(device) if gated else None
    residual = None if gated else torch.randn(1, outputs, generator=generator).to(device)
    expected = x.double() if gain is None else rms_norm(x, gain, 1e-5)
    expected = expected @ made.plain.to(device).T + bias.double()
    if gated:
        gate, up = expected.chunk(2, -1)
        expected = F.silu(gate) * up
    else:
        expected = expected + residual.double()
    around = Around(gain, 1e-5, "silu" if gated else None, residual)
    out = resident_row(x, packed, bias, SHAPE, around)
    assert relative_error(out, expected) < 1e-3
    assert residual is None or out is residual


ASSEMBLY = [
    ("int4", HALF_BYTES.value, 2, range(16)),
    ("e2m1", SMALL_FLOATS.value, 1, E2M1),
    ("e2m1", SMALL_FLOATS_OF_HALVES.value, 2, E2M1),
]


@pytest.mark.parametrize(("code", "assembly", "sums", "numbers"), ASSEMBLY, ids=["int4", "e2m1", "e2m1 halves"])
def test_units_in_assembly(code: str, assembly: str, sums: int, numbers: Sequence[float]) -> None:
    """Each code at each place among others: what inputs that are powers of two leave of it is exact."""
    generator = random.Random(1)
    for place in range(32):
        word, pair, half = place // 8, place % 4, place % 8 // 4
        for number in range(16):
            words = [generator.getrandbits(32) for _ in range(4)]
            words[word] = words[word] & ~(15 << place % 8 * 4) | number << place % 8 * 4
            known = {f"${sums + at}": found for at, found in enumerate(words)} | {"%nctaid.y": 1}
            known |= {f"${sums + 4 + at}": 0 for at in range(16)}
            known[f"${sums + 4 + 4 * word + pair}"] = 0x5C00 << 16 * half  # 256
            found = run_assembly(assembly, known)
            second = (pair % 2 if code == "int4" else word // 2) if sums == 2 else 0
            unit = HALF_BYTES_UNIT.value / 16**second if code == "int4" else SMALL_FLOATS_UNIT.value
            results = [struct.unpack("<f", struct.pack("<I", found[f"${at}"]))[0] for at in range(sums)]
            assert results.pop(second) * unit == 256 * numbers[number]
            assert not any(results)


@pytest.mark.parametrize(("sums", "assembly"), [(1, SMALL_FLOATS.value), (2, SMALL_FLOATS_OF_HALVES.value)])
def test_random_units_in_assembly(sums: int, assembly: str) -> None:
    """All numbers of a unit at once, beside float64."""
    generator = random.Random(2)
    for _ in range(20):
        codes = [generator.randrange(16) for _ in range(32)]
        values = [struct.unpack("<e", struct.pack("<e", generator.gauss(0, 4096)))[0] for _ in range(32)]
        known = {"%nctaid.y": 1}
        for word in range(4):
            known[f"${sums + word}"] = sum(codes[8 * word + at] << 4 * at for at in range(8))
            for pair in range(4):
                two = struct.pack("<ee", values[8 * word + pair], values[8 * word + pair + 4])
                known[f"${sums + 4 + 4 * word + pair}"] = struct.unpack("<I", two)[0]
        found = run_assembly(assembly, known)
        products = [E2M1[code] * value for code, value in zip(codes, values, strict=True)]
        size = sum(abs(product) for product in products)
        for at, run in enumerate((products[:16], products[16:]) if sums == 2 else (products,)):
            result = struct.unpack("<f", struct.pack("<I", found[f"${at}"]))[0] * SMALL_FLOATS_UNIT.value
            assert abs(result - sum(run)) < size * 2**-11


def test_two_scales_in_assembly() -> None:
    """The first byte of each pair is the first half's."""
    for bits in range(0x7F):
        found = run_assembly(TWO_SCALES.value, {"$2": bits | 0x38 << 8})
        one, other = (struct.unpack("<f", struct.pack("<I", found[name]))[0] for name in ("$0", "$1"))
        assert one == float(torch.tensor(bits, dtype=torch.uint8).view(torch.float8_e4m3fn).float())
        assert other == 1


@pytest.mark.parametrize("scale", ["int8", "exponents"])
def test_other_scales_of_units(device: torch.device, scale: str) -> None:
    """Two scales of a unit as cards without e4m3 read them, and two exponents."""
    made = make_packed("nvfp4", 10, 512)
    packed, plain = made.packed, made.plain
    assert packed.scale is not None
    if scale == "int8":
        packed = packed._replace(scale=packed.scale.view(torch.int8))
    else:
        exponents = torch.randint(120, 130, packed.scale.shape, generator=torch.Generator().manual_seed(4))
        by = 2.0 ** (exponents - 127) / packed.scale.double()
        packed, plain = packed._replace(scale=exponents.to(torch.uint8)), plain * by.repeat_interleave(16, 1)
    x = torch.randn(1, 512, generator=torch.Generator().manual_seed(5)).to(device)
    out = resident_row(x, to_device(packed, device), None, SHAPE)
    assert relative_error(out, x.double() @ plain.to(device).T) < 1e-3


def test_what_is_around_a_row_follows_the_choice() -> None:
    """Gate and up are two tiles of half the outputs; a kernel that does nothing around a product is not asked to."""
    assert row_shape(ResidentShape(4, 4, 4), "int4", False) == ResidentShape(4, 4, 4)
    assert row_shape(ResidentShape(4, 4, 4), "int4", True) == ResidentShape(2, 4, 4)
    assert row_shape(MatvecShape(4, 2048, 4), "e4m3", True) == MatvecShape(2, 2048, 4)
    assert row_shape(MatmulShape(8, 64, 128, 4, 4), "e4m3", True) == ONE_ROW._replace(outputs=4)
