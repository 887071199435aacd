"""Attention over the paged cache: one query a request (decode), and runs of queries (prefill), causal.

Layout of keys and of values: [blocks, block_size, kv_heads, head_dim]. All scores are kept as powers of two.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvern.kernels.launch import overlaps, wait_for_previous

LOG2_E = 1.4426950408889634


class DecodeShape(NamedTuple):
    """How a decode launch is cut: keys of one tile, and at most how many programs share one request and KV head.

    Each of them takes at least `span` keys: below, joining the parts costs more than it gains.
    """

    tile: int
    splits: int
    span: int
    warps: int
    stages: int


@triton.jit
def _capped(scores, softcap):
    """softcap * tanh(scores / softcap), with both in powers of two."""
    turn = tl.exp2(scores * (2.0 * 1.4426950408889634 / softcap))
    return softcap * (1.0 - 2.0 / (turn + 1.0))


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["slots", "starts", "shared_keys"])
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
    scale: tl.float32,
    softcap: tl.float32,
    query_stride: tl.int64,
    table_stride: tl.int64,
    splits,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    block_size: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    SPAN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    # The batch's description was written well before the kernel that this one overlaps with.
    length = tl.load(starts + request) + 1
    table = block_table + tl.load(slots + request).to(tl.int64) * table_stride
    if OVERLAP:
        wait_for_previous()
    first = 0
    shared = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    base = first // TILE * TILE
    if PARTS > 0:
        shared = tl.load(shared_keys + request)
        base = shared
    span = tl.maximum(tl.cdiv(tl.cdiv(length - base, splits), TILE) * TILE, SPAN)
    used = tl.cdiv(length - base, span)
    if split < used:
        begin = base + split * span
        end = tl.minimum(begin + span, length)
        row = tl.arange(0, GROUP)
        dim = tl.arange(0, DIM)
        head = kv_head * group + row
        in_query = (row < group)[:, None] & (dim < head_dim)[None, :]
        queries = tl.load(
            query + request * query_stride + head[:, None] * head_dim + dim[None, :], mask=in_query, other=0.0
        ).to(key_cache.dtype.element_ty)
        column = tl.arange(0, TILE)
        maximum = tl.full([GROUP], float("-inf"), tl.float32)
        total = tl.zeros([GROUP], tl.float32)
        gathered = tl.zeros([GROUP, DIM], tl.float32)
        for start in tl.range(begin, end, TILE):
            position = start + column
            known = position < end
            block = tl.load(table + position // block_size, mask=known, other=0).to(tl.int64)
            place = ((block * block_size + position % block_size) * kv_heads + kv_head) * head_dim
            key = tl.load(
                key_cache + place[None, :] + dim[:, None], mask=known[None, :] & (dim < head_dim)[:, None], other=0.0
            )
            value = tl.load(
                value_cache + place[:, None] + dim[None, :], mask=known[:, None] & (dim < head_dim)[None, :], other=0.0
            )
            scores = tl.dot(queries, key, input_precision="ieee") * scale
            if SOFTCAP:
                scores = _capped(scores, softcap)
            if WINDOW > 0:
                known = known & (position >= first)
            scores = tl.where(known[None, :], scores, float("-inf"))
            higher = tl.maximum(maximum, tl.max(scores, axis=1))
            higher = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp2(scores - higher[:, None])
            shrink = tl.exp2(maximum - higher)
            total = total * shrink + tl.sum(weights, axis=1)
            gathered = gathered * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
            maximum = higher
        index = request * kv_heads * group + head
        target = out + index[:, None] * head_dim + dim[None, :]
        divisor = tl.where(total == 0.0, 1.0, total)
        gathered /= divisor[:, None]
        if (used == 1) & (shared == 0):
            tl.store(target, gathered.to(out.dtype.element_ty), mask=in_query)
        else:
            # Whoever arrives last joins the parts, in their order, so that the order of arrival changes nothing.
            parts = PARTS + splits
            part = partial + index[:, None] * parts * head_dim + dim[None, :]
            sums = tl.where(total == 0.0, float("-inf"), maximum + tl.log2(divisor))
            tl.store(part + (PARTS + split) * head_dim, gathered, mask=in_query)
            tl.store(partial_sum + index * parts + PARTS + split, sums, mask=row < group)
            tl.debug_barrier()
            counter = arrived + request * kv_heads + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel") == used - 1:
                tl.debug_barrier()
                highest = tl.full([GROUP], float("-inf"), tl.float32)
                weight_sum = tl.zeros([GROUP], tl.float32)
                mixed = tl.zeros([GROUP, DIM], tl.float32)
                for other in tl.range(tl.where(shared == 0, PARTS, 0), PARTS + used):
                    other_sum = tl.load(
                        partial_sum + index * parts + other, mask=row < group, other=0.0, cache_modifier=".cg"
                    )
                    values = tl.load(part + other * head_dim, mask=in_query, other=0.0, cache_modifier=".cg")
                    higher = tl.maximum(highest, other_sum)
                    shrink = tl.exp2(highest - higher)
                    weight = tl.exp2(other_sum - higher)
                    mixed = mixed * shrink[:, None] + values * weight[:, None]
                    weight_sum = weight_sum * shrink + weight
                    highest = higher
                tl.store(target, (mixed / weight_sum[:, None]).to(out.dtype.element_ty), mask=in_query)
                tl.store(counter, 0)


@triton.jit(do_not_specialize=["parts"], do_not_specialize_on_alignment=["slots", "members", "tile_keys"])
def _prefix_attention_kernel(
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    block_table: tl.tensor,
    slots: tl.tensor,
    members: tl.tensor,
    tile_keys: tl.tensor,
    partial: tl.tensor,
    partial_sum: tl.tensor,
    scale: tl.float32,
    softcap: tl.float32,
    query_stride: tl.int64,
    table_stride: tl.int64,
    parts,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    block_size: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    kv_head = tl.program_id(0)
    tile = tl.program_id(1)
    part = tl.program_id(2)
    # The batch's description was written well before the kernel that this one overlaps with.
    keys = tl.load(tile_keys + tile)
    row = tl.arange(0, MEMBERS * GROUP)
    member = tl.load(members + tile * MEMBERS + row // GROUP).to(tl.int64)
    leader = tl.load(members + tile * MEMBERS)
    if OVERLAP:
        wait_for_previous()
    if keys > 0:
        table = block_table + tl.load(slots + leader).to(tl.int64) * table_stride
        span = tl.cdiv(tl.cdiv(keys, PARTS), KEYS) * KEYS
        end = tl.minimum((part + 1) * span, keys)
        head = kv_head * group + row % GROUP
        dim = tl.arange(0, DIM)
        real = (member >= 0) & (row % GROUP < group)
        inside = real[:, None] & (dim < head_dim)[None, :]
        queries = tl.load(
            query + member[:, None] * query_stride + head[:, None] * head_dim + dim[None, :], mask=inside, other=0.0
        ).to(key_cache.dtype.element_ty)
        maximum = tl.full([MEMBERS * GROUP], float("-inf"), tl.float32)
        total = tl.zeros([MEMBERS * GROUP], tl.float32)
        gathered = tl.zeros([MEMBERS * GROUP, DIM], tl.float32)
        # All queries come after the last of these keys: the mask hides what lies behind it.
        position = tl.full([MEMBERS * GROUP], 0, tl.int32) + end - 1
        for start in tl.range(part * span, end, KEYS):
            maximum, total, gathered = _prefill_tile(
                queries, maximum, total, gathered, start, end, position, key_cache, value_cache, table, kv_head, scale,
                softcap, kv_heads, head_dim, block_size, 0, SOFTCAP, DIM, KEYS, True,
            )  # fmt: skip
        divisor = tl.where(total == 0.0, 1.0, total)
        index = (member * kv_heads * group + head) * parts + part
        tl.store(partial + index[:, None] * head_dim + dim[None, :], gathered / divisor[:, None], mask=inside)
        sums = tl.where(total == 0.0, float("-inf"), maximum + tl.log2(divisor))
        tl.store(partial_sum + index, sums, mask=real)


class SharedPrefix(NamedTuple):
    """Decodes that begin with the same blocks, in tiles that attend to them together.

    members    [tiles, members] int32: indices of requests, the first of a tile always one; -1: none
    tile_keys  [tiles] int32: how many keys they have in common, 0: the tile is empty
    keys       [R] int32: the same for each request, 0: it is in no tile
    """

    members: torch.Tensor
    tile_keys: torch.Tensor
    keys: torch.Tensor


PREFIX_ROWS = 64
"""Queries of a tile: what the matrix units take at a time."""


def prefix_members(group: int) -> int:
    """How many requests share a tile, each with a group of query heads."""
    members: int = PREFIX_ROWS // triton.next_power_of_2(group)
    return max(1, members)


def decode_shape(requests: int, kv_heads: int, head_dim: int, processors: int) -> DecodeShape:
    """Enough programs to fill the card, however few requests there are; the number depends on nothing else."""
    programs = requests * kv_heads
    splits = max(1, min(64, triton.next_power_of_2(4 * processors) // (2 * triton.next_power_of_2(programs))))
    if head_dim > 128:
        return DecodeShape(32, splits, 256, 4, 3)
    return DecodeShape(128, splits, 128, 4, 2) if programs <= 2 * processors else DecodeShape(64, splits, 256, 2, 3)


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
) -> None:
    """Attention of one query for each of R requests over all its keys, its own included.

    query        [R, heads, head_dim], rows may have gaps
    cache        [2, blocks, block_size, kv_heads, head_dim]
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
    partial = partial_sum = out
    prefix_parts = 0
    if shared is not None:
        tiles, members = shared.members.shape
        prefix_parts = max(1, min(16, 512 // triton.next_power_of_2(kv_heads * tiles)))
    parts = shape.splits + prefix_parts
    if parts > 1:
        partial = torch.empty(requests, heads, parts, head_dim, dtype=torch.float32, device=query.device)
        partial_sum = torch.empty(requests, heads, parts, dtype=torch.float32, device=query.device)
    if shared is not None:
        _prefix_attention_kernel[(kv_heads, tiles, prefix_parts)](
            query,
            cache[0],
            cache[1],
            block_table,
            slots,
            shared.members,
            shared.tile_keys,
            partial,
            partial_sum,
            scale * LOG2_E,
            (softcap or 0.0) * LOG2_E,
            query.stride(0),
            block_table.stride(0),
            parts,
            kv_heads,
            group,
            head_dim,
            block_size,
            softcap is not None,
            prefix_parts,
            triton.next_power_of_2(group),
            members,
            max(16, triton.next_power_of_2(head_dim)),
            64 if head_dim <= 128 else 32,
            overlap,
            num_warps=4,
            num_stages=3 if head_dim <= 128 else 2,
            launch_pdl=overlap,
        )
    _decode_attention_kernel[(kv_heads, shape.splits, requests)](
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
        scale * LOG2_E,
        (softcap or 0.0) * LOG2_E,
        query.stride(0),
        block_table.stride(0),
        shape.splits,
        kv_heads,
        group,
        head_dim,
        block_size,
        window or 0,
        softcap is not None,
        prefix_parts,
        max(16, triton.next_power_of_2(group)),
        max(16, triton.next_power_of_2(head_dim)),
        shape.tile,
        shape.span,
        overlap,
        num_warps=shape.warps,
        num_stages=shape.stages,
        launch_pdl=overlap,
    )


class PrefillShape(NamedTuple):
    """How a prefill launch is cut: queries and keys of one tile."""

    queries: int
    keys: int
    warps: int
    stages: int


@triton.jit
def _prefill_tile(
    queries,
    maximum,
    total,
    gathered,
    start,
    end,
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
        block = tl.load(table + position // block_size, mask=known, other=0).to(tl.int64)
    else:
        block = tl.load(table + position // block_size).to(tl.int64)
    place = ((block * block_size + position % block_size) * kv_heads + kv_head) * head_dim
    if MASKED:  # what lies behind the last key may be anything, and 0 * NaN is NaN
        in_head = dim < head_dim
        key = tl.load(key_cache + place[None, :] + dim[:, None], mask=known[None, :] & in_head[:, None], other=0.0)
        value = tl.load(value_cache + place[:, None] + dim[None, :], mask=known[:, None] & in_head[None, :], other=0.0)
    elif head_dim == DIM:
        key = tl.load(key_cache + place[None, :] + dim[:, None])
        value = tl.load(value_cache + place[:, None] + dim[None, :])
    else:
        key = tl.load(key_cache + place[None, :] + dim[:, None], mask=(dim < head_dim)[:, None], other=0.0)
        value = tl.load(value_cache + place[:, None] + dim[None, :], mask=(dim < head_dim)[None, :], other=0.0)
    # Without a soft cap the scale is applied with the maximum's subtraction, in one operation.
    scores = tl.dot(queries, key, input_precision="ieee")
    if SOFTCAP:
        scores = _capped(scores * scale, softcap)
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
    ).to(key_cache.dtype.element_ty)
    query_position = start + row
    low = start + first
    end = tl.minimum(start + count, low + QUERIES)
    begin = 0
    unmasked = low // KEYS * KEYS
    if WINDOW > 0:
        begin = tl.maximum(low - WINDOW + 1, 0) // KEYS * KEYS
        unmasked = begin
    maximum = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    gathered = tl.zeros([QUERIES, DIM], tl.float32)
    for key in tl.range(begin, unmasked, KEYS):
        maximum, total, gathered = _prefill_tile(
            queries, maximum, total, gathered, key, end, query_position, key_cache, value_cache, table, kv_head, scale,
            softcap, kv_heads, head_dim, block_size, WINDOW, SOFTCAP, DIM, KEYS, False,
        )  # fmt: skip
    for key in tl.range(unmasked, end, KEYS):
        maximum, total, gathered = _prefill_tile(
            queries, maximum, total, gathered, key, end, query_position, key_cache, value_cache, table, kv_head, scale,
            softcap, kv_heads, head_dim, block_size, WINDOW, SOFTCAP, DIM, KEYS, True,
        )  # fmt: skip
    target = out + ((token + row[:, None]) * kv_heads * group + head) * head_dim + dim[None, :]
    tl.store(target, (gathered / total[:, None]).to(out.dtype.element_ty), mask=inside)


def prefill_shape(head_dim: int, long: bool = False) -> PrefillShape:
    """Tiles for a head dimension, the accumulator of which must stay in registers, and for long or short contexts."""
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
) -> None:
    """Causal attention of runs of queries over the cache, which holds their own keys already.

    query         [T, heads, head_dim], rows may have gaps
    cache         [2, blocks, block_size, kv_heads, head_dim]
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
        max(16, triton.next_power_of_2(head_dim)),
        shape.queries,
        shape.keys,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
