"""Attention to latents through kvern's own Triton kernels: decodes and runs of queries alike, over what is cached."""

from collections.abc import Sequence

import torch

from kvern.attention.base import PlannedAttention
from kvern.attention.expanded import ExpandedAttention
from kvern.device.device_batch import Queries
from kvern.kernels.attention_arguments import CachedLayer, Decodes, Runs
from kvern.kernels.attention_latent import QUERIES, latent_attention, latent_shape
from kvern.kernels.launch import processors
from kvern.spec.mixers import AttentionSpec


class LatentKernels:
    """AttentionKernels of layers whose values are the first entries of their keys (`AttentionSpec.value_dim`)."""

    name = "triton"
    captures = True
    prefix_members = 0
    tile_sizes = frozenset({QUERIES})

    def __init__(
        self,
        layers: Sequence[AttentionSpec],
        device: torch.device,
        max_requests: int,
        expanding: ExpandedAttention | None = None,
    ) -> None:
        self._layers = list(layers)
        self._processors = processors(device)
        self.max_requests, self.expanding = max_requests, expanding

    def decode(self, queries: Queries) -> PlannedAttention:
        return self._planned(queries, Decodes(queries.device_slots, queries.device_starts), len(queries.slots))

    def prefill(self, queries: Queries) -> PlannedAttention:
        runs = queries.runs(QUERIES)
        return self._planned(queries, runs, len(runs.tile_request))

    def _planned(self, queries: Queries, requests: Decodes | Runs, tiles: int) -> PlannedAttention:
        def run(layer: int, query: torch.Tensor, cached: CachedLayer, out: torch.Tensor) -> None:
            heads, size = self._layers[layer].heads, cached.cache.element_size()
            shape = latent_shape(heads, tiles, isinstance(requests, Decodes), self._processors, query.device, size)
            latent_attention(query, cached, queries.block_table, requests, out, shape)

        return run
