"""The gated activation beside float64."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from kvern.kernels import quantize_rows as rounding_kernels
from kvern.kernels.activation import ACTIVATIONS, coded_gated_activation, gated_activation
from tests.support.kernels.references import CODINGS, codings, relative_error

REFERENCES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("tokens", "width"), [(1, 48), (5, 1100)])
def test_gated_activation(device: torch.device, activation: str, tokens: int, width: int) -> None:
    x = (3 * torch.randn(tokens, 2 * width, generator=torch.Generator().manual_seed(tokens))).to(device)
    gate, up = x.double().chunk(2, -1)
    assert relative_error(gated_activation(x, activation), REFERENCES[activation](gate) * up) < 1e-6


@pytest.mark.parametrize("name", CODINGS)
@pytest.mark.parametrize(("activation", "tokens", "width", "block"), [("silu", 3, 1100, 2048), ("gelu", 2, 96, 64)])
def test_codes_of_an_activation_are_those_of_its_numbers(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    activation: str,
    tokens: int,
    width: int,
    block: int,
) -> None:
    """Of rows that a program holds, and of longer ones."""
    monkeypatch.setattr(rounding_kernels, "BLOCK", block)
    coding, dtype = codings(device)[name], torch.float16 if device.type == "cpu" else torch.bfloat16
    x = (3 * torch.randn(tokens, 2 * width, generator=torch.Generator().manual_seed(tokens))).to(device, dtype)
    x[-1] = 0
    expected = coding(gated_activation(x, activation))
    torch.full((3 * tokens * width,), float("nan"), device=device)
    found = coded_gated_activation(x, activation, coding)
    assert torch.equal(found.codes.view(torch.int8), expected.codes.view(torch.int8))
    assert torch.equal(found.scales, expected.scales)
