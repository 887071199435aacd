"""Attention through PyTorch for prompts from their first token on, whose keys are gathered from their blocks.

It is timed beside kvern's own kernels on cards on which their tiles were not chosen.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvern.attention.base import OwnKernels, PlannedAttention
from kvern.device.device_batch import Queries
from kvern.kernels.attention_arguments import CachedLayer
from kvern.spec.mixers import AttentionSpec

FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
"""PyTorch's ways that never hold a score for each head, query and key."""


class GatheredKernels:
    """AttentionKernels out of PyTorch's scaled_dot_product_attention, for layers without window, softcap and sinks.

    Decodes, and steps with a context before any of their runs, would need a mask or a copy of the context, and go to
    `own`. Plans raise RuntimeError where PyTorch has no fused kernel for the layer on this device.
    """

    name = "torch"

    def __init__(self, layers: Sequence[AttentionSpec], own: OwnKernels) -> None:
        self._layers = list(layers)
        self._own = own
        self.captures = own.captures

    def decode(self, queries: Queries) -> PlannedAttention:
        return self._own.decode(queries)

    def prefill(self, queries: Queries) -> PlannedAttention:
        if any(queries.starts):
            return self._own.prefill(queries)

        def run(layer: int, query: torch.Tensor, cached: CachedLayer, out: torch.Tensor) -> None:
            token = 0
            with sdpa_kernel(FUSED):
                for slot, count in zip(queries.slots, queries.counts, strict=True):
                    tokens = slice(token, token + count)
                    _attend(self._layers[layer], query[tokens], cached.cache, queries.block_table[slot], out[tokens])
                    token += count

        return run


def _attend(
    spec: AttentionSpec, query: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, out: torch.Tensor
) -> None:
    """Causal attention of one request's `query [T, heads, head_dim]` from its first token on, into `out`, as large."""
    tokens, size = len(query), cache.shape[2]
    keys = cache.index_select(1, table[: -(-tokens // size)].long()).flatten(1, 2)[:, :tokens]
    key, value = keys.transpose(1, 2)
    grouped = spec.heads != spec.kv_heads
    found = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None], key[None], value[None], is_causal=True, scale=spec.scale, enable_gqa=grouped
    )
    out.copy_(found[0].transpose(0, 1))
