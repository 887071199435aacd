"""Attention to latents through kvern's own Triton kernels: decodes and runs of queries alike, over what is cached."""

from collections.abc import Sequence

import torch

from kvern.attention.base import PlannedAttention
from kvern.attention.expanded import ExpandedAttention
from kvern.device.device_batch import Queries
from kvern.kernels.attention_arguments import CachedLayer
from kvern.kernels.attention_latent import QUERIES, Runs, latent_attention, latent_shape
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
        return self._planned(queries, None, len(queries.slots))

    def prefill(self, queries: Queries) -> PlannedAttention:
        tile_request, tile_first = queries.tiles(QUERIES)
        runs = Runs(queries.query_start_loc, queries.device_counts, tile_request, tile_first)
        return self._planned(queries, runs, len(tile_request))

    def _planned(self, queries: Queries, runs: Runs | None, tiles: int) -> PlannedAttention:
        def run(layer: int, query: torch.Tensor, cached: CachedLayer, out: torch.Tensor) -> None:
            spec = self._layers[layer]
            latent_attention(
                query,
                cached.cache,
                queries.block_table,
                queries.device_slots,
                queries.device_starts,
                runs,
                out,
                latent_shape(
                    spec.heads, tiles, runs is None, self._processors, query.device, cached.cache.element_size()
                ),
                scale=spec.scale,
            )

        return run
