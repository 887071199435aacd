"""The memory of keys and values."""

from collections.abc import Sequence

import torch

from kvern.cpu.large_pages import zeros
from kvern.mixer_spec import AttentionSpec

CPU = torch.device("cpu")


def zero_cache(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, not garbage: a masked key has weight 0, and 0 * NaN would be NaN.

    On the CPU memory is taken when it is used.
    """
    return zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)


def zero_caches(
    layers: Sequence[AttentionSpec],
    owners: Sequence[int],
    blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device = CPU,
) -> list[torch.Tensor]:
    """`zero_cache` for each place in a block, of which the first layer that has it is given."""
    owning = [layers[owner] for owner in owners]
    shapes = [(layer.stored, blocks, block_size, layer.kv_heads, layer.head_dim) for layer in owning]
    return [zero_cache(shape, dtype, device) for shape in shapes]
