"""Attention over the paged cache beside float64, and the same result however a launch is cut."""

import itertools
import math
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from kvern.kernels.attention_decode import DecodeShape, decode_attention
from kvern.kernels.attention_prefill import PrefillShape, prefill_attention
from kvern.kernels.attention_prefix import SharedPrefix, prefix_members
from kvern.kernels.attention_split import SplitShape, split_attention
from kvern.kernels.launch import next_power_of_2
from tests.kernels.test_norm import relative_error
from tests.pairwise import pairwise

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


def reference(
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
    """What `decode_attention` finds, its counters zeros again, and nothing written behind its memory for parts."""
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
            batch.cache,
            batch.table,
            batch.slots,
            batch.starts,
            arrived,
            out,
            DecodeShape(keys, programs, 4, 2, unsplit),
            scale=0.3,
            shared=shared,
            **options,
        )
    assert not arrived.any()
    assert behind, "parts have another memory"
    assert all(memory.isnan().all() for memory in behind)
    return out


def tiles_of(batch: Batch, queries: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Requests, and first queries, of tiles of so many queries."""
    counts = batch.counts.tolist()
    tiles = [(index, first) for index, count in enumerate(counts) for first in range(0, count, queries)]
    requests, firsts = torch.tensor(tiles, dtype=torch.int32, device=batch.query.device).T.contiguous()
    return requests, firsts


def prefill(batch: Batch, **options: Any) -> torch.Tensor:
    """What `prefill_attention` finds."""
    out = torch.full_like(batch.query, float("nan"), memory_format=torch.contiguous_format)
    prefill_attention(
        *batch,
        *tiles_of(batch, 16),
        out,
        PrefillShape(16, 16, 4, 2),
        scale=0.3,
        **options,
    )
    return out


def split(batch: Batch, splits: int = 1, **options: Any) -> torch.Tensor:
    """What `split_attention` finds, its counters zeros again."""
    heads, kv_heads = batch.query.shape[1], batch.cache.shape[3]
    requests, firsts = tiles_of(batch, 32 // next_power_of_2(heads // kv_heads))
    arrived = torch.zeros(len(requests) * kv_heads, dtype=torch.int32, device=batch.query.device)
    out = torch.full_like(batch.query, float("nan"), memory_format=torch.contiguous_format)
    split_attention(
        *batch,
        requests,
        firsts,
        out,
        arrived,
        SplitShape(32, 16, splits, 1000, 16, 4, 2),
        scale=0.3,
        **options,
    )
    assert not arrived.any()
    return out


SHAPES = [(4, 2, 16), (3, 3, 24), (8, 1, 20)]
KINDS = [(None, None, True), (7, None, False), (None, 5.0, False), (3, 2.0, True)]
OPTIONS = ("heads", "kv_heads", "dim", "window", "softcap", "sunk")


def make_sinks(heads: int, sunk: bool, device: torch.device) -> torch.Tensor | None:
    """Logits far below the scores, among them, and far above."""
    return torch.linspace(-30, 6, heads, device=device) if sunk else None


@pytest.mark.parametrize((*OPTIONS, "programs"), pairwise(SHAPES, KINDS, [1, 24]))
def test_decode(
    device: torch.device,
    heads: int,
    kv_heads: int,
    dim: int,
    window: int | None,
    softcap: float | None,
    sunk: bool,
    programs: int,
) -> None:
    sinks = make_sinks(heads, sunk, device)
    batch = make_batch(device, [0, 5, 200, 16], [1, 1, 1, 1], heads, kv_heads, dim, torch.float32)
    out = decode(batch, programs, window=window, softcap=softcap, sinks=sinks)
    assert relative_error(out, reference(batch, 0.3, window, softcap, sinks)) < 1e-5


@pytest.mark.parametrize("window", [None, 12])
def test_requests_of_few_keys_are_not_split(device: torch.device, window: int | None) -> None:
    """Bit by bit as one program alone finds them; those of one key more are."""
    batch = make_batch(device, [0, 63, 64, 16], [1, 1, 1, 1], 4, 2, 32, torch.float32)
    whole, found = decode(batch, window=window), decode(batch, 20, unsplit=64, window=window)
    assert torch.equal(whole[[0, 1, 3]], found[[0, 1, 3]])
    assert torch.equal(whole[2], found[2]) == (window is not None)
    assert relative_error(found, reference(batch, 0.3, window, None)) < 1e-5


@pytest.mark.parametrize("window", [None, 130])
def test_requests_that_are_helped_beside_each_other(device: torch.device, window: int | None) -> None:
    """Each has parts of its own, in front of one that has none, and behind it."""
    batch = make_batch(device, [200, 180, 5, 150], [1] * 4, 4, 2, 16, torch.float32)
    whole, found = decode(batch, window=window), decode(batch, 24, window=window)
    assert relative_error(found, reference(batch, 0.3, window, None)) < 1e-5
    assert (found != whole).flatten(1).any(1).tolist() == [True, True, False, True]


def test_the_last_of_many_requests_is_helped(device: torch.device) -> None:
    """More than a program counts at once, of which two others have long contexts; one of these is a share."""
    starts = [3] * 300
    starts[7], starts[150], starts[299] = 90, 150, 400
    batch = make_batch(device, starts, [1] * 300, 2, 1, 16, torch.float32)
    found, whole = decode(batch, 30), decode(batch)
    assert relative_error(found, reference(batch, 0.3, None, None)) < 1e-5
    differ = (found != whole).flatten(1).any(1).nonzero().flatten().tolist()
    assert differ == [150, 299], "others are read by one program each"


@pytest.mark.parametrize(OPTIONS, pairwise(SHAPES, KINDS))
def test_prefill(
    device: torch.device, heads: int, kv_heads: int, dim: int, window: int | None, softcap: float | None, sunk: bool
) -> None:
    sinks = make_sinks(heads, sunk, device)
    batch = make_batch(device, [0, 9, 30, 4], [21, 17, 1, 16], heads, kv_heads, dim, torch.float32)
    out = prefill(batch, window=window, softcap=softcap, sinks=sinks)
    assert relative_error(out, reference(batch, 0.3, window, softcap, sinks)) < 1e-5


@pytest.mark.parametrize((*OPTIONS, "splits"), pairwise(SHAPES, KINDS, [1, 3]))
def test_runs_whose_keys_are_shared_out(
    device: torch.device,
    heads: int,
    kv_heads: int,
    dim: int,
    window: int | None,
    softcap: float | None,
    sunk: bool,
    splits: int,
) -> None:
    sinks = make_sinks(heads, sunk, device)
    batch = make_batch(device, [0, 9, 60, 4], [11, 5, 1, 16], heads, kv_heads, dim, torch.float32)
    out = split(batch, splits, window=window, softcap=softcap, sinks=sinks)
    assert relative_error(out, reference(batch, 0.3, window, softcap, sinks)) < 1e-5


@pytest.mark.parametrize(
    ("programs", "softcap", "sunk", "heads", "kv_heads", "dim"),
    [
        pytest.param(
            programs,
            softcap,
            programs == 24,
            *shape,
            marks=[] if (programs == 24) == (softcap is None) else pytest.mark.nightly,
        )
        for programs, softcap, shape in itertools.product((1, 24), (None, 5.0), SHAPES)
    ],
)
def test_decode_reads_a_shared_prefix_once(
    device: torch.device, programs: int, softcap: float | None, sunk: bool, heads: int, kv_heads: int, dim: int
) -> None:
    """Requests 0, 2 and 3 share four blocks, 4 and 5 two; 1 shares nothing."""
    sinks = make_sinks(heads, sunk, device)
    batch = make_batch(device, [16, 5, 150, 20, 9, 8], [1] * 6, heads, kv_heads, dim, torch.float32)
    table = batch.table
    table[batch.slots[[2, 3]].long(), :4] = table[batch.slots[0].long(), :4]
    table[batch.slots[5].long(), :2] = table[batch.slots[4].long(), :2]
    integers = {"dtype": torch.int32, "device": device}
    members = torch.full((4, prefix_members(heads // kv_heads, dim)), -1, **integers)
    members[0, :2], members[1, 0], members[2, :2] = torch.tensor([0, 3]), 2, torch.tensor([4, 5])
    members[3, 0] = 0
    shared = SharedPrefix(
        members, torch.tensor([16, 16, 8, 0], **integers), torch.tensor([16, 0, 16, 16, 8, 8], **integers)
    )
    out = decode(batch, programs, softcap=softcap, shared=shared, sinks=sinks)
    assert relative_error(out, reference(batch, 0.3, None, softcap, sinks)) < 1e-5


@pytest.mark.parametrize("programs", [2, 24])
def test_long_requests_behind_a_shared_prefix(device: torch.device, programs: int) -> None:
    """Those of few keys know how many parts the long ones before them have, be it fewer than their keys would take."""
    batch = make_batch(device, [150, 40, 200, 30], [1] * 4, 2, 1, 16, torch.float32)
    slots, table = batch.slots.long(), batch.table
    table[slots[[1, 3]], :4] = table[slots[0], :4]
    integers = {"dtype": torch.int32, "device": device}
    members = torch.full((2, prefix_members(2, 16)), -1, **integers)
    members[0, :3] = torch.tensor([0, 1, 3])
    shared = SharedPrefix(members, torch.tensor([16, 0], **integers), torch.tensor([16, 16, 0, 16], **integers))
    out = decode(batch, programs, shared=shared, unsplit=64)
    assert relative_error(out, reference(batch, 0.3, None, None)) < 1e-5
