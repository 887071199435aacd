"""How kernels are launched: with few instructions of the host, and overlapping on the device.

Programmatic dependent launch: a kernel starts while the one before it ends.

On NVIDIA GPUs from compute capability 9.0 on, a kernel may be launched before its predecessor has finished. It fetches
what the predecessor does not write (weights), then waits. So the gap between two launches, and the slow first fetch of
each, disappear. Every kernel launched so must wait before it reads or writes anything else.
"""

import functools
import os
from collections.abc import Callable, Hashable
from typing import Any

import torch
import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime.jit import JITFunction


@triton.jit
def wait_for_previous():
    """Let the next kernel start, then wait until the previous one has written everything."""
    gdc_launch_dependents()
    gdc_wait()


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Whether kernels on this device are launched so. Without a device (compiling for one) they are."""
    if device.type == "cuda":
        return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
    return os.environ.get("TRITON_INTERPRET") != "1"


def cdiv(dividend: int, divisor: int) -> int:
    """Divided and rounded up. Triton's function, which its kernels can call too, takes ten times as long."""
    return -(-dividend // divisor)


def next_power_of_2(number: int) -> int:
    """The least power of two that is not below; likewise."""
    return 1 << (number - 1).bit_length()


class Launcher:
    """A kernel that is launched as Triton's are, in half the host's time: what was compiled before is looked up first.

    Its `tl.constexpr` parameters come last, and its first argument is a tensor. Triton compiles for types, aligned
    pointers, and integers that are 1 or multiples of 16; so much of the arguments is in the key.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[tuple[Hashable, ...], Any] = {}
        self._variable = 0
        if isinstance(kernel, JITFunction):  # not the interpreter's
            constant = [parameter.is_constexpr for parameter in kernel.params]
            self._variable = constant.index(True) if True in constant else len(constant)
            assert all(constant[self._variable :]), f"{kernel} has constants before variables"

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        device = arguments[0].get_device()
        if device < 0 or not self._variable:
            self._kernel[grid](*arguments, **options)
            return
        key = [device, arguments[self._variable :], *options.items()]
        for value in arguments[: self._variable]:
            if isinstance(value, torch.Tensor):
                key.append(value.dtype if value.data_ptr() & 15 == 0 else (value.dtype,))
            elif isinstance(value, int):
                key.append((value == 1, value & 15 == 0, value >> 31))
        known = tuple(key)
        compiled = self._compiled.get(known)
        if compiled is None:
            self._compiled[known] = self._kernel[grid](*arguments, **options)
            return
        stream = torch._C._cuda_getCurrentRawStream(device)
        sizes = (*grid, 1, 1)[:3]
        compiled.run(
            *sizes, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments
        )  # no metadata and no hooks: nobody traces launches
