"""The activation functions of MLPs."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from kvern.cpu.activation import KINDS, activate
from kvern.spec.model import SWIGLU_LIMIT, SWIGLU_SLOPE, Activation

if TYPE_CHECKING:
    from kvern.layers.build import Build


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": F.relu,
    "relu2": _squared_relu,
}


def _clamped_swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return (gate * SWIGLU_SLOPE).sigmoid_().mul_(gate).mul_(up + 1)


def activation_of(name: Activation, build: "Build") -> Callable[[Tensor], Tensor]:
    """An activation of `x [T, width]`."""
    if "cpu_layers" in build.kernels:
        return partial(activate, kind=KINDS[name], gated=False)
    return ACTIVATIONS[name]


def gated_activation_of(name: Activation, build: "Build") -> Callable[[Tensor], Tensor]:
    """`activation(gate) * up` of `x [T, 2 * width]`, gate and up."""
    if "cpu_layers" in build.kernels:
        return partial(activate, kind=KINDS[name], gated=True)
    if name == "clamped_swiglu":
        return _clamped_swiglu
    activation = ACTIVATIONS[name]

    def gated(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return activation(gate).mul_(up)

    return gated
