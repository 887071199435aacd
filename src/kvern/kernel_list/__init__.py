"""All kernels. The check at an engine's start, the benchmark, tests and cross-compilation walk this list."""

from kvern.kernel_list import (
    attention,
    batch,
    codes,
    convolution,
    delta_net,
    dense,
    experts,
    hopper,
    mamba2,
    packed_experts,
    packed_hopper,
    quantized,
    rounding,
)
from kvern.kernel_list.entry import Call, Inputs, Kernel

__all__ = ["KERNELS", "Call", "Inputs", "Kernel"]

KERNELS: tuple[Kernel, ...] = (
    *dense.KERNELS,
    *quantized.KERNELS,
    *codes.KERNELS,
    *rounding.KERNELS,
    *batch.KERNELS,
    *attention.KERNELS,
    *convolution.KERNELS,
    *delta_net.KERNELS,
    *mamba2.KERNELS,
    *experts.KERNELS,
    *packed_experts.KERNELS,
    *hopper.KERNELS,
    *packed_hopper.KERNELS,
)
