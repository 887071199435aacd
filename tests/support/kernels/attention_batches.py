"""Batches with a scattered KV cache for attention kernels, their launches, and reference results."""

import math
from typing import Any, NamedTuple
from unittest import mock

import torch

from kvern.kernels.attention_arguments import CachedLayer, Decodes, Runs
from kvern.kernels.attention_decode import DecodeShape, decode_attention
from kvern.kernels.attention_prefill import PrefillShape, prefill_attention
from kvern.kernels.attention_prefix import SharedPrefix
from kvern.kernels.attention_split import SplitShape, split_attention
from kvern.kernels.launch import next_power_of_2
from tests.support.kernels.cpu_attention_batches import spans_of

BLOCK_SIZE = 4


class Batch(NamedTuple):
    """Requests whose keys lie scattered over a cache that is NaN elsewhere, in the order in which kernels take it."""

    query: torch.Tensor
    cache: torch.Tensor
    table: torch.Tensor
    slots: torch.Tensor
    starts: torch.Tensor
    tokens: torch.Tensor
    counts: torch.Tensor
    ends: torch.Tensor | None = None


def make_batch(
    device: torch.device,
    starts: list[int],
    counts: list[int],
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    block_size: int = BLOCK_SIZE,
) -> Batch:
    generator = torch.Generator().manual_seed(sum(starts))
    ends = [start + count for start, count in zip(starts, counts, strict=True)]
    blocks = [-(-end // block_size) for end in ends]
    free = torch.randperm(sum(blocks) + 3, generator=generator).tolist()
    cache = torch.full((2, len(free), block_size, kv_heads, dim), float("nan"))
    slots = torch.randperm(len(starts) + 2, generator=generator)[: len(starts)]
    table = torch.full((len(starts) + 2, max(blocks) + 2), 0, dtype=torch.int32)
    for slot, end, count in zip(slots.tolist(), ends, blocks, strict=True):
        ids = [free.pop() for _ in range(count)]
        table[slot, :count] = torch.tensor(ids, dtype=torch.int32)
        for position in range(end):
            place = cache[:, ids[position // block_size], position % block_size]
            place.copy_(torch.randn(2, kv_heads, dim, generator=generator))
    query = torch.randn(sum(counts), heads + 2, dim, generator=generator)[:, :heads]
    tokens = [sum(counts[:index]) for index in range(len(counts))]
    integers = [torch.tensor(item, dtype=torch.int32, device=device) for item in (starts, tokens, counts)]
    return Batch(
        query.to(dtype).to(device), cache.to(dtype).to(device), table.to(device), slots.int().to(device), *integers
    )


def with_spans(batch: Batch) -> Batch:
    """The batch with two spans in each run of more than three queries, of which the second ends it."""
    ends = []
    for start, count in zip(batch.starts.tolist(), batch.counts.tolist(), strict=True):
        own = torch.arange(start, start + count, dtype=torch.int32) + 1
        for first, end in spans_of(start, count):
            own[first - start : end - start] = end
        ends.append(own)
    return batch._replace(ends=torch.cat(ends).to(batch.query.device))


def attention_reference(
    batch: Batch, scale: float, window: int | None, softcap: float | None, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    heads, kv_heads, dim = batch.query.shape[1], *batch.cache.shape[3:]
    out = []
    for slot, start, count, token in zip(
        batch.slots.tolist(), batch.starts.tolist(), batch.counts.tolist(), batch.tokens.tolist(), strict=True
    ):
        keys = batch.cache[:, batch.table[slot].long()].double().reshape(2, -1, kv_heads, dim)[:, : start + count]
        key, value = keys.repeat_interleave(heads // kv_heads, 2)
        scores = torch.einsum("qhd,khd->hqk", batch.query[token : token + count].double(), key) * scale
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        position = torch.arange(start, start + count, device=scores.device)[:, None]
        other = torch.arange(start + count, device=scores.device)[None]
        hidden = other > position
        if batch.ends is not None:
            hidden = other >= batch.ends[token : token + count, None]
        if window is not None:
            hidden |= other <= position - window
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, count, 1)), -1)
        out.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : start + count], value))
    return torch.cat(out)


