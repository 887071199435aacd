"""Programmatic dependent launch: a kernel starts while the one before it ends.

On NVIDIA GPUs from compute capability 9.0 on, a kernel may be launched before its predecessor has finished. It fetches
what the predecessor does not write (weights), then waits. So the gap between two launches, and the slow first fetch of
each, disappear. Every kernel launched so must wait before it reads or writes anything else.
"""

import functools
import os

import torch
import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


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
