"""The kernels that encoders launch, beside PyTorch in float64."""

from collections.abc import Iterator

import pytest
import torch

from kvern.spec.mixers import AttentionSpec
from kvern.spec.model import ModelSpec
from tests.kernels.models import LARGE_ENCODERS, TINY_ENCODERS, spec_of
from tests.support.kernel_list import Call, Inputs, kernels_of


def launched_calls(spec: ModelSpec, inputs: Inputs) -> Iterator[Call]:
    for kernel in kernels_of(spec):
        for arguments in kernel.launched(spec, inputs):
            yield kernel.make(spec, inputs, *arguments)


LAUNCHES = [
    call.launch
    for name in LARGE_ENCODERS
    for dtype in (torch.bfloat16, torch.float32)
    for call in launched_calls(spec_of(name, LARGE_ENCODERS), Inputs(torch.device("cpu"), dtype, "empty"))
]


@pytest.mark.sample(1)
@pytest.mark.parametrize("model", TINY_ENCODERS)
def test_what_a_kernel_returns(model: str, device: torch.device) -> None:
    spec, inputs = spec_of(model, TINY_ENCODERS), Inputs(device, torch.float32, block_size=4)
    for call in launched_calls(spec, inputs):
        expected = call.reference()
        found = call.launch()
        pairs = [(found, expected)] if isinstance(found, torch.Tensor) else zip(found, expected, strict=True)
        for one, other in pairs:
            torch.testing.assert_close(one.double(), other.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("window", "causal"), [(None, False), (1, False), (33, False), (64, False), (None, True)])
def test_what_tokens_see(window: int | None, causal: bool, device: torch.device) -> None:
    """Of texts that end at borders of tiles and beside them."""
    spec, inputs = spec_of("bert", TINY_ENCODERS), Inputs(device, torch.float32)
    kernel = next(kernel for kernel in kernels_of(spec) if kernel.name == "attention within texts")
    attention = AttentionSpec(1, 1, 16, 0.25, window=window, causal=causal)
    call = kernel.make(spec, inputs, attention, (33, 1, 64, 97, 200))
    expected = call.reference()
    torch.testing.assert_close(call.launch().double(), expected, rtol=1e-4, atol=1e-4)
