"""The product of one row that stays in registers, beside float64, and its assembly's instructions."""

import os
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from kvern.formats.gpu.candidates import ONE_ROW, row_shape
from kvern.kernels.linear import NOTHING, Around, MatmulShape, MatvecShape
from kvern.kernels.resident_row import ResidentShape, keeps_row, resident_row
from tests.kernels.packed_weights import make_packed, to_device
from tests.support.kernels.references import relative_error
from tests.support.kernels.references import rms_norm_reference as rms_norm

KINDS = ("e4m3 row", "e4m3 blocks", "int4", "int4 zero", "int4 g32", "gguf q4_k")
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


def test_what_is_around_a_row_follows_the_choice() -> None:
    """Gate and up are two tiles of half the outputs; a kernel that does nothing around a product is not asked to."""
    assert row_shape(ResidentShape(4, 4, 4), "int4", False) == ResidentShape(4, 4, 4)
    assert row_shape(ResidentShape(4, 4, 4), "int4", True) == ResidentShape(2, 4, 4)
    assert row_shape(MatvecShape(4, 2048, 4), "e4m3", True) == MatvecShape(2, 2048, 4)
    assert row_shape(MatmulShape(8, 64, 128, 4, 4), "e4m3", True) == ONE_ROW._replace(outputs=4)
