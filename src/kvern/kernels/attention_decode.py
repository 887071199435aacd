"""Attention of one query for each request over the paged cache.

Layout of keys and of values: [blocks, block_size, kv_heads, head_dim]. All scores are kept as powers of two.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvern.kernels.attention_loop import attend, beside_sinks, first_blocks, first_tile, join_parts, parts_at_a_time
from kvern.kernels.attention_prefill import LOG2_E
from kvern.kernels.attention_prefix import SharedPrefix, attend_to_prefix, prefix_parts
from kvern.kernels.eight_bit import for_kernels, in_values, padded_dim, query_factors, score_scale
from kvern.kernels.launch import Launcher, next_power_of_2, overlaps, stages, wait_for_previous


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
BESIDE = 8 << 10
"""Bytes of shared memory that a program takes beside tiles."""
REQUESTS = tl.constexpr(256)
"""The number of requests whose keys a program counts at once."""


@triton.jit
def _own_keys(
    length, shared_keys, request, inside, block_size: tl.constexpr, WINDOW: tl.constexpr, SHARED: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Returns the first key that requests of these lengths read for themselves, and the number of such keys."""
    base = first_tile(length - 1, block_size, WINDOW, TILE)
    if SHARED:
        base = tl.load(shared_keys + request, mask=inside, other=0)
    return base, length - base


