"""Speed of each kernel on this GPU for a model's shapes, compared with the card's limits."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from kvern.device.timing import time_calls
from kvern.kernel_list import Call, Inputs, kernels_of
from kvern.kernel_list.entry import PackedKind
from kvern.spec.model import ModelSpec

ROTATED_BYTES = 256 << 20
"""Inputs are taken in turn from so much memory, so that none is still in the L2 cache."""


@dataclass(frozen=True)
class Measured:
    """The duration of a kernel's call in seconds."""

    kernel: str
    call: Call
    seconds: float

    @property
    def terabytes_per_second(self) -> float:
        return self.call.bytes / self.seconds / 1e12

    @property
    def teraflops(self) -> float:
        return self.call.operations / self.seconds / 1e12


def measure(kernel: str, make: Callable[[], Call]) -> Measured:
    """Times the calls that `make` returns over inputs that rotate through memory."""
    calls = [make()]
    copies = max(1, min(16, int(ROTATED_BYTES // max(calls[0].bytes, 1))))
    calls += [make() for _ in range(copies - 1)]
    launches = [call.launch for call in calls]
    while len(launches) < 8:
        launches += launches
    return Measured(kernel, calls[0], time_calls(launches))


def ceilings(device: torch.device) -> tuple[float, float]:
    """Measures the card's memory bandwidth in TB/s and its bfloat16 matrix products in TFLOP/s."""
    size = 8192
    numbers = torch.empty(1 << 30, dtype=torch.float32, device=device).normal_()
    read = time_calls([lambda: numbers.sum()] * 4)
    a, b = (torch.empty(size, size, dtype=torch.bfloat16, device=device).normal_() for _ in range(2))
    multiply = time_calls([lambda: a @ b] * 4)
    return numbers.numel() * 4 / read / 1e12, 2 * size**3 / multiply / 1e12


def measured_calls(
    spec: ModelSpec, device: torch.device, packed: Sequence[PackedKind] = (), dtype: torch.dtype = torch.bfloat16
) -> Iterator[Measured]:
    """Times the kernels of a decode step and of a prefill step on the shapes of the model's first layer.

    `packed` are the matrices that are stored quantized.
    """
    inputs = Inputs(device, dtype, packed=packed)
    for kernel in kernels_of(spec):
        for arguments in kernel.timed(spec, inputs):
            yield measure(kernel.name, partial(kernel.make, spec, inputs, *arguments))
