"""Memory of GPUs that several models share: what there is, and how much of it each may take.

Every model counts on every card alike, also one that runs on some of them. A model that names no `gpu_memory_share`
gets room for its weights and for steps, and for its KV cache a part of what is left that is as large as its weights'
part of all; if they have no room beside each other, a quarter of its weights. Once it is loaded it counts with what it
always has: of its cache one sequence. The rest is spare, and the caches of models that are awake agree on it.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvern.errors import ConfigError
from kvern.residency.pressure import LEAST_FREE, HostMemory, host_memory

if TYPE_CHECKING:
    import pynvml

logger = logging.getLogger("kvern")

USABLE = 0.97
"""The share of free memory that models may take by themselves; the driver and fragments have the rest."""
STEPS_BYTES = 2 << 30
STEPS_SHARE = 0.1
"""Memory beside weights and KV cache: the CUDA context, a margin, activations and graphs, larger for larger models."""
LEAST_CACHE_BYTES = 1 << 30
CACHE_SHARE = 0.25
"""The least KV cache of a model, as a share of its weights."""
AROUND_FREE = 1 << 30
"""The most bytes of the machine's memory that shall stay free."""
LATER_BYTES, LATER_SHARE = 512 << 20, 0.05
"""The bytes, and the part of its share, that a model leaves free or takes later than at its start."""
UNKNOWN_BYTES = 16 << 30
"""An estimate of the weights of a model that is not on this machine yet."""


@dataclass(frozen=True)
class GpuMemory:
    """Bytes of the smallest GPU that models use, and how many of them models may take."""

    total: int
    usable: int
    names: tuple[str, ...] = field(default=(), compare=False)
    """The GPUs, as in CUDA_VISIBLE_DEVICES."""


class CardMemory(HostMemory):
    """The memory that the fullest of some GPUs has left. What engines take in steps they hold already."""

    @property
    def floor(self) -> int:
        """The bytes that shall stay free."""
        return LEAST_FREE


class MemoryAround(HostMemory):
    """The memory of the machine around some GPUs, where copies of weights lie, and pages of tiers."""

    @property
    def floor(self) -> int:
        """The bytes that shall stay free: engines copy weights there while twice as much is."""
        return min(super().floor, AROUND_FREE)


def memory_around() -> MemoryAround | None:
    """Reads what memory is free around the GPUs; None where the system does not tell it."""
    found = host_memory()
    return None if found is None else MemoryAround(found.free, found.total, found.stalled)


def card_memory(names: Sequence[str]) -> CardMemory | None:
    """Reads what memory is free; None if the driver does not tell it now."""
    import pynvml

    try:
        found = _memory_of(names)
    except pynvml.NVMLError:
        return None
    least = min(found, key=lambda each: each.free, default=None)
    return None if least is None else CardMemory(int(least.free), int(least.total))


def gpu_memory(names: Sequence[str], *, is_shared_out: bool = False) -> GpuMemory:
    """Returns the memory of GPUs by their names in CUDA_VISIBLE_DEVICES.

    `is_shared_out`: the user has said of every model what it may take, margins included; if nobody else is on the cards
    that is all there is. Raises ConfigError if the driver does not tell it.
    """
    import pynvml

    try:
        found = _memory_of(names)
    except pynvml.NVMLError as error:
        raise ConfigError(f"the driver does not tell the memory of GPUs {', '.join(names)}: {error}") from error
    if len(found) < len(names):
        raise ConfigError(f"the driver knows {len(found)} of the GPUs {', '.join(names)}: set CUDA_VISIBLE_DEVICES")
    total, free = min(each.total for each in found), min(each.free for each in found)
    if free < USABLE * total:
        held = (total - free) / 1e9
        logger.warning("other programs hold %.1f of %.1f GB of a GPU that models share", held, total / 1e9)
        is_shared_out = False
    return GpuMemory(total, total if is_shared_out else int(USABLE * free), tuple(names))


def _memory_of(names: Sequence[str]) -> "list[pynvml.c_nvmlMemory_t]":
    """Returns what the driver tells of GPUs, as far as it knows them. Raises NVMLError."""
    import pynvml

    pynvml.nvmlInit()
    every = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
    uuids = [pynvml.nvmlDeviceGetUUID(handle) for handle in every]
    return [
        pynvml.nvmlDeviceGetMemoryInfo(handle)
        for name in names
        for number, (handle, uuid) in enumerate(zip(every, uuids, strict=True))
        if (number == int(name) if name.isdecimal() else uuid.startswith(name))
    ]


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
    """Returns the share of a model with so many bytes of weights, 0 if that is not known, beside those of others."""
    return _share(size or UNKNOWN_BYTES, 0, memory)


def _fixed(size: int) -> int:
    """Returns the bytes of weights of this size, and of steps."""
    return size + STEPS_BYTES + int(STEPS_SHARE * size)


def _share(size: int, cache: int, memory: GpuMemory) -> float:
    cache = max(cache, int(CACHE_SHARE * size), LEAST_CACHE_BYTES)
    return min(memory.usable, _fixed(size) + cache) / memory.total