@triton.jit
def _own_keys_from(
    first, starts, shared_keys, requests, block_size: tl.constexpr, WINDOW: tl.constexpr, SHARED: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Returns the number of keys that each of REQUESTS requests from `first` on reads for itself; 0 beyond the last."""
    request = first + tl.arange(0, REQUESTS)
    inside = request < requests
    length = tl.load(starts + request, mask=inside, other=-1).to(tl.int32) + 1
    _, keys = _own_keys(length, shared_keys, request, inside, block_size, WINDOW, SHARED, TILE)
    return keys


@triton.jit
def all_keys(
    starts, shared_keys, requests, block_size: tl.constexpr, WINDOW: tl.constexpr, SHARED: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Returns the number of keys that all requests read for themselves."""
    keys = 0
    for first in tl.range(0, requests, REQUESTS):
        of_each = _own_keys_from(first, starts, shared_keys, requests, block_size, WINDOW, SHARED, TILE)
        keys += tl.sum(of_each, axis=0)
    return keys


@triton.jit
def _pieces(keys, fair, UNSPLIT: tl.constexpr):
    """Returns how many programs share the keys of a request, limited by the cost of joining their parts."""
    most = tl.sqrt_rn(keys / JOINED).to(tl.int32)
    return tl.where(keys > UNSPLIT, tl.maximum(tl.minimum(keys // tl.maximum(fair, 1), most), 1), 1)


@triton.jit
def _helped(
    request, helper, starts, shared_keys, requests, fair, block_size: tl.constexpr, WINDOW: tl.constexpr,
    SHARED: tl.constexpr, TILE: tl.constexpr, UNSPLIT: tl.constexpr,
):  # fmt: skip
    """Returns the request that a helper helps, and the helpers of earlier requests; for `helper` -1 those before
    `request`."""
    count = 0
    before = 0
    helped = 0
    for first in tl.range(0, requests, REQUESTS):
        other = first + tl.arange(0, REQUESTS)
        keys = _own_keys_from(first, starts, shared_keys, requests, block_size, WINDOW, SHARED, TILE)
        helpers = _pieces(keys, fair, UNSPLIT) - 1
        ends = count + tl.cumsum(helpers, axis=0)
        earlier = (other < requests) & tl.where(helper < 0, other < request, ends <= helper)
        helped += tl.sum(earlier.to(tl.int32), axis=0)
        before = tl.maximum(before, tl.max(tl.where(earlier, ends, 0), axis=0))
        count += tl.sum(helpers, axis=0)
    return helped, before


@Launcher
@triton.jit(
    do_not_specialize=["requests", "prefix_parts"],
    do_not_specialize_on_alignment=["slots", "starts", "shared_keys"],
)
def _decode_attention_kernel(
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    block_table: tl.tensor,
    slots: tl.tensor,
    starts: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    partial_sum: tl.tensor,
    arrived: tl.tensor,
    shared_keys: tl.tensor,
    prefix_partial: tl.tensor,
    prefix_sum: tl.tensor,
    scales: tl.tensor | None,
    sinks: tl.tensor | None,
    scale: tl.float32,
    softcap: tl.float32,
    query_stride: tl.int64,
    table_stride: tl.int64,
    requests,
    prefix_parts,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    block_size: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SHARED: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    UNSPLIT: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    kv_head = tl.program_id(0)
    request = tl.program_id(1)
    # The batch's description was written well before the kernel that this one overlaps with.
    helpers = tl.num_programs(1) - requests
    split = 0
    before = 0
    fair = 0
    if request >= requests:
        helper = request - requests
        fair = tl.cdiv(all_keys(starts, shared_keys, requests, block_size, WINDOW, SHARED, TILE), helpers)
        request, before = _helped(
            0, helper, starts, shared_keys, requests, fair, block_size, WINDOW, SHARED, TILE, UNSPLIT
        )
        split = helper - before + 1
        if request >= requests:  # nobody needs help: programs of the next kernel have this one's place
            return
    length = tl.load(starts + request).to(tl.int32) + 1
    base, keys = _own_keys(length, shared_keys, request, True, block_size, WINDOW, SHARED, TILE)
    pieces = 1
    if (keys > UNSPLIT) | SHARED:  # of those that share a prefix all leave parts, behind those of the requests before
        if split == 0:
            fair = tl.cdiv(all_keys(starts, shared_keys, requests, block_size, WINDOW, SHARED, TILE), helpers)
        pieces = _pieces(keys, fair, UNSPLIT)
        if (split == 0) & ((pieces > 1) | SHARED):
            _, before = _helped(
                request, -1, starts, shared_keys, requests, fair, block_size, WINDOW, SHARED, TILE, UNSPLIT
            )
    span = tl.cdiv(tl.cdiv(keys, pieces), TILE) * TILE
    used = tl.cdiv(keys, span)
    begin = base + split * span
    end = tl.minimum(begin + span, length)
    table = block_table + tl.load(slots + request).to(tl.int64) * table_stride
    block = first_blocks(table, begin, end, block_size, TILE)
    if split >= used:
        return
    if OVERLAP:
        wait_for_previous()
    row = tl.arange(0, GROUP)
    dim = tl.arange(0, DIM)
    head = kv_head * group + row
    in_query = (row < group)[:, None] & (dim < head_dim)[None, :]
    asked = query + request.to(tl.int64) * query_stride
    queries = tl.load(asked + head[:, None] * head_dim + dim[None, :], mask=in_query, other=0.0)
    queries = query_factors(queries, scales, key_cache.dtype.element_ty)
    scale = score_scale(scale, scales, kv_head, key_cache.dtype.element_ty)
    maximum, total, gathered = attend(
        queries, block, begin, end, length - 1 + row * 0, key_cache, value_cache, table, kv_head, scale, softcap,
        kv_heads, head_dim, block_size, WINDOW, SOFTCAP, False, GROUP, DIM, TILE,
    )  # fmt: skip
    pair = request.to(tl.int64) * kv_heads + kv_head
    divisor = tl.where(total == 0.0, 1.0, total)
    gathered = in_values(gathered / divisor[:, None], scales, kv_head, kv_heads, key_cache.dtype.element_ty)
    sums = tl.where(total == 0.0, float("-inf"), maximum + tl.log2(divisor))
    alone = used == 1
    if SHARED:
        alone = alone & (base == 0)
    if alone:
        if sinks is not None:
            gathered = beside_sinks(gathered, sums, sinks, head, row < group)
        target = out + (pair * group + row)[:, None] * head_dim + dim[None, :]
        tl.store(target, gathered.to(out.dtype.element_ty), mask=in_query)
    else:
        # Parts of a request stand behind each other, and behind those of the requests before.
        first_part = (before + request) * kv_heads + kv_head
        part = (first_part + split * kv_heads).to(tl.int64) * group + row
        tl.store(partial + part[:, None] * head_dim + dim[None, :], gathered, mask=in_query)
        tl.store(partial_sum + part, sums, mask=row < group)
        tl.debug_barrier()
        # Whoever arrives last joins the parts, in their order, so that the order of arrival changes nothing.
        if tl.atomic_add(arrived + pair, 1, sem="acq_rel") == used - 1:
            tl.debug_barrier()
            member = tl.arange(0, HEADS)
            real = member < group
            mixed, all_sums = join_parts(
                partial, partial_sum, first_part.to(tl.int64) * group + member, real, used, kv_heads * group, head_dim,
                HEADS, DIM, PARTS,
            )  # fmt: skip
            if SHARED:
                common, common_sums = join_parts(
                    prefix_partial, prefix_sum, (pair * group + member) * prefix_parts, real,
                    tl.where(base > 0, prefix_parts, 0), 1, head_dim, HEADS, DIM, PARTS,
                )  # fmt: skip
                higher = tl.maximum(all_sums, common_sums)
                own, other = tl.exp2(all_sums - higher), tl.exp2(common_sums - higher)
                mixed = (mixed * own[:, None] + common * other[:, None]) / (own + other)[:, None]
                all_sums = higher + tl.log2(own + other)
            if sinks is not None:
                mixed = beside_sinks(mixed, all_sums, sinks, kv_head * group + member, real)
            joined = out + (pair * group + member)[:, None] * head_dim + dim[None, :]
            tl.store(joined, mixed.to(out.dtype.element_ty), mask=real[:, None] & (dim < head_dim)[None, :])
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
    cache: torch.Tensor,
    block_table: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    arrived: torch.Tensor,
    out: torch.Tensor,
    shape: DecodeShape,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    shared: SharedPrefix | None = None,
    scales: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Attention of one query for each of R requests, one at least, over all its keys, its own included.

    query        [R, heads, head_dim], rows may have gaps
    cache        [2, blocks, block_size, kv_heads, head_dim]
    scales       [2, kv_heads] float32 of a cache in 8 bits
    sinks        [heads] float32: logits that take part in each head's softmax and have no value
    block_table  [slots, max_blocks] int32
    slots        [R] integers: the row of the block table
    starts       [R] integers: the position of the query; its key and those before it are in the cache
    arrived      at least R * kv_heads int32 zeros, which are zeros again afterwards
    out          [R, heads, head_dim], contiguous

    shared       prefixes to be read once for several requests; not together with a window

    Moves the keys and values of each request once: 2 * length * kv_heads * head_dim * itemsize bytes; those of a shared
    prefix once for each of its tiles.
    """
    requests, heads, head_dim = query.shape
    _, _, block_size, kv_heads, _ = cache.shape
    group = heads // kv_heads
    overlap = overlaps(query.device)
    helpers = max(1, shape.programs // kv_heads)
    parts = (requests + helpers) * kv_heads, group
    partial = torch.empty(*parts, head_dim, dtype=torch.float32, device=query.device)
    partial_sum = torch.empty(parts, dtype=torch.float32, device=query.device)
    prefix_partial = partial
    prefix_sum = partial_sum
    before = 0
    if shared is not None:
        before = prefix_parts(kv_heads, len(shared.members))
        prefix_partial = partial.new_empty(requests, heads, before, head_dim)
        prefix_sum = partial.new_empty(requests, heads, before)
        given = query, cache, block_table, slots, shared, prefix_partial, prefix_sum
        attend_to_prefix(*given, scale=scale, softcap=softcap, scales=scales)
    cache = for_kernels(cache)
    rows, dim = next_power_of_2(group), padded_dim(head_dim, cache)
    _decode_attention_kernel[(kv_heads, requests + helpers)](
        query,
        cache[0],
        cache[1],
        block_table,
        slots,
        starts,
        out,
        partial,
        partial_sum,
        arrived,
        slots if shared is None else shared.keys,
        prefix_partial,
        prefix_sum,
        scales,
        sinks,
        scale * LOG2_E,
        (softcap or 0.0) * LOG2_E,
        query.stride(0),
        block_table.stride(0),
        requests,
        before,
        kv_heads,
        group,
        head_dim,
        block_size,
        window or 0,
        softcap is not None,
        shared is not None,
        max(16, rows),
        rows,
        dim,
        shape.tile,
        shape.unsplit,
        parts_at_a_time(rows, dim, shape.warps),
        overlap,
        num_warps=shape.warps,
        num_stages=stages(query.device, shape.stages, 2 * shape.tile * dim * cache.element_size(), BESIDE),
        launch_pdl=overlap,
    )
