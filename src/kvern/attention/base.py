"""What an attention backend is: owner of the KV cache, and the attention of every layer over it."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from kvern.cache.manager import BlockCopy
from kvern.worker.input_batch import InputBatch

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, query [T, heads, dim], key [T, kv_heads, dim], value [T, kv_heads, dim]) -> [T, heads, dim]."""


class AttentionBackend(Protocol):
    """Keeps keys and values in blocks, layout [2, blocks, block_size, kv_heads, head_dim] per layer."""

    def plan(self, batch: InputBatch) -> Attend:
        """Prepare one step. The result writes a layer's keys and values to the cache, then attends causally."""
        ...

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy the heads of blocks in every layer, in order."""
        ...
