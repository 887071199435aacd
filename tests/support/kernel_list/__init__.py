"""Kernels and their inputs, for tests beside float64 and the compilation for other cards."""

from kvern.kernels.groups import ENCODER_GROUPS
from kvern.spec.model import ModelSpec
from tests.support.kernel_list import (
    attention,
    batch,
    codes,
    convolution,
    delta_net,
    dense,
    experts,
    hopper,
    latent,
    mamba2,
    packed_experts,
    packed_hopper,
    quantized,
    ranks,
    rounding,
    rows,
    texts,
)
from tests.support.kernel_list.entry import Call, Inputs, Kernel

__all__ = ["KERNELS", "Call", "Inputs", "Kernel", "kernels_of"]

MODULES = (
    dense,
    quantized,
    codes,
    rounding,
    batch,
    attention,
    latent,
    convolution,
    delta_net,
    mamba2,
    experts,
    packed_experts,
    hopper,
    packed_hopper,
    texts,
    rows,
    ranks,
)
KERNELS: tuple[Kernel, ...] = tuple(kernel for module in MODULES for kernel in module.KERNELS)


def kernels_of(spec: ModelSpec) -> tuple[Kernel, ...]:
    """The kernels that a model may launch."""
    return tuple(kernel for kernel in KERNELS if spec.encoder is None or kernel.group in ENCODER_GROUPS)
