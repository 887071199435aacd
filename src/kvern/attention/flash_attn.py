"""Attention through FlashAttention 4 (`flash-attn-4`), which compiles its kernels when they are first used."""

from collections.abc import Sequence
from itertools import accumulate

import torch

from kvern.attention.base import PlannedAttention
from kvern.device.device_batch import Queries
from kvern.device.transfer import upload
from kvern.kernels.attention_arguments import CachedLayer
from kvern.spec.mixers import AttentionSpec


def held_blocks(table: torch.Tensor, starts: torch.Tensor, window: int, block_size: int) -> torch.Tensor:
    """`table [R, blocks]` int32 with names of held blocks alone: those that a window has passed may be others' by now.

    starts  [R] int32: positions of the first queries

    In their place stands the first that is held: what its keys weigh is 0, and they are numbers.
    """
    first = (starts + 1 - window).clamp_(min=0) // block_size
    column = torch.arange(table.shape[1], device=table.device)
    return table.gather(1, torch.maximum(column, first[:, None]))


class FlashAttnKernels:
    """AttentionKernels out of one function for any number of queries. Raises ImportError if the package is missing."""

    name = "flash_attn"
    captures = False

    def __init__(self, layers: Sequence[AttentionSpec]) -> None:
        from flash_attn.cute import flash_attn_varlen_func

        self._layers = list(layers)
        self._attend = flash_attn_varlen_func

    def decode(self, queries: Queries) -> PlannedAttention:
        return self.prefill(queries)

    def prefill(self, queries: Queries) -> PlannedAttention:
        device = queries.block_table.device
        bounds = list(accumulate(queries.counts, initial=0))
        keys = [start + count for start, count in zip(queries.starts, queries.counts, strict=True)]
        sent = upload(bounds + keys, torch.int32, device)
        firsts, lengths = sent[: len(bounds)], sent[len(bounds) :].clone()  # an address that is a multiple of 16 bytes
        table = queries.block_table.index_select(0, queries.device_slots)
        held: dict[int | None, torch.Tensor] = {None: table}

        def run(layer: int, query: torch.Tensor, cached: CachedLayer, out: torch.Tensor) -> None:
            spec = self._layers[layer]
            if spec.window is not None and spec.window not in held:
                held[spec.window] = held_blocks(table, queries.device_starts, spec.window, cached.cache.shape[2])
            result = self._attend(
                query,
                *cached.cache,
                cu_seqlens_q=firsts,
                max_seqlen_q=max(queries.counts),
                seqused_k=lengths,
                page_table=held[spec.window],
                softmax_scale=spec.scale,
                causal=True,
                window_size=(None, None) if spec.window is None else (spec.window - 1, 0),
                softcap=spec.softcap or 0.0,
            )
            out.copy_(result[0] if isinstance(result, tuple) else result)

        return run
