"""Attention of short runs of queries over long contexts: programs share a run's keys, and join what each one found.

The query heads that read the same keys stand beside each other as rows of one tile, so that keys are read once for all
of them. Layout of keys and of values: [blocks, block_size, kv_heads, head_dim]. All scores are kept as powers of two.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvern.kernels.attention_loop import (
    attend,
    beside_sinks,
    first_blocks,
    first_tile,
    join_parts,
    most_rows,
    parts_at_a_time,
)
from kvern.kernels.attention_prefill import LOG2_E
from kvern.kernels.eight_bit import for_kernels, in_values, padded_dim, query_factors, score_scale
from kvern.kernels.launch import Launcher, next_power_of_2, overlaps, wait_for_previous


class SplitShape(NamedTuple):
    """The shape of a launch: rows and keys of a tile, and the most programs that share the keys of one.

    Tiles are split so that there are about `programs` of them in all, as many as run at once. Each takes at least
    `span` keys: below, joining the parts costs more than it gains.
    """

    rows: int
    keys: int
    splits: int
    programs: int
    span: int
    warps: int
    stages: int


@triton.jit
def all_keys(starts, counts, requests, WINDOW: tl.constexpr):
    """Returns the number of keys that all requests attend to."""
    keys = 0
    for first in tl.range(0, requests, 256):
        request = first + tl.arange(0, 256)
        inside = request < requests
        count = tl.load(counts + request, mask=inside, other=0)
        length = tl.load(starts + request, mask=inside, other=0) + count
        if WINDOW > 0:
            length = tl.minimum(length, WINDOW + count)
        keys += tl.sum(tl.where(count > 0, length, 0), axis=0)
    return keys


@Launcher
@triton.jit(
    do_not_specialize=["requests", "splits", "programs", "span"],
    do_not_specialize_on_alignment=["slots", "starts", "tokens", "counts", "tile_request", "tile_first"],
)
def _split_attention_kernel(
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
    partial: tl.tensor,
    partial_sum: tl.tensor,
    arrived: tl.tensor,
    scales: tl.tensor | None,
    sinks: tl.tensor | None,
    scale: tl.float32,
    softcap: tl.float32,
    query_stride: tl.int64,
    table_stride: tl.int64,
    requests,
    splits,
    programs,
    span,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    block_size: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    tile = tl.program_id(2)
    request = tl.load(tile_request + tile)
    first = tl.load(tile_first + tile)
    count = tl.load(counts + request)
    start = tl.load(starts + request)
    token = tl.load(tokens + request).to(tl.int64)
    low = start + first
    end = tl.minimum(start + count, low + ROWS // GROUP)
    begin = first_tile(low, block_size, WINDOW, KEYS)
    pieces = 1
    if splits > 1:
        fair = tl.cdiv(all_keys(starts, counts, requests, WINDOW) * kv_heads, programs)
        pieces = tl.minimum(tl.maximum((end - begin) // tl.maximum(fair, 1), 1), splits)
    span = tl.maximum(tl.cdiv(tl.cdiv(end - begin, pieces), KEYS) * KEYS, span)
    used = tl.cdiv(end - begin, span)
    from_key = begin + split * span
    to_key = tl.minimum(from_key + span, end)
    table = block_table + tl.load(slots + request).to(tl.int64) * table_stride
    block = first_blocks(table, from_key, to_key, block_size, KEYS)
    if split >= tl.maximum(used, 1):  # programs of the next kernel have its place; one of each tile waits with them
        return
    if OVERLAP:  # the batch's description was written well before the kernel that this one overlaps with
        wait_for_previous()
    if split >= used:
        return
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIM)
    head = kv_head * group + row % GROUP
    query_row = first + row // GROUP
    real = (row % GROUP < group) & (query_row < count)
    inside = real[:, None] & (dim < head_dim)[None, :]
    queries = tl.load(
        query + ((token + query_row) * query_stride + head * head_dim)[:, None] + dim[None, :], mask=inside, other=0.0
    )
    queries = query_factors(queries, scales, key_cache.dtype.element_ty)
    scale = score_scale(scale, scales, kv_head, key_cache.dtype.element_ty)
    position = start + query_row
    maximum, total, gathered = attend(
        queries, block, from_key, to_key, position, key_cache, value_cache, table, kv_head, scale, softcap, kv_heads,
        head_dim, block_size, WINDOW, SOFTCAP, True, ROWS, DIM, KEYS,
    )  # fmt: skip
    place = (token + query_row) * kv_heads * group + head
    target = out + (place * head_dim)[:, None] + dim[None, :]
    divisor = tl.where(total == 0.0, 1.0, total)
    gathered = in_values(gathered / divisor[:, None], scales, kv_head, kv_heads, key_cache.dtype.element_ty)
    if used == 1:
        if sinks is not None:
            gathered = beside_sinks(gathered, maximum + tl.log2(divisor), sinks, head, real)
        tl.store(target, gathered.to(out.dtype.element_ty), mask=inside)
    else:
        # Whoever arrives last joins the parts, in their order, so that the order of arrival changes nothing.
        part = place * splits + split
        tl.store(partial + part[:, None] * head_dim + dim[None, :], gathered, mask=inside)
        tl.store(partial_sum + part, tl.where(total == 0.0, float("-inf"), maximum + tl.log2(divisor)), mask=real)
        tl.debug_barrier()
        counter = arrived + tile * kv_heads + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel") == used - 1:
            tl.debug_barrier()
            mixed, sums = join_parts(partial, partial_sum, place * splits, real, used, 1, head_dim, ROWS, DIM, PARTS)
            if sinks is not None:
                mixed = beside_sinks(mixed, sums, sinks, head, real)
            tl.store(target, mixed.to(out.dtype.element_ty), mask=inside)
            tl.store(counter, 0)


def split_rows(group: int, head_dim: int, most: int, element_size: int = 2) -> int:
    """Rows of a tile for runs of at most `most` queries: no more than the matrix units take at a time."""
    return 16 if most * next_power_of_2(group) <= 16 else most_rows(head_dim, element_size)


def split_queries(group: int, head_dim: int, most: int, element_size: int = 2) -> int:
    """Queries of a tile, each with a group of query heads."""
    return max(1, split_rows(group, head_dim, most, element_size) // next_power_of_2(group))


def split_shape(
    tiles: int, group: int, kv_heads: int, head_dim: int, most: int, processors: int, element_size: int = 2
) -> SplitShape:
    """Enough programs to fill the card, however few tiles of runs of at most `most` queries there are."""
    programs = 2 * processors
    splits = max(1, min(64, programs // (tiles * kv_heads)))
    rows = max(split_rows(group, head_dim, most, element_size), next_power_of_2(group))
    if element_size == 4:
        return SplitShape(rows, 32 if head_dim <= 128 else 16, splits, programs, 256, 4, 2)
    if head_dim > 128:
        return SplitShape(rows, 32, splits, programs, 256, 4 if rows == 16 else 8, 2 if element_size == 2 else 3)
    return SplitShape(rows, 64, splits, programs, 256, 4, 3 if element_size == 2 else 4)


def split_attention(
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
    arrived: torch.Tensor,
    shape: SplitShape,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    scales: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Computes `prefill_attention` for tiles of `shape.rows` / (query heads of a KV head) queries.

    arrived   at least tiles * kv_heads int32 zeros, which are zeros again afterwards

    Moves the keys and values that a tile sees once for all its rows.
    """
    count, heads, head_dim = query.shape
    _, _, block_size, kv_heads, _ = cache.shape
    group = heads // kv_heads
    overlap = overlaps(query.device)
    parts = (count, heads, shape.splits) if shape.splits > 1 else (0, 0, 0)
    partial = torch.empty(*parts, head_dim, dtype=torch.float32, device=query.device)
    partial_sum = torch.empty(parts, dtype=torch.float32, device=query.device)
    cache, dim = for_kernels(cache), padded_dim(head_dim, cache)
    _split_attention_kernel[(kv_heads, shape.splits, tile_request.shape[0])](
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
        partial,
        partial_sum,
        arrived,
        scales,
        sinks,
        scale * LOG2_E,
        (softcap or 0.0) * LOG2_E,
        query.stride(0),
        block_table.stride(0),
        slots.shape[0],
        shape.splits,
        shape.programs,
        shape.span,
        kv_heads,
        group,
        head_dim,
        block_size,
        window or 0,
        softcap is not None,
        next_power_of_2(group),
        shape.rows,
        dim,
        shape.keys,
        parts_at_a_time(shape.rows, dim, shape.warps),
        overlap,
        num_warps=shape.warps,
        num_stages=shape.stages,
        launch_pdl=overlap,
    )
