"""Attention through PyTorch: the backend of CPUs, and the last resort of everything else.

The keys and values of a request are gathered from its blocks, then handed to scaled_dot_product_attention. Requests
that decode are gathered together, in groups of similar length, so that a batch costs few calls and little padding; a
prefix whose blocks they share is read once for all of them.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, cycle, pairwise, repeat
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kvern.attention.base import contexts_of, copy_cache_blocks, sinks_of
from kvern.attention.eight_bit import of_query_heads, store_tokens
from kvern.attention.groups import LayerGroups
from kvern.attention.memory import CacheOptions, zero_caches
from kvern.device.input_batch import InputBatch
from kvern.layers.step_context import Context, rows_of
from kvern.request.step import BlockCopy
from kvern.spec.mixers import AttentionSpec


@dataclass
class Gather:
    """B requests with `queries` tokens each, over the same number of gathered keys.

    tokens  index of their tokens in the batch: a slice, or [B * queries] int64
    blocks  [B * blocks per request] int64
    run     the first key's place in the cache where one request's blocks follow each other: they are read in place
    shared  [S] int64, blocks before those that all B requests have in common; None: none
    mask    [B, 1, queries, keys] float, added to the scores; None: nothing is hidden, or `causal` says it all
    behind  [N] int64, gathered keys behind the last of their request; None: there are none
    """

    requests: int
    queries: int
    tokens: slice | torch.Tensor
    blocks: torch.Tensor
    run: int | None
    keys: int
    mask: torch.Tensor | None
    causal: bool
    shared: torch.Tensor | None = None
    behind: torch.Tensor | None = None


def consecutive(blocks: list[int], block_size: int) -> int | None:
    """The place of the first key of blocks that follow each other."""
    first = blocks[0]
    return first * block_size if blocks == list(range(first, first + len(blocks))) else None


def keys_behind(lengths: Sequence[int], block_size: int) -> torch.Tensor:
    """The places without a key, where each request's keys take as many places as the longest request's."""
    keys = max(lengths)
    places = keys if keys < block_size else -(-keys // block_size) * block_size
    left = torch.arange(keys) >= torch.tensor(lengths)[:, None]
    request, key = left.nonzero(as_tuple=True)
    return request * places + key


class Kind(NamedTuple):
    """The choice of which keys a layer sees: its block table, its window, and whether it has spans."""

    table: int
    window: int | None
    spans: bool


class Seen(NamedTuple):
    """The keys that queries see: as far back as a window reaches, and all of their span, if they are one."""

    window: int | None
    is_span: bool = False


def runs_of(batch: InputBatch, *, spans: bool) -> Iterator[tuple[int, int, slice, bool]]:
    """The row, first position and tokens of each request; with `spans` each of these, which is told, is apart."""
    token = 0
    for slot, start, count, inside in zip(
        batch.slots, batch.starts, batch.counts, batch.spans or repeat(()), strict=False
    ):
        cuts = [start, *(chain(*inside) if spans else ()), start + count]
        for (first, end), is_span in zip(pairwise(cuts), cycle((False, True)), strict=False):
            if first < end:
                yield slot, first, slice(token, token + end - first), is_span
                token += end - first


PADDING_LIMIT = 0.7
"""A request joins a group of decodes if it is at least this share of the group's longest."""

GROUP_BYTES = 3 << 20
"""Keys and values that a group of decodes may gather in one layer: they should be read again while still in L2."""

SHARED_BLOCKS = 4
"""Blocks that decodes must have in common for attending to them together to pay."""

Decode = tuple[int, int, int]
"""(position, row, index in the batch) of a request with one token."""


@dataclass(frozen=True)
class LayerStore:
    """The keys, or the values, of one layer: one tensor, seen in four ways.

    cache   [blocks, block_size, kv_heads, dim]
    rows    [blocks, block_size * kv_heads * dim]       to gather: PyTorch copies whole rows fastest
    tokens  [blocks * block_size, kv_heads, dim]        to write
    heads   [1, kv_heads, blocks * block_size, dim]     to read in place
    """

    cache: torch.Tensor
    rows: torch.Tensor
    tokens: torch.Tensor
    heads: torch.Tensor

    @classmethod
    def of(cls, cache: torch.Tensor) -> "LayerStore":
        tokens = cache.flatten(0, 1)
        return cls(cache, cache.flatten(1), tokens, tokens.transpose(0, 1)[None])


