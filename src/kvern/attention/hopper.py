"""Attention of runs of queries on a Hopper GPU, through the kernel that is written for it."""

from collections.abc import Sequence

import torch

from kvern.attention.base import PlannedAttention
from kvern.device.device_batch import Queries
from kvern.kernels.attention_hopper import QUERIES, hopper_fits, hopper_prefill
from kvern.model_spec import AttentionSpec

__all__ = ["HopperPrefill", "hopper_fits"]


class HopperPrefill:
    """Plans what `AttentionKernels.prefill` does, for layers that all fit the kernel."""

    def __init__(self, layers: Sequence[AttentionSpec], device: torch.device) -> None:
        self._layers = list(layers)
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count

    def prefill(self, queries: Queries) -> PlannedAttention:
        tiles = queries.tiles(QUERIES)

        def run(
            layer: int,
            query: torch.Tensor,
            cache: torch.Tensor,
            out: torch.Tensor,
            scales: torch.Tensor | None = None,
        ) -> None:
            spec = self._layers[layer]
            hopper_prefill(
                query,
                cache,
                queries.block_table,
                queries.device_slots,
                queries.device_starts,
                queries.query_start_loc,
                queries.device_counts,
                *tiles,
                out,
                processors=self._processors,
                scale=spec.scale,
                window=spec.window,
                softcap=spec.softcap,
            )

        return run
