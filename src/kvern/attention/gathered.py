"""Attention through PyTorch over keys that are gathered from their blocks, request by request.

It is timed beside kvern's own kernels on cards on which their tiles were not chosen.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from kvern.attention.base import PlannedAttention
from kvern.device.device_batch import Queries
from kvern.kernels.attention_arguments import CachedLayer
from kvern.spec.mixers import AttentionSpec

MASKED = 1 << 26
"""The most pairs of a query and a key that one mask has."""


class GatheredKernels:
    """AttentionKernels out of PyTorch's scaled_dot_product_attention, for layers without softcap and sinks."""

    name = "torch"
    captures = False

    def __init__(self, layers: Sequence[AttentionSpec]) -> None:
        self._layers = list(layers)

    def decode(self, queries: Queries) -> PlannedAttention:
        return self.prefill(queries)

    def prefill(self, queries: Queries) -> PlannedAttention:
        def run(layer: int, query: torch.Tensor, cached: CachedLayer, out: torch.Tensor) -> None:
            token = 0
            for slot, start, count in zip(queries.slots, queries.starts, queries.counts, strict=True):
                table, end = queries.block_table[slot], start + count
                most = max(1, MASKED // end) if start else count
                for first in range(0, count, most):
                    some = slice(token + first, token + min(first + most, count))
                    _attend(self._layers[layer], query[some], cached.cache, table, start + first, out[some])
                token += count

        return run


def _attend(
    spec: AttentionSpec, query: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, start: int, out: torch.Tensor
) -> None:
    """Attention of one request's `query [T, heads, head_dim]` from the position `start` on, into `out`, as large.

    Blocks that a window has passed may be others' by now: they are not read.
    """
    size, end = cache.shape[2], start + len(query)
    before = 0 if spec.window is None else max(0, start + 1 - spec.window) // size
    keys = cache.index_select(1, table[before : -(-end // size)].long()).flatten(1, 2)[:, : end - before * size]
    key, value = keys.transpose(1, 2)
    causal = start == 0 and spec.window is None
    seen = None
    if not causal:
        position = torch.arange(start, end, device=query.device)[:, None]
        other = torch.arange(before * size, end, device=query.device)
        seen = other <= position
        if spec.window is not None:
            seen &= other > position - spec.window
    asked = query.transpose(0, 1)[None]
    grouped = spec.heads != spec.kv_heads
    found = F.scaled_dot_product_attention(
        asked, key[None], value[None], seen, is_causal=causal, scale=spec.scale, enable_gqa=grouped
    )
    out.copy_(found[0].transpose(0, 1))
