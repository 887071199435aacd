"""Products with quantized weights of every code, beside float64 products with the numbers that they stand for."""

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kvern.kernels.arrange import arrange
from kvern.kernels.codes import INTERLEAVED
from kvern.kernels.linear import Around, MatmulShape, MatvecShape
from kvern.kernels.packed_product import packed_product, packed_row
from kvern.kernels.scaled_product import scaled_product
from tests.kernels.packed_weights import KINDS, LARGE_BLOCKS, make_packed, to_device
from tests.support.kernels.references import relative_error
from tests.support.kernels.references import rms_norm_reference as rms_norm

ROW = MatvecShape(4, 256, 4)
ENDINGS = ("", "gated", "residual")
CUTS = ((9, 448, 2), (3, 256, 1))


def _in_turn(cases: Sequence[Any]) -> list[Any]:
    """Every kind with one of the cases by day, the next kind with the next one; and with the others at night."""
    return [
        pytest.param(kind, case, marks=[] if at % len(cases) == index else pytest.mark.nightly, id=f"{kind}-{case}")
        for at, kind in enumerate(KINDS)
        for index, case in enumerate(cases)
    ]


def _launches() -> Iterator[Callable[[], object]]:
    """For compilation: each kind in one product of one row and one of several."""
    x = torch.empty(64, 1024, dtype=torch.bfloat16)
    cuts = (MatmulShape(8, 64, 128, 4, 4, 2), MatmulShape(64, 64, 128, 4, 4), MatmulShape(128, 128, 64, 8, 3))
    for kind, cut in zip(KINDS, itertools.cycle(cuts), strict=False):
        packed = make_packed(kind, 256, 1024, group=128).packed
        yield partial(packed_row, x[:1], packed, None, MatvecShape(8, 2048, 4), Around(x[0], 1e-5, "silu"))
        yield partial(packed_product, x, packed, None, cut, torch.empty(64, dtype=torch.int32))


LAUNCHES = [*_launches()] if os.environ.get("TRITON_INTERPRET") != "1" else []


@pytest.mark.parametrize(("kind", "ending"), _in_turn(ENDINGS))
def test_one_row(device: torch.device, kind: str, ending: str) -> None:
    inputs, outputs = (512, 14) if ending == "gated" else (768 if kind in LARGE_BLOCKS else 448, 22)
    generator = torch.Generator().manual_seed(3)
    made = make_packed(kind, outputs, inputs)
    x = torch.randn(1, inputs, generator=generator).half().to(device)
    bias = torch.randn(outputs, generator=generator).half().to(device) if ending != "residual" else None
    gain = torch.randn(inputs, generator=generator).to(device) if ending == "gated" else None
    residual = torch.randn(1, outputs, generator=generator).half().to(device) if ending == "residual" else None
    expected = x.double() if gain is None else rms_norm(x, gain, 1e-5)
    expected = expected @ made.plain.to(device).T + (0 if bias is None else bias.double())
    if ending == "gated":
        gate, up = expected.chunk(2, -1)
        expected = F.silu(gate) * up
    if residual is not None:
        expected = expected + residual.double()
    around = Around(gain, 1e-5, "silu" if ending == "gated" else None, residual)
    row = ROW._replace(inputs=512) if inputs == 768 else ROW
    out = packed_row(x, to_device(made.packed, device), bias, row, around)
    assert relative_error(out, expected) < 1e-3
    assert residual is None or out is residual


@pytest.mark.parametrize(("kind", "cut"), _in_turn(CUTS))
def test_several_rows(device: torch.device, kind: str, cut: tuple[int, int, int]) -> None:
    rows, inputs, splits = cut
    generator = torch.Generator().manual_seed(rows)
    step, inputs = (512, 768) if inputs == 448 and kind in LARGE_BLOCKS else (128, inputs)
    order = splits > 1 and kind.startswith("int4")
    made = make_packed(kind, 40, inputs, order=order)
    packed = to_device(made.packed, device)
    x = torch.randn(rows, inputs + 16, generator=generator).half().to(device)[:, :inputs]
    bias = torch.randn(40, generator=generator).half().to(device)
    arranged = arrange(x, packed.order, "planes") if packed.code in INTERLEAVED else x
    arrived = torch.zeros(8, dtype=torch.int32, device=device)
    shape = MatmulShape(16, 32, step, 4, 3, splits)
    out = packed_product(arranged, packed, bias, shape, arrived)
    assert relative_error(out, x.double() @ made.plain.to(device).T + bias.double()) < 1e-3
    assert not arrived.any()
    again = packed_product(arranged[-1:], packed, bias, shape, arrived)
    assert torch.equal(again[0], out[-1])


@pytest.mark.parametrize("kind", ["e4m3 row", "e4m3 blocks", "int8 row", "int8 group"])
@pytest.mark.parametrize("groups", [1, 4])
def test_codes_with_codes(device: torch.device, kind: str, groups: int) -> None:
    rows, outputs, inputs = 37, 150, 512
    made = make_packed(kind, outputs, inputs, group=128)
    packed = to_device(made.packed, device)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, inputs, generator=generator) * 20
    x = (x.round().to(torch.int8) if kind.startswith("int8") else x.to(torch.float8_e4m3fn)).to(device)
    scale = (torch.rand(rows, groups, generator=generator) + 0.5).to(device)
    bias = torch.randn(outputs, generator=generator).to(device)
    plain = x.double() * scale.double().repeat_interleave(inputs // groups, 1)
    out = scaled_product(x, scale, packed, bias, MatmulShape(32, 64, 128, 4, 3), torch.float32)
    assert relative_error(out, plain @ made.plain.to(device).T + bias.double()) < 1e-5
