"""Attention through kvern's own Triton kernels: reads the blocks in place, on any GPU that Triton knows."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvern.attention.base import PagedAttend, copy_cache_blocks
from kvern.cache.manager import BlockCopy
from kvern.kernels.attention import PrefillShape, decode_attention, decode_shape, prefill_attention, prefill_shape
from kvern.models.spec import AttentionSpec
from kvern.worker.device_batch import DeviceBatch

LONG_CONTEXT = 1024
"""Query tiles are larger where runs of queries see, on average, at least this many keys."""


class TritonAttention:
    """AttentionBackend over the paged cache; `deterministic` attends to every token the same way in any batch."""

    captures = True

    def __init__(
        self,
        layers: Sequence[AttentionSpec],
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        max_requests: int,
        deterministic: bool = False,
    ) -> None:
        self.layers = list(layers)
        self.deterministic = deterministic
        self.caches = [
            torch.zeros(2, blocks, block_size, layer.kv_heads, layer.head_dim, dtype=dtype, device=device)
            for layer in layers
        ]
        most_heads = max(layer.kv_heads for layer in layers)
        self.arrived = torch.zeros(max_requests * most_heads, dtype=torch.int32, device=device)
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1

    def plan(self, batch: DeviceBatch) -> PagedAttend:
        return TritonAttend(self, batch)

    def decodes(self, batch: DeviceBatch) -> int:
        """How many of the first requests have one token and may be cut over the context."""
        return 0 if self.deterministic else batch.decodes

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        copy_cache_blocks(self.caches, copies)


@dataclass
class TritonAttend:
    """One step over the cache of `backend`: decodes first, then runs of queries."""

    backend: TritonAttention
    batch: DeviceBatch

    def __post_init__(self) -> None:
        batch = self.batch
        self.cache_slots = batch.cache_slots
        self.decodes = self.backend.decodes(batch)
        self.requests = len(batch.slots)
        if self.decodes < self.requests:
            keys = sum(batch.starts[self.decodes :]) + sum(batch.counts[self.decodes :])
            self.long = keys >= LONG_CONTEXT * (self.requests - self.decodes)
            queries = {self._prefill_shape(layer.head_dim).queries for layer in self.backend.layers}
            self.tiles = {size: batch.query_tiles(self.decodes, size) for size in queries}

    def _prefill_shape(self, head_dim: int) -> PrefillShape:
        return prefill_shape(head_dim, self.long and not self.backend.deterministic)

    def cache(self, layer: int) -> torch.Tensor:
        return self.backend.caches[layer]

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        cache = self.backend.caches[layer]
        cache[0].flatten(0, 1).index_copy_(0, self.cache_slots, key.to(cache.dtype))
        cache[1].flatten(0, 1).index_copy_(0, self.cache_slots, value.to(cache.dtype))
        return self.over_cache(layer, query)

    def over_cache(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        backend, batch, decodes = self.backend, self.batch, self.decodes
        spec, cache = backend.layers[layer], backend.caches[layer]
        if decodes:
            attended = decode_attention(
                query[:decodes],
                cache,
                batch.block_table,
                batch.device_slots[:decodes],
                batch.device_starts[:decodes],
                backend.arrived,
                decode_shape(decodes, spec.kv_heads, spec.head_dim, backend.processors),
                scale=spec.scale,
                window=spec.window,
                softcap=spec.softcap,
            )
            if decodes == self.requests:
                return attended
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        shape = self._prefill_shape(spec.head_dim)
        prefill_attention(
            query,
            cache,
            batch.block_table,
            batch.device_slots,
            batch.device_starts,
            batch.device_firsts,
            batch.device_counts,
            *self.tiles[shape.queries],
            out,
            shape,
            scale=spec.scale,
            window=spec.window,
            softcap=spec.softcap,
        )
        if decodes:
            out[:decodes] = attended
        return out
