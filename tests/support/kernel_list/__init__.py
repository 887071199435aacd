"""The kernels that are compared with float64: those that are timed, and those whose speed does not count."""

from kvern.kernel_list import KERNELS as TIMED
from kvern.kernel_list.entry import Kernel
from kvern.kernels.groups import ENCODER_GROUPS
from kvern.spec.model import ModelSpec
from tests.support.kernel_list import batch, ranks

KERNELS: tuple[Kernel, ...] = (*TIMED, *batch.KERNELS, *ranks.KERNELS)


def kernels_of(spec: ModelSpec) -> tuple[Kernel, ...]:
    """The kernels that a model may launch."""
    return tuple(kernel for kernel in KERNELS if spec.encoder is None or kernel.group in ENCODER_GROUPS)
