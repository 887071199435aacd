"""The backend of GPUs: one cache, over which each kind of query is attended to by the library that is fastest at it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvern.attention.base import AttentionKernels, OwnKernels, PlannedAttention, sinks_of
from kvern.attention.eight_bit import store_tokens
from kvern.attention.expanded import ExpandedRuns
from kvern.attention.groups import LayerGroups
from kvern.attention.memory import CacheOptions, zero_caches
from kvern.attention.triton import LONG_CONTEXT, cached_layer
from kvern.device.device_batch import DeviceBatch, Queries
from kvern.device.transfer import upload
from kvern.kernels.attention_arguments import CachedLayer
from kvern.kernels.batch import copy_pool_blocks
from kvern.request.step import BlockCopy


@dataclass(frozen=True)
class Phases:
    """The kernels of each phase; prefill beside decodes is mixed."""

    decode: AttentionKernels
    short_prefill: AttentionKernels
    long_prefill: AttentionKernels
    mixed: AttentionKernels

    @classmethod
    def all(cls, kernels: AttentionKernels) -> "Phases":
        return cls(kernels, kernels, kernels, kernels)


class PagedAttention:
    """AttentionBackend over the paged cache; `deterministic` attends to every token the same way in any batch."""

    reads_device_starts = True

    def __init__(self, cache: CacheOptions, phases: Phases, triton: OwnKernels, deterministic: bool = False) -> None:
        layers = cache.layers
        groups = cache.groups or LayerGroups.one_table(layers)
        self.tables = list(groups.tables)
        self.captures = phases.decode.captures
        self.prefix_members = 0 if deterministic or phases.decode is not triton else triton.prefix_members
        self.tile_sizes = triton.tile_sizes
        self.phases = phases
        self.triton = triton
        self.deterministic = deterministic
        self._eight_bit = cache.eight_bit
        self._layers, self._sinks = list(layers), sinks_of(layers, cache.sinks)
        self.value_dims = [layer.value_dim or layer.head_dim for layer in layers]
        sizes = cache.blocks, cache.block_size, cache.dtype, cache.device
        self.pools, self.caches = zero_caches(layers, groups, *sizes, cache.chunked)

    def scales(self, layer: int) -> torch.Tensor | None:
        """[2, kv_heads] float32 of a cache in 8 bits."""
        return None if self._eight_bit is None else self._eight_bit.scales[layer]

    def cached(self, layer: int) -> CachedLayer:
        """The arguments of kernels that describe a layer."""
        return cached_layer(self._layers[layer], self.caches[layer], self.scales(layer), self._sinks[layer])

    def plan(self, batch: DeviceBatch) -> "PagedStep":
        return PagedStep(self, batch)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        if copies:
            blocks = [copy.source for copy in copies] + [copy.target for copy in copies] + list(range(len(copies)))
            sources, targets, order = upload(blocks, torch.int64, self.pools[0].device).view(3, -1)
            for pool in self.pools:
                copy_pool_blocks(pool, sources, targets, order)


class PagedStep:
    """One step over the cache of `backend`: decodes first, then runs of queries."""

    def __init__(self, backend: PagedAttention, batch: DeviceBatch) -> None:
        self._backend = backend
        self._batch = batch
        self._tables = [(batch.block_table, batch.slot_mapping), *batch.windows]
        phases, requests = backend.phases, len(batch.slots)
        if batch.uncertain or batch.spans:  # libraries plan by lengths that the host knows, and attend causally
            phases = Phases.all(backend.triton)
        decodes = 0 if backend.deterministic else batch.decodes
        self._runs: list[list[tuple[slice, PlannedAttention]]] = [[] for _ in self._tables]
        """The planned attention of each block table."""
        self.expanded: ExpandedRuns | None = None
        if decodes:
            queries = batch.queries(0, decodes)
            for (table, _), runs in zip(self._tables, self._runs, strict=True):
                runs.append((slice(0, decodes), phases.decode.decode(queries.over(table))))
        if decodes < requests:
            queries = batch.queries(decodes, requests)
            if backend.triton.expanding is not None and not batch.uncertain:
                self.expanded = backend.triton.expanding.plan(queries, decodes)
                if self.expanded is not None and self.expanded.whole:
                    return
            keys = sum(queries.starts) + sum(queries.counts)
            long = keys >= LONG_CONTEXT * (requests - decodes)
            kernels = phases.mixed if decodes else phases.long_prefill if long else phases.short_prefill
            for (table, _), runs in zip(self._tables, self._runs, strict=True):
                runs.append((slice(decodes, None), kernels.prefill(queries.over(table))))

    def slot_mapping(self, layer: int) -> torch.Tensor:
        return self._tables[self._backend.tables[layer]][1]

    def cache(self, layer: int) -> torch.Tensor:
        return self._backend.caches[layer]

    def scales(self, layer: int) -> torch.Tensor | None:
        return self._backend.scales(layer)

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        cache, scales = self._backend.caches[layer], self.scales(layer)
        for kind, new in enumerate((key, value)[: len(cache)]):
            store_tokens(
                cache[kind].flatten(0, 1), self.slot_mapping(layer), new, None if scales is None else scales[kind]
            )
        return self.over_cache(layer, query)

    def over_cache(self, layer: int, query: torch.Tensor, wanted: torch.Tensor | None = None) -> torch.Tensor:
        cached = self._backend.cached(layer)
        if wanted is not None:
            if self._backend.deterministic or len(wanted) > self._backend.triton.max_requests:
                return self.over_cache(layer, query).index_select(0, wanted)
            query = query.index_select(0, wanted)
        value_dim = self._backend.value_dims[layer]
        out = torch.empty(*query.shape[:2], value_dim, dtype=query.dtype, device=query.device)
        if wanted is not None:  # the last token of a run sees all keys, as a decode does
            table, _ = self._tables[self._backend.tables[layer]]
            self._backend.triton.decode(self._sampled().over(table))(layer, query, cached, out)
            return out
        for tokens, run in self._runs[self._backend.tables[layer]]:
            run(layer, query[tokens], cached, out[tokens])
        return out

    def _sampled(self) -> Queries:
        batch = self._batch
        count = len(batch.sample_slots)
        return Queries(
            slots=batch.sample_slots,
            starts=[],
            counts=[1] * count,
            block_table=batch.block_table,
            device_slots=batch.device_sample_slots.int(),  # as those of decodes: the same kernel
            device_starts=(batch.sample_positions - 1).int(),
            query_start_loc=batch.query_start_loc,
            device_counts=batch.device_counts,
        )
