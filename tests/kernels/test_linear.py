"""Products of few rows, and what is fused around them, beside float64."""

import pytest
import torch
import torch.nn.functional as F

from kvern.kernels.linear import Around, MatmulShape, MatvecShape, matvec, small_matmul
from tests.support.kernels.references import relative_error
from tests.support.kernels.references import rms_norm_reference as rms_norm

MATVEC = MatvecShape(4, 512, 4)
SMALL = MatmulShape(16, 32, 128, 4, 4)


@pytest.mark.parametrize(("inputs", "outputs", "biased"), [(64, 14, False), (1000, 34, True)])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("ending", ["", "gated", "residual"])
def test_matvec(device: torch.device, inputs: int, outputs: int, biased: bool, norm: bool, ending: str) -> None:
    generator = torch.Generator().manual_seed(inputs)
    x = torch.randn(1, inputs, generator=generator).to(device)
    weight = (torch.randn(outputs, inputs, generator=generator) / inputs**0.5).to(device)
    bias = torch.randn(outputs, generator=generator).to(device) if biased else None
    gain = torch.randn(inputs, generator=generator).to(device) if norm else None
    residual = torch.randn(1, outputs, generator=generator).to(device) if ending == "residual" else None
    expected = x.double() if gain is None else rms_norm(x, gain, 1e-5)
    expected = expected @ weight.double().T + (0 if bias is None else bias.double())
    if ending == "gated":
        gate, up = expected.chunk(2, -1)
        expected = F.silu(gate) * up
    if residual is not None:
        expected = expected + residual.double()
    around = Around(gain, 1e-5, "silu" if ending == "gated" else None, residual)
    out = matvec(x, weight, bias, MATVEC, around)
    assert relative_error(out, expected) < 1e-5
    assert residual is None or out is residual


@pytest.mark.parametrize("rows", [1, 16, 37])
@pytest.mark.parametrize(("inputs", "biased"), [(256, False), (200, True), (100, False)])
def test_small_matmul_and_a_row_does_not_depend_on_the_others(
    device: torch.device, rows: int, inputs: int, biased: bool
) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, inputs + 16, generator=generator).half().to(device)[:, :inputs]
    weight = torch.randn(40, inputs, generator=generator).half().to(device)
    bias = torch.randn(40, generator=generator).half().to(device) if biased else None
    out = small_matmul(x, weight, bias, SMALL)
    assert relative_error(out, x.double() @ weight.double().T + (0 if bias is None else bias.double())) < 1e-3
    assert torch.equal(small_matmul(x[-1:], weight, bias, SMALL)[0], out[-1])


@pytest.mark.parametrize(("rows", "inputs", "splits"), [(3, 256, 2), (8, 200, 2), (19, 640, 4), (1, 60, 2)])
def test_small_matmul_with_split_inputs(device: torch.device, rows: int, inputs: int, splits: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, inputs, generator=generator).half().to(device)
    weight = torch.randn(40, inputs, generator=generator).half().to(device)
    bias = torch.randn(40, generator=generator).half().to(device)
    arrived = torch.zeros(8, dtype=torch.int32, device=device)
    out = small_matmul(x, weight, bias, MatmulShape(8, 32, 64, 4, 3, splits), arrived)
    assert relative_error(out, x.double() @ weight.double().T + bias.double()) < 1e-3
    assert not arrived.any()
