"""Attention of runs of queries on a Hopper GPU, through the kernel that is written for it.

It reads keys and values of 16 bits. Of a cache in 8 bits the blocks that a step's runs see become such ones before it,
for one layer at a time: keys are read once for that, and by the kernel once for each tile of queries.
"""

from collections.abc import Collection, Sequence

import torch

from kvern.attention.base import PlannedAttention
from kvern.device.device_batch import Queries
from kvern.kernels.attention_arguments import CachedLayer
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
        self.fits = fits
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
        runs, table = queries.runs(QUERIES), queries.block_table
        blocks = table
        if self._codes:
            blocks = table.index_select(0, runs.slots)[:, : self._width(queries)].contiguous()
            table = torch.arange(blocks.numel(), dtype=torch.int32, device=blocks.device).view(blocks.shape)
            runs = runs._replace(slots=torch.arange(len(blocks), dtype=torch.int32, device=blocks.device))

        def run(layer: int, query: torch.Tensor, cached: CachedLayer, out: torch.Tensor) -> None:
            if cached.scales is not None:
                plain = plain_blocks(cached.cache, cached.scales, blocks.flatten(), query.dtype)
                cached = cached._replace(cache=plain, scales=None)
            hopper_prefill(query, cached, table, runs, out, self._processors)

        return run
