"""Memory of GPUs that several models share: what there is, and how much of it each may take.

Every model counts on every card alike, also one that runs on some of them. A model that names no `gpu_memory_share`
gets room for its weights and for steps, and for its KV cache a part of what is left that is as large as its weights'
part of all; if all together have no room, a quarter of its weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvern.errors import ConfigError

USABLE = 0.97
"""The share of free memory that models may take by themselves; the driver and fragments have the rest."""
STEPS_BYTES = 2 << 30
STEPS_SHARE = 0.1
"""Memory beside weights and KV cache: the CUDA context, a margin, activations and graphs, larger for larger models."""
LEAST_CACHE_BYTES = 1 << 30
CACHE_SHARE = 0.25
"""The least KV cache of a model, as a share of its weights."""
UNKNOWN_BYTES = 16 << 30
"""An estimate of the weights of a model that is not on this machine yet."""


@dataclass(frozen=True)
class GpuMemory:
    """Bytes of the smallest GPU that this process sees, and how many of them are free."""

    total: int
    free: int

    @property
    def usable(self) -> int:
        """Bytes that models may take."""
        return int(USABLE * self.free)


def gpu_memory(names: Sequence[str]) -> GpuMemory:
    """Returns the memory of GPUs by their names in CUDA_VISIBLE_DEVICES. Raises ConfigError if there is none."""
    if not names:
        raise ConfigError("device is cuda, and this process sees no GPU: set CUDA_VISIBLE_DEVICES, or device cpu")
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [
            pynvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else pynvml.nvmlDeviceGetHandleByUUID(name)
            for name in names
        ]
        found = [pynvml.nvmlDeviceGetMemoryInfo(handle) for handle in handles]
    except pynvml.NVMLError as error:
        raise ConfigError(f"the driver does not tell the memory of GPUs {', '.join(names)}: {error}") from error
    return GpuMemory(min(each.total for each in found), min(each.free for each in found))


def shares(weights: Sequence[int], memory: GpuMemory) -> list[float]:
    """Returns the shares of a card that models with so many bytes of weights on it may take; 0: it is not known."""
    sizes = [size or UNKNOWN_BYTES for size in weights]
    fixed = [size + STEPS_BYTES + int(STEPS_SHARE * size) for size in sizes]
    left = max(0, memory.usable - sum(fixed))
    caches = [max(left * size // sum(sizes), int(CACHE_SHARE * size), LEAST_CACHE_BYTES) for size in sizes]
    return [min(1.0, (one + cache) / memory.total) for one, cache in zip(fixed, caches, strict=True)]