class TorchAttention:
    """AttentionBackend for any device that PyTorch knows."""

    captures = False
    prefix_members = 0
    tile_sizes: frozenset[int] = frozenset()
    deterministic = False
    reads_device_starts = False

    def __init__(self, cache: CacheOptions) -> None:
        layers = cache.layers
        device = cache.device
        eight_bit = cache.eight_bit
        groups = cache.groups or LayerGroups.one_table(layers)
        self.tables = list(groups.tables)
        self._layers = list(layers)
        self._sinks = sinks_of(layers, cache.sinks)
        self._block_size = cache.block_size
        self._dtype = cache.dtype if eight_bit is None else eight_bit.compute
        self._eight_bit = eight_bit
        token_bytes = max(layer.stored * layer.width for layer in layers) * self._dtype.itemsize
        self._group_tokens = GROUP_BYTES // token_bytes if device.type == "cpu" else sys.maxsize
        self._reads_prefix_once = device.type == "cpu" and all(layer.softcap is None for layer in layers)
        sizes = cache.blocks, cache.block_size, cache.dtype, device
        self.pools, self.caches = zero_caches(layers, groups, *sizes, cache.chunked)
        self._stores = [tuple(map(LayerStore.of, stored)) for stored in self.caches]

    def scales(self, layer: int) -> torch.Tensor | None:
        """[2, kv_heads] float32 of a cache in 8 bits."""
        return None if self._eight_bit is None else self._eight_bit.scales[layer]

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        copy_cache_blocks(self.pools, copies)

    def plan(self, batch: InputBatch) -> "TorchAttend":
        tables = [batch.block_table, *(table for table, _ in batch.windows)]
        kinds = {self.kind(layer, batch) for layer in range(len(self._layers))}
        batches = [replace(batch, block_table=table) for table in tables]
        gathers = {kind: list(self._gathers(batches[kind.table], kind)) for kind in kinds}
        return TorchAttend(self, batch, gathers)

    def kind(self, layer: int, batch: InputBatch) -> "Kind":
        """The keys that a layer sees of a step."""
        spec = self._layers[layer]
        return Kind(self.tables[layer], spec.window, spec.spans and bool(batch.spans))

    def _gathers(self, batch: InputBatch, kind: "Kind") -> Iterator[Gather]:
        """One group for each set of similar decodes and one for each longer run of tokens."""
        decodes, window = [], kind.window
        for slot, start, tokens, is_span in runs_of(batch, spans=kind.spans):
            count = tokens.stop - tokens.start
            if count == 1:
                decodes.append((start, slot, tokens.start))
            else:
                yield self._gather(batch, Seen(window, is_span), [slot], [start], count, tokens)
        for members, shared in self._prefix_sharers(batch, decodes, window):
            yield from self._decode_gathers(batch, window, members, shared)

    def _prefix_sharers(
        self, batch: InputBatch, decodes: list[Decode], window: int | None
    ) -> Iterator[tuple[list[Decode], torch.Tensor | None]]:
        """Decodes whose block tables begin alike, with those blocks; then all the others, with None."""
        others = []
        first_blocks = batch.block_table[:, 0].tolist() if len(decodes) > 1 else [0] * len(batch.block_table)
        by_first_block: dict[int, list[Decode]] = {}
        for decode in decodes:
            by_first_block.setdefault(first_blocks[decode[1]], []).append(decode)
        for members in by_first_block.values():
            limit = min(start for start, _, _ in members) // self._block_size  # the newest key is never shared
            if len(members) < 2 or window is not None or limit < SHARED_BLOCKS or not self._reads_prefix_once:
                others += members
                continue
            tables = batch.block_table[torch.tensor([slot for _, slot, _ in members]), :limit]
            count = int((tables == tables[0]).all(0).long().cumprod(0).sum())
            if count < SHARED_BLOCKS:
                others += members
            else:
                yield members, tables[0, :count].long()
        if others:
            yield others, None

    def _decode_gathers(
        self, batch: InputBatch, window: int | None, decodes: list[Decode], shared: torch.Tensor | None
    ) -> Iterator[Gather]:
        skipped = 0 if shared is None else len(shared)
        decodes.sort(reverse=True)
        while decodes:
            lengths = [_visible(start + 1 - skipped * self._block_size, window) for start, _, _ in decodes]
            size = sum(length >= lengths[0] * PADDING_LIMIT for length in lengths)
            size = min(size, max(1, self._group_tokens // lengths[0]))
            group, decodes = decodes[:size], decodes[size:]
            group.sort(key=lambda decode: decode[2])  # a group of the whole batch needs no reordering
            starts, slots, tokens = zip(*group, strict=True)
            index = slice(0, 1) if len(batch.positions) == 1 else torch.tensor(tokens, device=batch.positions.device)
            yield self._gather(batch, Seen(window), list(slots), list(starts), 1, index, shared)

    def _gather(
        self,
        batch: InputBatch,
        seen: Seen,
        slots: list[int],
        starts: list[int],
        queries: int,
        tokens: slice | torch.Tensor,
        shared: torch.Tensor | None = None,
    ) -> Gather:
        window, is_span = seen
        size, device = self._block_size, batch.positions.device
        skipped = 0 if shared is None else len(shared)
        first = [skipped if window is None else max(0, start + 1 - window) // size for start in starts]
        ends = [start + queries for start in starts]
        lengths = [end - block * size for end, block in zip(ends, first, strict=True)]
        keys = max(lengths)
        first_blocks = torch.tensor(first, device=device)
        columns = first_blocks[:, None] + torch.arange(-(-keys // size), device=device)
        rows = torch.tensor(slots, device=device)
        blocks = batch.block_table[rows[:, None], columns.clamp(max=batch.block_table.shape[1] - 1)].long().flatten()
        run = consecutive(blocks.tolist(), size) if len(slots) == 1 and device.type == "cpu" else None
        key_positions = (first_blocks * size)[:, None, None] + torch.arange(keys, device=device)
        query_positions = (torch.tensor(starts, device=device)[:, None] + torch.arange(queries, device=device))[
            ..., None
        ]
        inside = window is None or ends[0] <= window
        causal = queries > 1 and starts == [0] and inside and not is_span
        if causal or (is_span and inside):
            return Gather(len(slots), queries, tokens, blocks, run, keys, None, causal)
        if queries == 1 and len(set(ends)) == 1 and first == [0] * len(slots) and keys == ends[0] and inside:
            return Gather(len(slots), queries, tokens, blocks, run, keys, None, causal)
        hidden = (key_positions > query_positions) & (not is_span)
        if window is not None:
            hidden |= key_positions <= query_positions - window
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=device).masked_fill_(hidden, float("-inf"))
        behind = None if min(lengths) == keys else keys_behind(lengths, size).to(device)
        return Gather(len(slots), queries, tokens, blocks, run, keys, mask[:, None], False, shared, behind)


class TorchAttend:
    """One step over the cache of `backend`: for each block table and window, the keys of each group of requests."""

    expanded = None

    def __init__(self, backend: TorchAttention, batch: InputBatch, gathers: Mapping[Kind, Sequence[Gather]]) -> None:
        self._backend = backend
        self._gathers = gathers
        self._batch = batch
        self._tables = [(batch.block_table, batch.slot_mapping), *batch.windows]

    def slot_mapping(self, layer: int) -> torch.Tensor:
        return self._tables[self._backend.tables[layer]][1]

    def cache(self, layer: int) -> torch.Tensor:
        return self._backend.caches[layer]

    def scales(self, layer: int) -> torch.Tensor | None:
        return self._backend.scales(layer)

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        scales = self.scales(layer)
        for kind, (store, new) in enumerate(zip(self._backend._stores[layer], (key, value), strict=False)):
            store_tokens(store.tokens, self.slot_mapping(layer), new, None if scales is None else scales[kind])

    def contexts(self, layer: int) -> list[Context]:
        batch, (table, _) = self._batch, self._tables[self._backend.tables[layer]]
        requests = torch.tensor([batch.slots, batch.starts, batch.counts])
        return contexts_of(table, requests, self.cache(layer).shape[2])

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        self.store(layer, key, value)
        return self.over_cache(layer, query)

    def over_cache(self, layer: int, query: torch.Tensor, wanted: torch.Tensor | None = None) -> torch.Tensor:
        scales = self.scales(layer)
        if scales is None:
            return rows_of(self._over_cache(layer, query), wanted)
        key_scale, value_scale = (of_query_heads(scale, query.shape[1]) for scale in scales)
        attended = self._over_cache(layer, (query * key_scale).to(self._backend._dtype))
        return (rows_of(attended, wanted) * value_scale).to(query.dtype)

    def _over_cache(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        stores = self._backend._stores[layer]
        spec = self._backend._layers[layer]
        sinks = self._backend._sinks[layer]
        parts = self._gathers[self._backend.kind(layer, self._batch)]
        stored = query.to(self._backend._dtype)
        if len(parts) == 1:
            return _attend(stored, stores, parts[0], spec, sinks).to(query.dtype)[..., : spec.value_dim]
        output = torch.empty_like(query)
        for part in parts:
            if isinstance(part.tokens, slice):
                output[part.tokens] = _attend(stored[part.tokens], stores, part, spec, sinks)
            else:
                attended = _attend(stored.index_select(0, part.tokens), stores, part, spec, sinks)
                output.index_copy_(0, part.tokens, attended.to(query.dtype))
        return output[..., : spec.value_dim]


def _attend(
    query: torch.Tensor,
    stores: tuple[LayerStore, ...],
    part: Gather,
    spec: AttentionSpec,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """[B * queries, heads, dim] over the part's keys -> the same shape: where these are values, too, whole ones."""
    read = [_read(store, spec, part).to(query.dtype) for store in stores]
    key, value = read[0], read[-1]
    if part.queries == 1:  # the heads of a group stand where query tokens do: no key is repeated
        grouped = query.view(part.requests, spec.kv_heads, spec.heads // spec.kv_heads, spec.head_dim)
        if sinks is not None:
            sinks = sinks.view(spec.kv_heads, -1)
        if part.shared is None:
            output = _scaled_attention(grouped, key, value, part, spec, sinks)
        else:
            prefix = [store.rows.index_select(0, part.shared).to(query.dtype) for store in stores]
            output = _prefix_attention(grouped, prefix, key, value, part.mask, spec, sinks)
        return output.reshape(part.requests, spec.heads, spec.head_dim)
    heads = query.view(part.requests, part.queries, spec.heads, spec.head_dim).transpose(1, 2)
    output = _scaled_attention(heads, key, value, part, spec, None if sinks is None else sinks[:, None])
    return output.transpose(1, 2).reshape(part.requests * part.queries, spec.heads, spec.head_dim)


def _read(store: LayerStore, spec: AttentionSpec, part: Gather) -> torch.Tensor:
    """The keys or values of a part, [B, kv_heads, keys, dim]."""
    if part.run is not None:
        return store.heads.narrow(2, part.run, part.keys)
    if part.keys < store.cache.shape[1]:  # one block each, and most of it empty: the contiguous cache
        gathered = store.cache[:, : part.keys].index_select(0, part.blocks)
    else:
        gathered = store.rows.index_select(0, part.blocks)
    if part.behind is not None:  # it is another's, and 0 * NaN is NaN
        tokens = gathered.view(-1, spec.width)
        (tokens.view(torch.uint8) if tokens.itemsize == 1 else tokens).index_fill_(0, part.behind, 0)
    return gathered.view(part.requests, -1, spec.kv_heads, spec.head_dim)[:, : part.keys].transpose(1, 2)


def _prefix_attention(
    query: torch.Tensor,
    prefix: Sequence[torch.Tensor],
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    spec: AttentionSpec,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of [B, kv_heads, group, dim] over keys that all B share, read once, and over each one's own.

    Both results are weighted by their share of the softmax's sum (Juravsky et al. 2024, Hydragen).
    """
    requests, kv_heads, group, dim = query.shape
    heads = [blocks.reshape(-1, kv_heads, dim).transpose(0, 1)[None] for blocks in prefix]
    shared_key, shared_value = heads[0], heads[-1]
    together = query.transpose(0, 1).reshape(1, kv_heads, requests * group, dim)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    first, first_sum = flash(together, shared_key, shared_value, scale=spec.scale)
    own, own_sum = flash(query, key, value, attn_mask=mask, scale=spec.scale)
    first = first.view(kv_heads, requests, group, dim).transpose(0, 1)
    first_sum = first_sum.view(kv_heads, requests, group).transpose(0, 1)
    both = torch.lerp(first, own, torch.sigmoid(own_sum - first_sum)[..., None].to(own.dtype))
    return both if sinks is None else _beside_sinks(both, torch.logaddexp(first_sum, own_sum), sinks)


def _beside_sinks(attended: torch.Tensor, sums: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """`attended [..., dim]` with sinks in the softmax; `sums [...]` are the logarithms of the keys' weights."""
    return (attended * torch.sigmoid(sums - sinks).unsqueeze(-1)).to(attended.dtype)


def _visible(length: int, window: int | None) -> int:
    return length if window is None else min(length, window)


def _scaled_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    part: Gather,
    spec: AttentionSpec,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Softmax attention of [B, heads or groups, queries, dim] over [B, kv_heads, keys, dim].

    `sinks`, if there are any, have the dimensions of heads or groups and of queries, or one entry in their place.
    """
    grouped = query.shape[1] != key.shape[1]
    if sinks is not None and spec.softcap is None and query.device.type == "cpu":
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        output, sums = flash(query, key, value, 0.0, part.causal, attn_mask=part.mask, scale=spec.scale)
        return _beside_sinks(output, sums, sinks)
    if sinks is None and spec.softcap is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=part.mask, is_causal=part.causal, scale=spec.scale, enable_gqa=grouped
        )
    if grouped:
        key, value = (item.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for item in (key, value))
    scores = query @ key.transpose(-1, -2)
    if spec.softcap is None:
        scores *= spec.scale
    else:
        scores = spec.softcap * torch.tanh(scores * (spec.scale / spec.softcap))
    if part.causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores.masked_fill_(hidden, float("-inf"))
    elif part.mask is not None:
        scores += part.mask
    attended = scores.softmax(-1) @ value
    return attended if sinks is None else _beside_sinks(attended, scores.logsumexp(-1), sinks)
