"""How much memory a device has for keys and values."""

import logging
import os
from pathlib import Path

import torch

from kvern.model_spec import ModelSpec
from kvern.worker.device import GIGABYTE

logger = logging.getLogger("kvern")

CPU_MEMORY_SHARE = 0.25
"""Of the memory that is available when the engine starts, for keys and values."""
CPU_CACHE_BYTES = 1 << 30
CPU_CACHE_TOKENS = 32768
"""A CPU's cache is no larger than the larger of these two: beyond, it seldom helps."""
GPU_MEMORY_SHARE = 0.85
"""Of what is free, where nobody measured what steps take."""
OTHERS_BYTES = 2 << 30
"""Memory beside ours that is worth a word: the CUDA context itself takes half a gigabyte."""
MARGIN_BYTES = 512 << 20
MARGIN_SHARE = 0.02
"""Of the card's memory: kept free beside weights, activations and KV cache, for CUDA graphs and fragments."""


def bytes_of_token(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes of a token's keys and values over all layers."""
    return sum(2 * layer.attention.kv_heads * layer.attention.head_dim for layer in spec.layers) * dtype.itemsize


def cache_bytes(device: torch.device, token_bytes: int, activations: int | None = None) -> int:
    """Bytes that keys and values may take of the memory that is free.

    `activations`: bytes that a GPU's steps take besides; None: not measured.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        if activations is None:
            return int(free * GPU_MEMORY_SHARE)
        return max(0, free - activations - MARGIN_BYTES - int(MARGIN_SHARE * total))
    return min(int(available_memory() * CPU_MEMORY_SHARE), max(CPU_CACHE_BYTES, CPU_CACHE_TOKENS * token_bytes))


def report_others(device: torch.device) -> None:
    """Say so if somebody else holds much of the card's memory: the KV cache is smaller for it."""
    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    if others > OTHERS_BYTES:
        logger.warning(
            "others hold %.1f of the card's %.1f GB: the KV cache takes what is left of %.1f GB",
            others / GIGABYTE,
            total / GIGABYTE,
            free / GIGABYTE,
        )


def available_memory() -> int:
    """Bytes of host memory that can be had without swapping; half of all where the system does not tell."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
