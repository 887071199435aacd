"""Norm kernels beside float64."""

import pytest
import torch

from kvern.kernels.arrange import arrange
from kvern.kernels.norm import add_rms_norm, rms_norm


def reference(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight.double()


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(("rows", "width"), [(1, 64), (5, 1000), (3, 2048)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rms_norm(device: torch.device, rows: int, width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, width + 8, generator=generator).to(dtype).to(device)[:, :width]
    weight = torch.randn(width, generator=generator).to(device)
    out = rms_norm(x, weight, 1e-6)
    assert relative_error(out, reference(x, weight, 1e-6)) < (1e-6 if dtype is torch.float32 else 1e-3)


def test_rms_norm_in_lanes(device: torch.device) -> None:
    x, weight = torch.randn(3, 384, device=device), torch.randn(384, device=device)
    assert torch.equal(rms_norm(x, weight, 1e-6, lanes=True), arrange(rms_norm(x, weight, 1e-6), None, "lanes"))


def test_add_rms_norm_changes_the_residual_in_place(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(2)
    x, update = torch.randn(2, 7, 96, generator=generator).to(device)
    weight = torch.randn(96, generator=generator).to(device)
    total = x.double() + update.double()
    out = add_rms_norm(x, update, weight, 1e-5)
    assert relative_error(x, total) < 1e-6
    assert relative_error(out, reference(total, weight, 1e-5)) < 1e-6
