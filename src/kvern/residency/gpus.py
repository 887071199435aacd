"""Memory of GPUs that several models share: what there is, and how much of it each may take.

Every model counts on every card alike, also one that runs on some of them. A model that names no `gpu_memory_share`
gets room for its weights and for steps, and for its KV cache a part of what is left that is as large as its weights'
part of all; if they have no room beside each other, a quarter of its weights.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from kvern.errors import ConfigError

logger = logging.getLogger("kvern")

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
    """Bytes of the smallest GPU that models use, and how many of them models may take."""

    total: int
    usable: int


def gpu_memory(names: Sequence[str], *, is_shared_out: bool = False) -> GpuMemory:
    """Returns the memory of GPUs by their names in CUDA_VISIBLE_DEVICES.

    `is_shared_out`: the user has said of every model what it may take, margins included; if nobody else is on the cards
    that is all there is. Raises ConfigError if the driver does not tell it.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
        every = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
        uuids = [pynvml.nvmlDeviceGetUUID(handle) for handle in every]
        found = [
            pynvml.nvmlDeviceGetMemoryInfo(handle)
            for name in names
            for number, (handle, uuid) in enumerate(zip(every, uuids, strict=True))
            if (number == int(name) if name.isdecimal() else uuid.startswith(name))
        ]
    except pynvml.NVMLError as error:
        raise ConfigError(f"the driver does not tell the memory of GPUs {', '.join(names)}: {error}") from error
    if len(found) < len(names):
        raise ConfigError(f"the driver knows {len(found)} of the GPUs {', '.join(names)}: set CUDA_VISIBLE_DEVICES")
    total, free = min(each.total for each in found), min(each.free for each in found)
    if free < USABLE * total:
        held = (total - free) / 1e9
        logger.warning("other programs hold %.1f of %.1f GB of a GPU that models share", held, total / 1e9)
        is_shared_out = False
    return GpuMemory(total, total if is_shared_out else int(USABLE * free))


def shares(weights: Sequence[int], given: Sequence[float | None], memory: GpuMemory) -> list[float]:
    """Returns the shares of a card of models with so many bytes of weights on it, 0 if that is not known.

    `given`: those that the user has said.
    """
    sizes = [size or UNKNOWN_BYTES for size in weights]
    pairs = [*zip(sizes, given, strict=True)]
    fixed = [_fixed(size) if said is None else int(said * memory.total) for size, said in pairs]
    left = max(0, memory.usable - sum(fixed))
    sharing = sum(size for size, said in pairs if said is None)
    return [_share(size, left * size // sharing, memory) if said is None else said for size, said in pairs]


def share_alone(size: int, memory: GpuMemory) -> float:
    """Returns the share of a model with so many bytes of weights, beside others that have been given theirs."""
    return _share(size, 0, memory)


def _fixed(size: int) -> int:
    """Returns the bytes of weights of this size, and of steps."""
    return size + STEPS_BYTES + int(STEPS_SHARE * size)


def _share(size: int, cache: int, memory: GpuMemory) -> float:
    cache = max(cache, int(CACHE_SHARE * size), LEAST_CACHE_BYTES)
    return min(memory.usable, _fixed(size) + cache) / memory.total