def decode(
    batch: Batch,
    programs: int = 1,
    keys: int = 16,
    shared: SharedPrefix | None = None,
    unsplit: int = 16,
    **options: Any,
) -> torch.Tensor:
    """The result of `decode_attention`; checks that counters are reset and that nothing is written beyond its scratch
    memory.
    """
    arrived = torch.zeros(len(batch.query) * batch.cache.shape[3], dtype=torch.int32, device=batch.query.device)
    out = torch.full_like(batch.query, float("nan"), memory_format=torch.contiguous_format)
    behind: list[torch.Tensor] = []

    def empty(*shape: Any, **kind: Any) -> torch.Tensor:
        count = math.prod(shape[0] if isinstance(shape[0], tuple) else shape)
        memory = torch.full((count + 100_000,), float("nan"), **kind)
        behind.append(memory[count:])
        return memory[:count].view(*shape)

    with mock.patch.object(torch, "empty", empty):
        decode_attention(
            batch.query,
            CachedLayer(batch.cache, 0.3, **options),
            batch.table,
            Decodes(batch.slots, batch.starts),
            arrived,
            out,
            DecodeShape(keys, programs, 4, 2, unsplit),
            shared,
        )
    assert not arrived.any()
    assert behind, "parts have another memory"
    assert all(memory.isnan().all() for memory in behind)
    return out


def runs_of(batch: Batch, queries: int) -> Runs:
    """The requests, in tiles of so many queries."""
    counts = batch.counts.tolist()
    tiles = [(index, first) for index, count in enumerate(counts) for first in range(0, count, queries)]
    requests, firsts = torch.tensor(tiles, dtype=torch.int32, device=batch.query.device).T.contiguous()
    return Runs(batch.slots, batch.starts, batch.tokens, batch.counts, requests, firsts, batch.ends)


def prefill(batch: Batch, **options: Any) -> torch.Tensor:
    """The result of `prefill_attention`."""
    out = torch.full_like(batch.query, float("nan"), memory_format=torch.contiguous_format)
    prefill_attention(
        batch.query,
        CachedLayer(batch.cache, 0.3, **options),
        batch.table,
        runs_of(batch, 16),
        out,
        PrefillShape(16, 16, 4, 2),
    )
    return out


def split(batch: Batch, splits: int = 1, **options: Any) -> torch.Tensor:
    """The result of `split_attention`; checks that counters are reset."""
    heads, kv_heads = batch.query.shape[1], batch.cache.shape[3]
    runs = runs_of(batch, 32 // next_power_of_2(heads // kv_heads))
    arrived = torch.zeros(len(runs.tile_request) * kv_heads, dtype=torch.int32, device=batch.query.device)
    out = torch.full_like(batch.query, float("nan"), memory_format=torch.contiguous_format)
    split_attention(
        batch.query,
        CachedLayer(batch.cache, 0.3, **options),
        batch.table,
        runs,
        out,
        arrived,
        SplitShape(32, 16, splits, 1000, 16, 4, 2),
    )
    assert not arrived.any()
    return out


def make_sinks(heads: int, sunk: bool, device: torch.device) -> torch.Tensor | None:
    """Logits far below the scores, among them, and far above."""
    return torch.linspace(-30, 6, heads, device=device) if sunk else None


def give_back(batch: Batch, window: int) -> None:
    """Let others write to the blocks of which the first query of each request sees nothing; tables name them still.

    They write what is no number where the dtype has it, and the largest otherwise.
    """
    size, dtype = batch.cache.shape[2], batch.cache.dtype
    others = torch.tensor([float("nan"), float("inf")] if dtype.is_floating_point else [127.0, -127.0])
    others = others.to(batch.cache).repeat(batch.cache.shape[4] // 2)
    for slot, start in zip(batch.slots.tolist(), batch.starts.tolist(), strict=True):
        passed = max(0, start + 1 - window) // size
        for block in batch.table[slot, :passed].tolist():
            batch.cache[:, block] = others
