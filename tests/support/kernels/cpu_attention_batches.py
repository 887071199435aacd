"""Batches with a scattered KV cache for attention on the CPU, and reference results."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvern.attention.eight_bit import LARGEST_CODE, store_tokens
from kvern.cpu.attention import AttentionForm, CachedLayer, Step

SEED = itertools.count()
MIXED = [(0, 70), (299, 1), (41, 3), (0, 1), (130, 33), (767, 1)]
"""First position and number of tokens of each request: prompts, parts of them, decodes."""


@dataclass(frozen=True)
class Case:
    """Parameters of attention; with `value_dim` values are the first entries of keys."""

    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 64
    value_dim: int | None = None
    block_size: int = 16
    scale: float = 0.2
    window: int | None = None
    softcap: float | None = None
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype = torch.bfloat16
    sinks: bool = False
    spans: bool = False

    def logits(self) -> Tensor | None:
        """Logits of the sinks: far below the scores, among them, and far above."""
        return torch.linspace(-30, 6, self.heads) if self.sinks else None


@dataclass
class Batch:
    """Requests, and the keys and values of each, in scattered blocks of a cache that else holds none.

    keys, values [end, kv_heads, head_dim or value_dim] float64, as the cache has them; query [tokens, heads, head_dim]
    """

    case: Case
    requests: list[tuple[int, int]]
    cache: Tensor
    scales: Tensor | None
    table: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    queries: list[Tensor]
    ends: list[Tensor] = field(default_factory=list)

    def attend(self, chosen: Sequence[int] | None = None, wanted: Tensor | None = None) -> Tensor:
        chosen = range(len(self.requests)) if chosen is None else chosen
        starts, counts = zip(*(self.requests[index] for index in chosen), strict=True)
        ends = torch.cat([self.ends[index] for index in chosen]) if self.case.spans else None
        step = Step(self.table, torch.tensor([list(chosen), starts, counts]), ends)
        return self.layer().attend(step, torch.cat([self.queries[index] for index in chosen]), wanted)

    def layer(self) -> CachedLayer:
        case = self.case
        kind = case.heads, case.scale, case.window, case.softcap, case.value_dim
        return CachedLayer(self.cache, self.scales, case.dtype, AttentionForm(*kind, spans=case.spans), case.logits())

    def reference(self) -> Tensor:
        case, parts = self.case, []
        for (start, count), key, value, query, ends in zip(
            self.requests, self.keys, self.values, self.queries, self.ends, strict=True
        ):
            key, value = (item.repeat_interleave(case.heads // case.kv_heads, 1) for item in (key, value))
            scores = torch.einsum("qhd,khd->hqk", query.double(), key) * case.scale
            if case.softcap is not None:
                scores = case.softcap * (scores / case.softcap).tanh()
            position, other = torch.arange(start, start + count)[:, None], torch.arange(start + count)
            hidden = other >= (ends if case.spans else position[:, 0] + 1)[:, None]
            if case.window is not None:
                hidden |= other <= position - case.window
            scores = scores.masked_fill(hidden, float("-inf"))
            if (sinks := case.logits()) is not None:
                scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, count, 1)), -1)
            parts.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : start + count], value))
        return torch.cat(parts)


def make_batch(case: Case, requests: list[tuple[int, int]], shared: int = 0) -> Batch:
    """`shared`: so many keys, whole blocks, are the same for all requests and in the same blocks."""
    generator = torch.Generator().manual_seed(next(SEED))
    size, common = case.block_size, shared // case.block_size
    blocks = [-(-(start + count) // size) for start, count in requests]
    order = iter((torch.randperm(sum(blocks) + common + 1, generator=generator) + 1).tolist())
    prefix = list(itertools.islice(order, common))
    table = torch.full((len(requests), max(blocks)), -(2**31), dtype=torch.int32)  # what is unused is no block
    for row, count in enumerate(blocks):
        table[row, :count] = torch.tensor(prefix + list(itertools.islice(order, count - common)))
    kinds = 2 if case.value_dim is None else 1
    shape = (kinds, sum(blocks) + common + 3, size, case.kv_heads, case.head_dim)
    eight_bit = case.cache_dtype in LARGEST_CODE
    scales = torch.rand(2, case.kv_heads, generator=generator) / 50 + 0.01 if eight_bit else None
    cache = torch.full(shape, 0x7F if eight_bit else float("nan"), dtype=torch.uint8 if eight_bit else case.cache_dtype)
    cache = cache.view(case.cache_dtype)
    batch = Batch(case, requests, cache, scales, table, [], [], [])
    same = torch.randn(kinds, shared, case.kv_heads, case.head_dim, generator=generator)
    for row, (start, count) in zip(table, requests, strict=True):
        own = torch.randn(kinds, start + count - shared, case.kv_heads, case.head_dim, generator=generator)
        numbers = torch.cat([same, own], 1).to(case.dtype)
        positions = torch.arange(start + count)
        places = row[positions // size].long() * size + positions % size
        for kind in range(kinds):
            store_tokens(cache[kind].flatten(0, 1), places, numbers[kind], None if scales is None else scales[kind])
        raw = cache.view(torch.uint8) if eight_bit else cache
        stored = raw.flatten(1, 2)[:, places].view(case.cache_dtype).double()
        if scales is not None:
            stored = stored * scales[:, None, :, None]
        batch.keys.append(stored[0])
        batch.values.append(stored[-1][..., : case.value_dim])
        batch.queries.append(torch.randn(count, case.heads, case.head_dim, generator=generator).to(case.dtype))
        batch.ends.append(torch.arange(start, start + count) + 1)
        for first, end in spans_of(start, count):
            batch.ends[-1][first - start : end - start] = end
    return batch


def spans_of(start: int, count: int) -> list[tuple[int, int]]:
    """Two spans of a run of tokens, of which the second ends it; none of a short run."""
    return [(start + 2, start + 2 + count // 3), (start + count - count // 3, start + count)] if count > 3 else []


def close(found: Tensor, expected: Tensor, case: Case) -> None:
    limit = 2e-6 if case.dtype == torch.float32 else 1e-2
    if case.softcap is not None:
        limit *= 4
    assert (found.double() - expected).abs().max() <= limit * expected.abs().max()
