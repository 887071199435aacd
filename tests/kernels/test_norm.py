"""Norm kernels beside float64."""

import pytest
import torch

from kvern.kernels.norm import add_any_norm, add_rms_norm, coded_rms_norm, rms_norm
from tests.support.kernels.references import CODINGS, codings, relative_error, rms_norm_reference


@pytest.mark.parametrize(("rows", "width"), [(1, 64), (5, 1000), (3, 2048)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rms_norm(device: torch.device, rows: int, width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, width + 8, generator=generator).to(dtype).to(device)[:, :width]
    weight = torch.randn(width, generator=generator).to(device)
    out = rms_norm(x, weight, 1e-6)
    assert relative_error(out, rms_norm_reference(x, weight, 1e-6)) < (1e-6 if dtype is torch.float32 else 1e-3)


def test_add_rms_norm_changes_the_residual_in_place(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(2)
    x, update = torch.randn(2, 7, 96, generator=generator).to(device)
    weight = torch.randn(96, generator=generator).to(device)
    total = x.double() + update.double()
    out = add_rms_norm(x, update, weight, 1e-5)
    assert relative_error(x, total) < 1e-6
    assert relative_error(out, rms_norm_reference(total, weight, 1e-5)) < 1e-6


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("rows", "width", "add", "scaled"), [(1, 64, False, True), (5, 1000, True, True), (3, 72, True, False)]
)
def test_any_norm(
    device: torch.device, rows: int, width: int, add: int, scaled: int, dtype: torch.dtype, kind: str
) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, update = (torch.randn(2, rows, width, generator=generator) + 3).to(dtype).to(device)
    weight, bias = torch.randn(2, width, generator=generator).to(device) if scaled else (None, None)
    total = (x + update if add else x).double()
    centred = total - total.mean(-1, keepdim=True) if kind == "layer" else total
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    expected = expected if weight is None or bias is None else expected * weight + bias
    torch.full((3 * rows * width,), float("nan"), device=device)
    out = add_any_norm(x, update if add else None, weight, bias, 1e-6, kind)
    assert torch.equal(x.double(), total)
    assert relative_error(out, expected) < (1e-6 if dtype is torch.float32 else 1e-3)


@pytest.mark.parametrize("name", CODINGS)
@pytest.mark.parametrize(("rows", "width", "add"), [(3, 96, True), (2, 1000, False), (1, 24, False)])
def test_codes_of_a_norm_are_those_of_its_numbers(
    device: torch.device, name: str, rows: int, width: int, add: bool
) -> None:
    coding, dtype = codings(device)[name], torch.float16 if device.type == "cpu" else torch.bfloat16
    x, update = torch.randn(2, rows, width + 8, device=device).to(dtype)[:, :, :width]
    update, weight = update.contiguous(), torch.randn(width, device=device).to(dtype)
    x[-1], update[-1] = 0, 0
    other = x.clone()
    normal = add_rms_norm(other, update, weight, 1e-6) if add else rms_norm(other, weight, 1e-6)
    expected = coding(normal)
    torch.full((3 * rows * width,), float("nan"), device=device)
    found = coded_rms_norm(x, update if add else None, weight, 1e-6, coding)
    assert torch.equal(x, other)
    assert torch.equal(found.codes.view(torch.int8), expected.codes.view(torch.int8))
    assert torch.equal(found.scales, expected.scales) and found.scales.stride() == expected.scales.stride()
