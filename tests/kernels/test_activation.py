"""The gated activation beside float64."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from kvern.kernels.activation import ACTIVATIONS, gated_activation
from tests.kernels.test_norm import relative_error

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
