"""What an attention backend is: owner of the KV cache, and the attention of every layer over it."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch

from kvern.cache.manager import BlockCopy
from kvern.layers.attention import Attend, PagedAttend
from kvern.worker.input_batch import InputBatch

__all__ = ["Attend", "AttentionBackend", "PagedAttend", "copy_cache_blocks"]

Batch = TypeVar("Batch", bound=InputBatch, contravariant=True)


class AttentionBackend(Protocol[Batch]):
    """Keeps keys and values in blocks, layout [2, blocks, block_size, kv_heads, head_dim] per layer."""

    captures: bool
    """A planned step of decodes may be captured in a CUDA graph: it reads what it needs from the batch's tensors."""

    def plan(self, batch: Batch) -> PagedAttend:
        """Prepare one step. The result writes a layer's keys and values to the cache, then attends causally."""
        ...

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy the heads of blocks in every layer, in order."""
        ...


def copy_cache_blocks(caches: Sequence[torch.Tensor], copies: Sequence[BlockCopy]) -> None:
    """Copy whole blocks in every layer's cache, all sources read before a target is written.

    A target's tail then holds the source's, which its owner overwrites before reading it.
    """
    if not copies:
        return
    from kvern.worker.rows import upload

    sources = upload([copy.source for copy in copies], torch.int64, caches[0].device)
    targets = upload([copy.target for copy in copies], torch.int64, caches[0].device)
    for cache in caches:
        cache.index_copy_(1, targets, cache.index_select(1, sources))
