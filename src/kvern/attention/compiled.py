"""Attention through kernels for CPUs: the cache is read in place, and what a token gets is the same in any batch."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from kvern.attention.base import contexts_of, copy_cache_blocks, sinks_of
from kvern.attention.eight_bit import store_tokens
from kvern.attention.groups import LayerGroups
from kvern.attention.memory import CacheOptions, zero_caches
from kvern.cpu.attention import AttentionForm, CachedLayer, Step
from kvern.device.input_batch import InputBatch
from kvern.layers.step_context import Context
from kvern.request.step import BlockCopy

StepSlots = tuple[Step, torch.Tensor]
"""The step over one block table, and its slot mapping, [T] int64."""


class CompiledAttention:
    """AttentionBackend on a CPU for activations in `dtype`, float32 or bfloat16.

    With `one_cache` all layers have the same memory, since nothing of it is read after its layer.
    """

    captures = False
    prefix_members = 0
    deterministic = True
    reads_device_starts = False
    tile_sizes: frozenset[int] = frozenset()

    def __init__(self, cache: CacheOptions, dtype: torch.dtype, *, one_cache: bool = False) -> None:
        layers, eight_bit = cache.layers, cache.eight_bit
        groups = cache.groups or LayerGroups.one_table(layers)
        if one_cache:
            groups = replace(groups, places=[0] * len(layers), owners=[0])
        self.tables = list(groups.tables)
        self.pools, self.caches = zero_caches(layers, groups, cache.blocks, cache.block_size, cache.dtype)
        self.layer_scales = [None] * len(layers) if eight_bit is None else list(eight_bit.scales)
        self.layers = [
            CachedLayer(
                stored,
                scales,
                dtype,
                AttentionForm(
                    layer.heads,
                    layer.scale,
                    layer.window,
                    layer.softcap,
                    layer.value_dim,
                    layer.causal,
                    layer.spans,
                ),
                sinks,
            )
            for layer, stored, scales, sinks in zip(
                layers, self.caches, self.layer_scales, sinks_of(layers, cache.sinks), strict=True
            )
        ]

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        copy_cache_blocks(self.pools, copies)

    def plan(self, batch: InputBatch) -> "CompiledAttend":
        requests = torch.tensor([batch.slots, batch.starts, batch.counts])
        tables = [(batch.block_table, batch.slot_mapping), *batch.windows]
        return self.attend(*((Step(table, requests, batch.ends), slot_mapping) for table, slot_mapping in tables))

    def attend(self, *tables: StepSlots) -> "CompiledAttend":
        """Attend to what the step says by then, and write keys and values to what the slot mapping does.

        Of each block table, in their order.
        """
        return CompiledAttend(self, tables)


class CompiledAttend:
    """One step over the cache of `backend`."""

    def __init__(self, backend: CompiledAttention, tables: Sequence[StepSlots]) -> None:
        self._backend, self._tables = backend, tables

    def slot_mapping(self, layer: int) -> torch.Tensor:
        return self._tables[self._backend.tables[layer]][1]

    def cache(self, layer: int) -> torch.Tensor:
        return self._backend.caches[layer]

    def scales(self, layer: int) -> torch.Tensor | None:
        return self._backend.layer_scales[layer]

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        cache, scales = self.cache(layer), self.scales(layer)
        for kind, (stored, new) in enumerate(zip(cache, (key, value), strict=False)):
            store_tokens(stored.flatten(0, 1), self.slot_mapping(layer), new, None if scales is None else scales[kind])

    def contexts(self, layer: int) -> list[Context]:
        step, _ = self._tables[self._backend.tables[layer]]
        return contexts_of(*step.tensors, self.cache(layer).shape[2])

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        self.store(layer, key, value)
        return self.over_cache(layer, query)

    def over_cache(self, layer: int, query: torch.Tensor, wanted: torch.Tensor | None = None) -> torch.Tensor:
        step, _ = self._tables[self._backend.tables[layer]]
        return self._backend.layers[layer].attend(step, query, wanted)
