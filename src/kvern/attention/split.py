"""Runs of few queries over long contexts: tiles that would leave most of the card idle share their keys out."""

from collections.abc import Sequence

import torch

from kvern.attention.base import PlannedAttention
from kvern.device.device_batch import Queries
from kvern.kernels.attention_arguments import CachedLayer
from kvern.kernels.attention_prefill import prefill_shape
from kvern.kernels.attention_split import split_attention, split_queries, split_shape
from kvern.spec.mixers import AttentionSpec

FEW = 64
"""Tokens of a request for which tiles are cut where only the device knows how many there are."""
PADDED = 3
"""Tiles for each that has keys, where only the device knows which do."""
WAVES = 1
"""Programs for each processor, below which the tiles of runs are too few for the card."""
LEAST_KEYS = 512
"""The least context of a run, on average: a shorter one is not split."""


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
            runs = tiles[self._together(spec, most)]
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
