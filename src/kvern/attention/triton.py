"""Attention through kvern's own Triton kernels: reads the blocks in place, on any GPU that Triton knows."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kvern.attention.base import PlannedAttention
from kvern.attention.split import SplitPrefill
from kvern.device.device_batch import Queries
from kvern.kernels.attention_arguments import CachedLayer, Decodes
from kvern.kernels.attention_decode import decode_attention, decode_shape
from kvern.kernels.attention_prefill import prefill_attention, prefill_shape
from kvern.kernels.attention_prefix import prefix_members
from kvern.kernels.launch import processors
from kvern.spec.mixers import AttentionSpec

if TYPE_CHECKING:
    from kvern.attention.hopper import HopperPrefill

MOST_TILES = 1024
"""The most tokens of each request in a step of more requests than decode at once."""
LONG_CONTEXT = 1024
"""Query tiles are larger where runs of queries see, on average, at least this many keys."""


def cached_layer(
    spec: AttentionSpec, cache: torch.Tensor, scales: torch.Tensor | None = None, sinks: torch.Tensor | None = None
) -> CachedLayer:
    """What kernels are told of a layer; `scales` and `sinks` as in `CachedLayer`."""
    return CachedLayer(cache, spec.scale, spec.window, spec.softcap, scales, sinks)


class TritonKernels:
    """AttentionKernels that are always there; with `deterministic` a token's result does not depend on the batch.

    `hopper` attends to runs of queries, if it is given: on its GPUs it is faster.
    """

    name = "triton"
    captures = True

    expanding = None

    def __init__(
        self,
        layers: Sequence[AttentionSpec],
        device: torch.device,
        max_requests: int,
        deterministic: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        hopper: "HopperPrefill | None" = None,
    ) -> None:
        """`dtype`: of the cache."""
        self._layers = list(layers)
        self._element_size = dtype.itemsize
        self._deterministic = deterministic
        self._hopper = hopper
        self.max_requests = max_requests
        most_heads = max(layer.kv_heads for layer in layers)
        whole = [layer for layer in layers if layer.window is None]
        members = (
            prefix_members(item.heads // item.kv_heads, item.head_dim, dtype.itemsize) for item in whole or layers
        )
        self.prefix_members = min(members)
        tiles = max(max_requests, MOST_TILES)
        self._arrived = torch.zeros(tiles * most_heads, dtype=torch.int32, device=device)
        self._processors = 1 if device.type == "cpu" else processors(device)
        self._split = SplitPrefill(layers, self._processors, self._arrived, self._element_size)
        plain = {prefill_shape(layer.head_dim, False, self._element_size).queries for layer in layers}
        self.tile_sizes = frozenset(plain if deterministic else self._split.tile_sizes)

    def decode(self, queries: Queries) -> PlannedAttention:
        requests = len(queries.slots)
        decodes = Decodes(queries.device_slots, queries.device_starts)

        def run(layer: int, query: torch.Tensor, cached: CachedLayer, out: torch.Tensor) -> None:
            spec, size = self._layers[layer], cached.cache.element_size()
            shape = decode_shape(requests, spec.kv_heads, spec.head_dim, self._processors, size)
            shared = queries.shared if spec.window is None else None
            decode_attention(query, cached, queries.block_table, decodes, self._arrived, out, shape, shared)

        return run

    def prefill(self, queries: Queries) -> PlannedAttention:
        if not self._deterministic and self._split.pays(queries):
            return self._split.prefill(queries)
        if self._hopper is None or not self._hopper.pays(queries):
            return self._tiles(queries)
        hopper, fits = self._hopper.prefill(queries), self._hopper.fits
        if len(fits) == len(self._layers):
            return hopper
        others = self._tiles(queries)

        def run(layer: int, query: torch.Tensor, cached: CachedLayer, out: torch.Tensor) -> None:
            (hopper if layer in fits else others)(layer, query, cached, out)

        return run

    def _tiles(self, queries: Queries) -> PlannedAttention:
        """Plan runs of queries, each tile of which one program attends for."""
        requests = len(queries.slots)
        keys = sum(queries.starts) + sum(queries.counts)
        long = keys >= LONG_CONTEXT * requests and not self._deterministic
        shapes = {layer.head_dim: prefill_shape(layer.head_dim, long, self._element_size) for layer in self._layers}
        tiles = {size: queries.runs(size) for size in {shape.queries for shape in shapes.values()}}

        def run(layer: int, query: torch.Tensor, cached: CachedLayer, out: torch.Tensor) -> None:
            shape = shapes[self._layers[layer].head_dim]
            prefill_attention(query, cached, queries.block_table, tiles[shape.queries], out, shape)

        return run
