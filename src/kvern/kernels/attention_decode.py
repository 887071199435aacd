"""Attention of one query for each request over the paged cache.

Layout of keys and of values: [blocks, block_size, kv_heads, head_dim]. All scores are kept as powers of two.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kvern.kernels.attention_arguments import (
    CachedLayer,
    Decodes,
    Pages,
    Parts,
    empty_parts,
    pages_of,
    scored,
    stages_of,
    tile_shape,
)
from kvern.kernels.attention_loop import attend, beside_sinks, first_blocks, first_tile, join_parts, parts_at_a_time
from kvern.kernels.attention_prefix import SharedPrefix, attend_to_prefix, prefix_parts
from kvern.kernels.eight_bit import in_values, query_factors, score_scale
from kvern.kernels.launch import Launcher, Rows, next_power_of_2, rows_of, wait_for_previous


class DecodeShape(NamedTuple):
    """The shape of a decode launch: the keys of one tile, and the number of helping `programs`.

    One program attends for each request and KV head, and others help with requests that have several times as many keys
    as each of these would have of all; not with those of up to `unsplit`, where joining parts costs more than it gains.
    """

    tile: int
    programs: int
    warps: int
    stages: int
    unsplit: int = 512


JOINED = tl.constexpr(16.0)
"""Keys that a program reads in the time that joining one more part takes."""
REQUESTS = tl.constexpr(256)
"""The number of requests whose keys a program counts at once."""


class _Batch(NamedTuple):
    """Arguments that the kernel is not compiled for: `Decodes`, their number, keys and parts of `SharedPrefix`."""

    slots: Any
    starts: Any
    shared_keys: Any
    requests: Any
    prefix_parts: Any


@triton.jit
def _own_keys(length, batch, request, inside, SHAPE: tl.constexpr, SHARED: tl.constexpr):
    """Returns the first key that requests of these lengths read for themselves, and the number of such keys."""
    base = first_tile(length - 1, SHAPE)
    if SHARED:
        base = tl.load(batch.shared_keys + request, mask=inside, other=0)
    return base, length - base


@triton.jit
def _own_keys_from(first, batch, SHAPE: tl.constexpr, SHARED: tl.constexpr):
    """Returns the number of keys that each of REQUESTS requests from `first` on reads for itself; 0 beyond the last."""
    request = first + tl.arange(0, REQUESTS)
    inside = request < batch.requests
    length = tl.load(batch.starts + request, mask=inside, other=-1).to(tl.int32) + 1
    _, keys = _own_keys(length, batch, request, inside, SHAPE, SHARED)
    return keys


@triton.jit
def all_keys(batch, SHAPE: tl.constexpr, SHARED: tl.constexpr):
    """Returns the number of keys that all requests read for themselves."""
    keys = 0
    for first in tl.range(0, batch.requests, REQUESTS):
        keys += tl.sum(_own_keys_from(first, batch, SHAPE, SHARED), axis=0)
    return keys


@triton.jit
def _pieces(keys, fair, UNSPLIT: tl.constexpr):
    """Returns how many programs share the keys of a request, limited by the cost of joining their parts."""
    most = tl.sqrt_rn(keys / JOINED).to(tl.int32)
    return tl.where(keys > UNSPLIT, tl.maximum(tl.minimum(keys // tl.maximum(fair, 1), most), 1), 1)


@triton.jit
def _helped(request, helper, batch, fair, SHAPE: tl.constexpr, SHARED: tl.constexpr, UNSPLIT: tl.constexpr):
    """Returns the request that a helper helps, and the helpers of earlier requests; for `helper` -1 those before
    `request`."""
    count = 0
    before = 0
    helped = 0
    for first in tl.range(0, batch.requests, REQUESTS):
        other = first + tl.arange(0, REQUESTS)
        keys = _own_keys_from(first, batch, SHAPE, SHARED)
        helpers = _pieces(keys, fair, UNSPLIT) - 1
        ends = count + tl.cumsum(helpers, axis=0)
        earlier = (other < batch.requests) & tl.where(helper < 0, other < request, ends <= helper)
        helped += tl.sum(earlier.to(tl.int32), axis=0)
        before = tl.maximum(before, tl.max(tl.where(earlier, ends, 0), axis=0))
        count += tl.sum(helpers, axis=0)
    return helped, before


@Launcher
@triton.jit(do_not_specialize=["batch"])
def _decode_attention_kernel(
    query: Rows,
    pages: Pages,
    batch: _Batch,
    out,
    parts: Parts,
    prefix: Parts,
    arrived,
    scale: tl.float32,
    softcap: tl.float32,
    SHAPE: tl.constexpr,
    SHARED: tl.constexpr,
    HEADS: tl.constexpr,
    UNSPLIT: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    kv_head = tl.program_id(0)
    request = tl.program_id(1)
    # The batch's description was written well before the kernel that this one overlaps with.
    helpers = tl.num_programs(1) - batch.requests
    split = 0
    before = 0
    fair = 0
    if request >= batch.requests:
        helper = request - batch.requests
        fair = tl.cdiv(all_keys(batch, SHAPE, SHARED), helpers)
        request, before = _helped(0, helper, batch, fair, SHAPE, SHARED, UNSPLIT)
        split = helper - before + 1
        if request >= batch.requests:  # nobody needs help: programs of the next kernel have this one's place
            return
    length = tl.load(batch.starts + request).to(tl.int32) + 1
    base, keys = _own_keys(length, batch, request, True, SHAPE, SHARED)
    pieces = 1
    if (keys > UNSPLIT) | SHARED:  # of those that share a prefix all leave parts, behind those of the requests before
        if split == 0:
            fair = tl.cdiv(all_keys(batch, SHAPE, SHARED), helpers)
        pieces = _pieces(keys, fair, UNSPLIT)
        if (split == 0) & ((pieces > 1) | SHARED):
            _, before = _helped(request, -1, batch, fair, SHAPE, SHARED, UNSPLIT)
    span = tl.cdiv(tl.cdiv(keys, pieces), SHAPE.KEYS) * SHAPE.KEYS
    used = tl.cdiv(keys, span)
    begin = base + split * span
    end = tl.minimum(begin + span, length)
    table = pages.table + tl.load(batch.slots + request).to(tl.int64) * pages.table_stride
    block = first_blocks(table, begin, end, SHAPE)
    if split >= used:
        return
    wait_for_previous(OVERLAP)
    row = tl.arange(0, SHAPE.ROWS)
    dim = tl.arange(0, SHAPE.DIM)
    head = kv_head * SHAPE.group + row
    in_query = (row < SHAPE.group)[:, None] & (dim < SHAPE.head_dim)[None, :]
    asked = query.pointer + request.to(tl.int64) * query.stride
    queries = tl.load(asked + head[:, None] * SHAPE.head_dim + dim[None, :], mask=in_query, other=0.0)
    queries = query_factors(queries, pages.scales, pages.keys.dtype.element_ty)
    scale = score_scale(scale, pages.scales, kv_head, pages.keys.dtype.element_ty)
    position = length - 1 + row * 0
    maximum, total, gathered = attend(
        queries, block, begin, end, position, position, pages, table, kv_head, scale, softcap, SHAPE, False
    )
    pair = request.to(tl.int64) * SHAPE.kv_heads + kv_head
    divisor = tl.where(total == 0.0, 1.0, total)
    gathered = in_values(
        gathered / divisor[:, None], pages.scales, kv_head, SHAPE.kv_heads, pages.keys.dtype.element_ty
    )
    sums = tl.where(total == 0.0, float("-inf"), maximum + tl.log2(divisor))
    alone = used == 1
    if SHARED:
        alone = alone & (base == 0)
    if alone:
        if pages.sinks is not None:
            gathered = beside_sinks(gathered, sums, pages.sinks, head, row < SHAPE.group)
        target = out + (pair * SHAPE.group + row)[:, None] * SHAPE.head_dim + dim[None, :]
        tl.store(target, gathered.to(out.dtype.element_ty), mask=in_query)
    else:
        # Parts of a request stand behind each other, and behind those of the requests before.
        first_part = (before + request) * SHAPE.kv_heads + kv_head
        part = (first_part + split * SHAPE.kv_heads).to(tl.int64) * SHAPE.group + row
        tl.store(parts.means + part[:, None] * SHAPE.head_dim + dim[None, :], gathered, mask=in_query)
        tl.store(parts.sums + part, sums, mask=row < SHAPE.group)
        tl.debug_barrier()
        # Whoever arrives last joins the parts, in their order, so that the order of arrival changes nothing.
        if tl.atomic_add(arrived + pair, 1, sem="acq_rel") == used - 1:
            tl.debug_barrier()
            member = tl.arange(0, HEADS)
            real = member < SHAPE.group
            place = first_part.to(tl.int64) * SHAPE.group + member
            mixed, all_sums = join_parts(parts, place, real, used, SHAPE.kv_heads * SHAPE.group, SHAPE, HEADS, PARTS)
            if SHARED:
                place = (pair * SHAPE.group + member) * batch.prefix_parts
                known = tl.where(base > 0, batch.prefix_parts, 0)
                common, common_sums = join_parts(prefix, place, real, known, 1, SHAPE, HEADS, PARTS)
                higher = tl.maximum(all_sums, common_sums)
                own, other = tl.exp2(all_sums - higher), tl.exp2(common_sums - higher)
                mixed = (mixed * own[:, None] + common * other[:, None]) / (own + other)[:, None]
                all_sums = higher + tl.log2(own + other)
            if pages.sinks is not None:
                mixed = beside_sinks(mixed, all_sums, pages.sinks, kv_head * SHAPE.group + member, real)
            joined = out + (pair * SHAPE.group + member)[:, None] * SHAPE.head_dim + dim[None, :]
            tl.store(joined, mixed.to(out.dtype.element_ty), mask=real[:, None] & (dim < SHAPE.head_dim)[None, :])
            tl.store(arrived + pair, 0)


def decode_shape(requests: int, kv_heads: int, head_dim: int, processors: int, element_size: int = 2) -> DecodeShape:
    """Tiles that keep the memory busy, and of which a processor holds so many programs that it gets as many as others.

    Of numbers of one byte more keys are on their way: as many bytes.
    """
    if head_dim > 256:
        keys, deep = {4: (16, 2), 2: (16, 3), 1: (32, 3)}[element_size]
        return DecodeShape(keys, 2 * processors, 4, deep)
    if element_size == 4:
        return DecodeShape(32 if head_dim <= 128 else 16, 3 * processors, 4, 2)
    if head_dim > 128:
        return DecodeShape(32 if element_size == 2 else 64, 3 * processors, 4, 3)
    if element_size == 1:
        return DecodeShape(64, 4 * processors, 2, 4)
    each = requests * kv_heads / processors
    if 0.25 < each <= 1:  # four programs of a processor, for helpers
        return DecodeShape(32, 4 * processors, 2, 4)
    if each <= 2 or 3.5 < each <= 4:  # two at a time, once or twice
        return DecodeShape(64, 2 * processors, 4, 4)
    return DecodeShape(64, 3 * processors, 4, 3)


def decode_attention(
    query: torch.Tensor,
    layer: CachedLayer,
    table: torch.Tensor,
    decodes: Decodes,
    arrived: torch.Tensor,
    out: torch.Tensor,
    shape: DecodeShape,
    shared: SharedPrefix | None = None,
) -> None:
    """Attention of one query for each of R requests, one at least, over all its keys, its own included.

    query    [R, heads, head_dim], rows may have gaps
    table    [slots, max_blocks] int32: block tables
    arrived  at least R * kv_heads int32 zeros, which are zeros again afterwards
    out      [R, heads, head_dim], contiguous
    shared   prefixes to be read once for several requests; not together with a window

    Moves the keys and values of each request once: 2 * length * kv_heads * head_dim * itemsize bytes; those of a shared
    prefix once for each of its tiles.
    """
    requests, heads, head_dim = query.shape
    kv_heads = layer.cache.shape[3]
    group = heads // kv_heads
    rows = next_power_of_2(group)
    of_tile = tile_shape(query, layer, max(16, rows), shape.tile)
    helpers = max(1, shape.programs // kv_heads)
    parts = empty_parts((requests + helpers) * kv_heads, group, head_dim=head_dim, device=query.device)
    prefix = parts
    shared_keys = decodes.slots
    before = 0
    if shared is not None:
        shared_keys = shared.keys
        before = prefix_parts(kv_heads, len(shared.members))
        prefix = empty_parts(requests, heads, before, head_dim=head_dim, device=query.device)
        attend_to_prefix(query, layer, table, decodes.slots, shared, prefix)
    _decode_attention_kernel[(kv_heads, requests + helpers)](
        rows_of(query),
        pages_of(layer, table),
        _Batch(*decodes, shared_keys, requests, before),
        out,
        parts,
        prefix,
        arrived,
        *scored(layer),
        of_tile,
        shared is not None,
        rows,
        shape.unsplit,
        parts_at_a_time(rows, of_tile.DIM, shape.warps),
        num_warps=shape.warps,
        num_stages=stages_of(query, layer, of_tile, shape.stages),
    )
