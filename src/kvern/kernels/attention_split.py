"""Attention of short runs of queries over long contexts: programs share a run's keys, and join what each one found.

The query heads that read the same keys stand beside each other as rows of one tile, so that keys are read once for all
of them. Layout of keys and of values: [blocks, block_size, kv_heads, head_dim]. All scores are kept as powers of two.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kvern.kernels.attention_arguments import (
    CachedLayer,
    Pages,
    Parts,
    Runs,
    empty_parts,
    pages_of,
    scored,
    stages_of,
    tile_shape,
)
from kvern.kernels.attention_loop import (
    attend,
    beside_sinks,
    first_blocks,
    first_tile,
    join_parts,
    most_rows,
    parts_at_a_time,
)
from kvern.kernels.attention_prefill import last_keys
from kvern.kernels.eight_bit import in_values, query_factors, score_scale
from kvern.kernels.launch import Launcher, Rows, next_power_of_2, rows_of, wait_for_previous


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


class Cut(NamedTuple):
    """The sharing out of keys: the number of requests, and the splits, programs and span of `SplitShape`."""

    requests: Any
    splits: Any
    programs: Any
    span: Any


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
@triton.jit(do_not_specialize=["cut"], do_not_specialize_on_alignment=["runs"])
def _split_attention_kernel(
    query: Rows,
    pages: Pages,
    runs: Runs,
    cut: Cut,
    out,
    parts: Parts,
    arrived,
    scale: tl.float32,
    softcap: tl.float32,
    SHAPE: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    tile = tl.program_id(2)
    request = tl.load(runs.tile_request + tile)
    first = tl.load(runs.tile_first + tile)
    count = tl.load(runs.counts + request)
    start = tl.load(runs.starts + request)
    token = tl.load(runs.tokens + request).to(tl.int64)
    low = start + first
    end = tl.minimum(start + count, low + SHAPE.ROWS // GROUP)
    if runs.ends is not None:
        asking = first + tl.arange(0, SHAPE.ROWS) // GROUP
        last = last_keys(start + asking, token + asking, asking < count, runs.ends)
        end = tl.minimum(start + count, tl.max(last, axis=0) + 1)
    begin = first_tile(low, SHAPE)
    pieces = 1
    if cut.splits > 1:
        fair = tl.cdiv(all_keys(runs.starts, runs.counts, cut.requests, SHAPE.WINDOW) * SHAPE.kv_heads, cut.programs)
        pieces = tl.minimum(tl.maximum((end - begin) // tl.maximum(fair, 1), 1), cut.splits)
    span = tl.maximum(tl.cdiv(tl.cdiv(end - begin, pieces), SHAPE.KEYS) * SHAPE.KEYS, cut.span)
    used = tl.cdiv(end - begin, span)
    from_key = begin + split * span
    to_key = tl.minimum(from_key + span, end)
    table = pages.table + tl.load(runs.slots + request).to(tl.int64) * pages.table_stride
    block = first_blocks(table, from_key, to_key, SHAPE)
    if split >= tl.maximum(used, 1):  # programs of the next kernel have its place; one of each tile waits with them
        return
    wait_for_previous(OVERLAP)  # the batch's description was written well before the kernel that this one overlaps with
    if split >= used:
        return
    row = tl.arange(0, SHAPE.ROWS)
    dim = tl.arange(0, SHAPE.DIM)
    head = kv_head * SHAPE.group + row % GROUP
    query_row = first + row // GROUP
    real = (row % GROUP < SHAPE.group) & (query_row < count)
    inside = real[:, None] & (dim < SHAPE.head_dim)[None, :]
    queries = tl.load(
        query.pointer + ((token + query_row) * query.stride + head * SHAPE.head_dim)[:, None] + dim[None, :],
        mask=inside,
        other=0.0,
    )
    queries = query_factors(queries, pages.scales, pages.keys.dtype.element_ty)
    scale = score_scale(scale, pages.scales, kv_head, pages.keys.dtype.element_ty)
    position = start + query_row
    last = last_keys(position, token + query_row, query_row < count, runs.ends)
    maximum, total, gathered = attend(
        queries, block, from_key, to_key, position, last, pages, table, kv_head, scale, softcap, SHAPE, True
    )
    place = (token + query_row) * SHAPE.kv_heads * SHAPE.group + head
    target = out + (place * SHAPE.head_dim)[:, None] + dim[None, :]
    divisor = tl.where(total == 0.0, 1.0, total)
    gathered = in_values(
        gathered / divisor[:, None], pages.scales, kv_head, SHAPE.kv_heads, pages.keys.dtype.element_ty
    )
    if used == 1:
        if pages.sinks is not None:
            gathered = beside_sinks(gathered, maximum + tl.log2(divisor), pages.sinks, head, real)
        tl.store(target, gathered.to(out.dtype.element_ty), mask=inside)
    else:
        # Whoever arrives last joins the parts, in their order, so that the order of arrival changes nothing.
        part = place * cut.splits + split
        tl.store(parts.means + part[:, None] * SHAPE.head_dim + dim[None, :], gathered, mask=inside)
        tl.store(parts.sums + part, tl.where(total == 0.0, float("-inf"), maximum + tl.log2(divisor)), mask=real)
        tl.debug_barrier()
        counter = arrived + tile * SHAPE.kv_heads + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel") == used - 1:
            tl.debug_barrier()
            mixed, sums = join_parts(parts, place * cut.splits, real, used, 1, SHAPE, SHAPE.ROWS, PARTS)
            if pages.sinks is not None:
                mixed = beside_sinks(mixed, sums, pages.sinks, head, real)
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
    layer: CachedLayer,
    table: torch.Tensor,
    runs: Runs,
    out: torch.Tensor,
    arrived: torch.Tensor,
    shape: SplitShape,
) -> None:
    """Computes `prefill_attention` for tiles of `shape.rows` / (query heads of a KV head) queries.

    arrived   at least tiles * kv_heads int32 zeros, which are zeros again afterwards

    Moves the keys and values that a tile sees once for all its rows.
    """
    count, heads, head_dim = query.shape
    of_tile = tile_shape(query, layer, shape.rows, shape.keys)
    parts = (count, heads, shape.splits) if shape.splits > 1 else (0, 0, 0)
    _split_attention_kernel[(of_tile.kv_heads, shape.splits, runs.tile_request.shape[0])](
        rows_of(query),
        pages_of(layer, table),
        runs,
        Cut(runs.slots.shape[0], shape.splits, shape.programs, shape.span),
        out,
        empty_parts(*parts, head_dim=head_dim, device=query.device),
        arrived,
        *scored(layer),
        of_tile,
        next_power_of_2(of_tile.group),
        parts_at_a_time(shape.rows, of_tile.DIM, shape.warps),
        num_warps=shape.warps,
        num_stages=stages_of(query, layer, of_tile, shape.stages),
    )
