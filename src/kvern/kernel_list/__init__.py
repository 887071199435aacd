"""Kernels and their inputs, for `kvern bench kernels`, tests beside float64, and the compilation for other cards."""

from kvern.kernel_list import (
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
    rounding,
    texts,
)
from kvern.kernel_list.entry import Call, Inputs, Kernel
from kvern.kernels.groups import ENCODER_GROUPS
from kvern.spec.model import ModelSpec

__all__ = ["KERNELS", "Call", "Inputs", "Kernel", "kernels_of"]

KERNELS: tuple[Kernel, ...] = (
    *dense.KERNELS,
    *quantized.KERNELS,
    *codes.KERNELS,
    *rounding.KERNELS,
    *batch.KERNELS,
    *attention.KERNELS,
    *latent.KERNELS,
    *convolution.KERNELS,
    *delta_net.KERNELS,
    *mamba2.KERNELS,
    *experts.KERNELS,
    *packed_experts.KERNELS,
    *hopper.KERNELS,
    *packed_hopper.KERNELS,
    *texts.KERNELS,
)


def kernels_of(spec: ModelSpec) -> tuple[Kernel, ...]:
    """Those that a model may launch."""
    return tuple(kernel for kernel in KERNELS if spec.encoder is None or kernel.group in ENCODER_GROUPS)
