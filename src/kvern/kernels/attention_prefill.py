"""Attention of runs of queries over the paged cache, causal.

Layout of keys and of values: [blocks, block_size, kv_heads, head_dim]. All scores are kept as powers of two.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvern.kernels.eight_bit import factors, for_kernels, in_values, query_factors, score_scale
from kvern.kernels.launch import Launcher, next_power_of_2

LOG2_E = 1.4426950408889634


@triton.jit
def capped(scores, softcap):
    """softcap * tanh(scores / softcap), with both in powers of two."""
    turn = tl.exp2(scores * (2.0 * 1.4426950408889634 / softcap))
    return softcap * (1.0 - 2.0 / (turn + 1.0))


class PrefillShape(NamedTuple):
    """The shape of a prefill launch: queries and keys of one tile."""

    queries: int
    keys: int
    warps: int
    stages: int


@triton.jit
def prefill_tile(
    queries,
    maximum,
    total,
    gathered,
    start,
    end,
    low,
    query_position,
    key_cache,
    value_cache,
    table,
    kv_head,
    scale,
    softcap,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    block_size: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):
    dim = tl.arange(0, DIM)
    position = start + tl.arange(0, KEYS)
    if MASKED:
        known = position < end
        if WINDOW > 0:
            known &= position > low - WINDOW
        block = tl.load(table + position // block_size, mask=known, other=0).to(tl.int64)
    else:
        block = tl.load(table + position // block_size).to(tl.int64)
    place = ((block * block_size + position % block_size) * kv_heads + kv_head) * head_dim
    if MASKED:  # what lies behind the last key, or before all windows, is another's, and 0 * NaN is NaN
        in_head = dim < head_dim
        key = tl.load(key_cache + place[None, :] + dim[:, None], mask=known[None, :] & in_head[:, None], other=0.0)
        value = tl.load(value_cache + place[:, None] + dim[None, :], mask=known[:, None] & in_head[None, :], other=0.0)
    elif head_dim == DIM:
        key = tl.load(key_cache + place[None, :] + dim[:, None])
        value = tl.load(value_cache + place[:, None] + dim[None, :])
    else:
        key = tl.load(key_cache + place[None, :] + dim[:, None], mask=(dim < head_dim)[:, None], other=0.0)
        value = tl.load(value_cache + place[:, None] + dim[None, :], mask=(dim < head_dim)[None, :], other=0.0)
    key = factors(key)
    value = factors(value)
    # Without a soft cap the scale is applied with the maximum's subtraction, in one operation.
    scores = tl.dot(queries, key, input_precision="ieee")
    if SOFTCAP:
        scores = capped(scores * scale, softcap)
    if MASKED:
        visible = position[None, :] <= query_position[:, None]
        if WINDOW > 0:
            visible = visible & (position[None, :] > query_position[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
    step = 1.0 if SOFTCAP else scale
    higher = tl.maximum(maximum, tl.max(scores, axis=1) * step)
    if MASKED:
        higher = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores * step - higher[:, None])
    shrink = tl.exp2(maximum - higher)
    total = total * shrink + tl.sum(weights, axis=1)
    gathered = gathered * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
    return higher, total, gathered


@Launcher
@triton.jit(do_not_specialize_on_alignment=["slots", "starts", "tokens", "counts", "tile_request", "tile_first"])
def _prefill_attention_kernel(
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    block_table: tl.tensor,
    slots: tl.tensor,
    starts: tl.tensor,
    tokens: tl.tensor,
    counts: tl.tensor,
    tile_request: tl.tensor,
    tile_first: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor | None,
    sinks: tl.tensor | None,
    scale: tl.float32,
    softcap: tl.float32,
    query_stride: tl.int64,
    table_stride: tl.int64,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    block_size: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DIM: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    head = tl.program_id(0)
    kv_head = head // group
    request = tl.load(tile_request + tl.program_id(1))
    first = tl.load(tile_first + tl.program_id(1))
    count = tl.load(counts + request)
    start = tl.load(starts + request)
    token = tl.load(tokens + request).to(tl.int64)
    table = block_table + tl.load(slots + request).to(tl.int64) * table_stride
    row = first + tl.arange(0, QUERIES)
    dim = tl.arange(0, DIM)
    inside = (row < count)[:, None] & (dim < head_dim)[None, :]
    queries = tl.load(
        query + (token + row[:, None]) * query_stride + head * head_dim + dim[None, :], mask=inside, other=0.0
    )
    queries = query_factors(queries, scales, key_cache.dtype.element_ty)
    scale = score_scale(scale, scales, kv_head, key_cache.dtype.element_ty)
    query_position = start + row
    low = start + first
    end = tl.minimum(start + count, low + QUERIES)
    begin = 0
    unmasked = low // KEYS * KEYS
    if WINDOW > 0:  # at a multiple of `KEYS`, so that a token's sums do not depend on where its chunk begins
        begin = tl.maximum(low - WINDOW + 1, 0) // KEYS * KEYS
        unmasked = begin
    maximum = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    gathered = tl.zeros([QUERIES, DIM], tl.float32)
    for key in tl.range(begin, unmasked, KEYS):
        maximum, total, gathered = prefill_tile(
            queries, maximum, total, gathered, key, end, low, query_position, key_cache, value_cache, table, kv_head,
            scale, softcap, kv_heads, head_dim, block_size, WINDOW, SOFTCAP, DIM, KEYS, False,
        )  # fmt: skip
    for key in tl.range(unmasked, end, KEYS):
        maximum, total, gathered = prefill_tile(
            queries, maximum, total, gathered, key, end, low, query_position, key_cache, value_cache, table, kv_head,
            scale, softcap, kv_heads, head_dim, block_size, WINDOW, SOFTCAP, DIM, KEYS, True,
        )  # fmt: skip
    if sinks is not None:
        total += tl.exp2(tl.load(sinks + head) * 1.4426950408889634 - maximum)
    target = out + ((token + row[:, None]) * kv_heads * group + head) * head_dim + dim[None, :]
    gathered = in_values(gathered / total[:, None], scales, kv_head, kv_heads, key_cache.dtype.element_ty)
    tl.store(target, gathered.to(out.dtype.element_ty), mask=inside)


def prefill_shape(head_dim: int, long: bool = False, element_size: int = 2) -> PrefillShape:
    """Tiles for a head dimension, the accumulator of which must stay in registers, and for long or short contexts.

    Numbers of four bytes are multiplied on the ordinary cores. Their tiles, and those of heads above 256, fit the
    shared memory of every card.
    """
    if head_dim > 256:
        return PrefillShape(16, 16, 4, 2) if element_size == 4 else PrefillShape(32, 32, 8, 2)
    if element_size == 4:
        return PrefillShape(32, 32 if head_dim <= 128 else 16, 4, 2)
    if head_dim > 128:
        return PrefillShape(64, 32, 8, 2)
    return PrefillShape(128, 64, 4, 3) if long else PrefillShape(64, 64, 4, 2)


def prefill_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
    tile_request: torch.Tensor,
    tile_first: torch.Tensor,
    out: torch.Tensor,
    shape: PrefillShape,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    scales: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Causal attention of runs of queries over the cache, which holds their own keys already.

    query         [T, heads, head_dim], rows may have gaps
    cache         [2, blocks, block_size, kv_heads, head_dim]
    scales        [2, kv_heads] float32 of a cache in 8 bits
    sinks         [heads] float32: logits that take part in each head's softmax and have no value
    block_table   [slots, max_blocks] int32
    slots, starts, tokens, counts   [R] int32: row of the block table, position of the first query, its index among
                  the T, and the number of queries
    tile_request, tile_first        [tiles] int32: for each run of `shape.queries` queries the request, and the first
                  query's index within it
    out           [T, heads, head_dim]; only the rows of these requests are written

    Computes 4 * heads * head_dim operations for each pair of a query and a key it sees.
    """
    _, heads, head_dim = query.shape
    _, _, block_size, kv_heads, _ = cache.shape
    cache = for_kernels(cache)
    _prefill_attention_kernel[(heads, tile_request.shape[0])](
        query,
        cache[0],
        cache[1],
        block_table,
        slots,
        starts,
        tokens,
        counts,
        tile_request,
        tile_first,
        out,
        scales,
        sinks,
        scale * LOG2_E,
        (softcap or 0.0) * LOG2_E,
        query.stride(0),
        block_table.stride(0),
        kv_heads,
        heads // kv_heads,
        head_dim,
        block_size,
        window or 0,
        softcap is not None,
        max(16, next_power_of_2(head_dim)),
        shape.queries,
        shape.keys,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
