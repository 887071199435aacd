"""What a launch has to know of the card: whether kernels overlap, and how much shared memory a program may use.

On NVIDIA GPUs from compute capability 9.0 on, a kernel may be launched before its predecessor has finished
(programmatic dependent launch). It fetches what the predecessor does not write (weights), then waits. So the gap
between two launches, and the slow first fetch of each, disappear. Every kernel launched so must wait before it reads or
writes anything else.
"""

import functools
import os
from typing import Any

import torch
import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["gdc_launch_dependents", "gdc_wait", "overlaps", "stages", "wait_for_previous"]

SHARED_MEMORY = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
"""KiB that one program may use, by compute capability: of cards that are compiled for without one to ask."""
ASYNCHRONOUS = (90, 100, 103)
"""Whose products read tiles while the program goes on, so that a stage more is kept in shared memory."""


@triton.jit
def wait_for_previous():
    """Let the next kernel start, then wait until the previous one has written everything."""
    gdc_launch_dependents()
    gdc_wait()


@functools.cache
def capability(device: torch.device) -> int:
    """The compute capability as 90; without a device that of the card that is compiled for. 0: there is none."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return 10 * major + minor if torch.version.hip is None else 0
    if os.environ.get("TRITON_INTERPRET") == "1":
        return 0
    arch: int = triton.runtime.driver.active.get_current_target().arch
    return arch


def overlaps(device: torch.device) -> bool:
    """Whether kernels on this device are launched before their predecessors end."""
    return capability(device) >= 90


@functools.cache
def stages(device: torch.device, wanted: int, tile_bytes: int) -> int:
    """As many of the `wanted` stages of a loop as the card's shared memory holds; each takes `tile_bytes`."""
    known = capability(device)
    if known == 0:
        return wanted
    if device.type == "cuda":
        properties: Any = torch.cuda.get_device_properties(device)
        limit: int = properties.shared_memory_per_block_optin
    else:
        limit = SHARED_MEMORY[known] << 10
    kept = limit // tile_bytes
    return max(1, min(wanted, kept if known in ASYNCHRONOUS else kept + 1))
