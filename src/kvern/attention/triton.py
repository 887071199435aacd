"""Attention through kvern's own Triton kernels: reads the blocks in place, on any GPU that Triton knows."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kvern.attention.base import PlannedAttention
from kvern.device.device_batch import Queries
from kvern.kernels.attention_arguments import CachedLayer, Decodes, Runs
from kvern.kernels.attention_decode import decode_attention, decode_shape
from kvern.kernels.attention_prefill import prefill_attention, prefill_shape
from kvern.kernels.attention_prefix import prefix_members
from kvern.kernels.attention_split import split_attention, split_queries, split_shape
from kvern.kernels.launch import processors
from kvern.spec.mixers import AttentionSpec

if TYPE_CHECKING:
    from kvern.attention.hopper import HopperPrefill

MOST_TILES = 1024
"""The most tokens of each request in a step of more requests than decode at once."""
LONG_CONTEXT = 1024
"""Query tiles are larger where runs of queries see, on average, at least this many keys."""
FEW = 64
"""Tokens of a request for which tiles are cut where only the device knows how many there are."""
PADDED = 3
"""Tiles for each that has keys, where only the device knows which do."""
WAVES = 1
"""Programs for each processor, below which the tiles of runs are too few for the card."""
LEAST_KEYS = 512
"""The least context of a run, on average: a shorter one is not split."""


def cached_layer(
    spec: AttentionSpec, cache: torch.Tensor, scales: torch.Tensor | None = None, sinks: torch.Tensor | None = None
) -> CachedLayer:
    """The arguments of kernels that describe a layer; `scales` and `sinks` as in `CachedLayer`."""
    return CachedLayer(cache, spec.scale, spec.window, spec.softcap, scales, sinks)


def of_layer(runs: Runs, spec: AttentionSpec) -> Runs:
    """The runs as a layer sees them, which has spans or none."""
    return runs if spec.spans else runs._replace(ends=None)


class SplitPrefill:
    """Plans runs of queries for all layers, if their tiles are few; `arrived` [N] int32 are zeros between launches."""

    def __init__(
        self, layers: Sequence[AttentionSpec], processors: int, arrived: torch.Tensor, element_size: int
    ) -> None:
        """`element_size`: of the cache."""
        self._layers, self._element_size = list(layers), element_size
        self._processors = processors
        self._arrived = arrived
        self.tile_sizes = {self._together(layer, FEW) for layer in layers}

    def pays(self, queries: Queries) -> bool:
        """Return whether these runs are few or short enough, and their contexts long enough."""
        if queries.known_tiles is not None:
            return queries.few
        keys = sum(queries.starts) + sum(queries.counts)
        if keys < LEAST_KEYS * len(queries.counts):
            return False
        return all(self._idle(queries, layer) for layer in dict.fromkeys(self._layers))

    def _idle(self, queries: Queries, layer: AttentionSpec) -> bool:
        together = self._together(layer, max(queries.counts))
        tiles = sum(-(-count // together) for count in queries.counts)
        if tiles * layer.kv_heads > len(self._arrived):
            return False
        size = prefill_shape(layer.head_dim, element_size=self._element_size).queries
        programs = layer.heads * sum(-(-count // size) for count in queries.counts)
        return max(queries.counts) <= together or programs < WAVES * self._processors

    def _together(self, layer: AttentionSpec, most: int) -> int:
        return split_queries(layer.heads // layer.kv_heads, layer.head_dim, most, self._element_size)

    def prefill(self, queries: Queries) -> PlannedAttention:
        """Plan; `pays` must hold."""
        most = FEW if queries.few else max(queries.counts)
        sizes = {self._together(layer, most) for layer in self._layers}
        tiles = {size: queries.runs(size) for size in sizes}

        def run(layer: int, query: torch.Tensor, cached: CachedLayer, out: torch.Tensor) -> None:
            spec = self._layers[layer]
            runs = of_layer(tiles[self._together(spec, most)], spec)
            count = len(runs.tile_request)
            shape = split_shape(
                max(1, count // PADDED) if queries.few else count,
                spec.heads // spec.kv_heads,
                spec.kv_heads,
                spec.head_dim,
                most,
                self._processors,
                self._element_size,
            )
            split_attention(query, cached, queries.block_table, runs, out, self._arrived, shape)

        return run


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
        if self._hopper is None or queries.ends is not None or not self._hopper.pays(queries):
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
            spec = self._layers[layer]
            shape = shapes[spec.head_dim]
            prefill_attention(query, cached, queries.block_table, of_layer(tiles[shape.queries], spec), out, shape)

        return run
