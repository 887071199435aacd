"""Attention of runs of queries on a Hopper GPU, through the kernel that is written for it.

It reads keys and values of 16 bits. Of a cache in 8 bits the blocks that a step's runs see become such ones before it,
for one layer at a time: keys are read once for that, and by the kernel once for each tile of queries.
"""

from collections.abc import Collection, Sequence

import torch

from kvern.attention.base import PlannedAttention
from kvern.device.device_batch import Queries
from kvern.kernels.attention_hopper import QUERIES, hopper_fits, hopper_prefill
from kvern.kernels.cache_plain import plain_blocks
from kvern.kernels.launch import processors
from kvern.spec.mixers import AttentionSpec

__all__ = ["HopperPrefill", "hopper_fits"]

TOKENS = 64
"""The least tokens of a run, on average: tiles have 128 queries, twice as many as Triton's largest."""
TOKENS_OF_CODES = 256
"""The least tokens of a run where codes of blocks have to become plain first."""
PLAIN_BYTES = 256 << 20
"""The most bytes of a layer's plain blocks: activations of the largest steps take as many."""


class HopperPrefill:
    """Plans what `AttentionKernels.prefill` does, for those of the layers that `fits` names by index.

    `cache_dtype`: of a cache in 8 bits.
    """

    def __init__(
        self,
        layers: Sequence[AttentionSpec],
        device: torch.device,
        block_size: int,
        fits: Collection[int],
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        self._layers, self.fits = list(layers), fits
        self._block_size = block_size
        self._codes = cache_dtype is not None and cache_dtype.itemsize == 1
        self._token_bytes = max(4 * layers[index].kv_heads * layers[index].head_dim for index in fits)
        self._processors = processors(device)

    def pays(self, queries: Queries) -> bool:
        """Return whether these runs are long enough, and whether codes may become plain, which no graph can do."""
        requests, tokens = len(queries.counts), sum(queries.counts)
        if not self._codes:
            return tokens >= TOKENS * requests
        if queries.known_tiles is not None or tokens < TOKENS_OF_CODES * requests:
            return False
        return requests * self._width(queries) * self._block_size * self._token_bytes <= PLAIN_BYTES

    def _width(self, queries: Queries) -> int:
        """Blocks of the longest context."""
        ends = (start + count for start, count in zip(queries.starts, queries.counts, strict=True))
        return -(-max(ends) // self._block_size)

    def prefill(self, queries: Queries) -> PlannedAttention:
        """Plan; `pays` must hold."""
        tiles = queries.tiles(QUERIES)
        table, slots = queries.block_table, queries.device_slots
        blocks = table
        if self._codes:
            blocks = table.index_select(0, slots)[:, : self._width(queries)].contiguous()
            table = torch.arange(blocks.numel(), dtype=torch.int32, device=blocks.device).view(blocks.shape)
            slots = torch.arange(len(blocks), dtype=torch.int32, device=blocks.device)

        def run(
            layer: int,
            query: torch.Tensor,
            cache: torch.Tensor,
            out: torch.Tensor,
            scales: torch.Tensor | None = None,
            sinks: torch.Tensor | None = None,
        ) -> None:
            spec = self._layers[layer]
            hopper_prefill(
                query,
                cache if scales is None else plain_blocks(cache, scales, blocks.flatten(), query.dtype),
                table,
                slots,
                queries.device_starts,
                queries.query_start_loc,
                queries.device_counts,
                *tiles,
                out,
                processors=self._processors,
                scale=spec.scale,
                window=spec.window,
                softcap=spec.softcap,
                sinks=sinks,
            )

        return run
