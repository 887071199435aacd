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
from kvern.kernels.launch import Launcher, next_power_of_2, overlaps, wait_for_previous


class DecodeShape(NamedTuple):
    """How a decode launch is cut: keys of one tile, and at most how many programs share one request and KV head.

    Requests are split so that there are about `programs` of them in all, as many as run at once: a thread has at most
    so many `registers`, if it is said. Each takes at least `span` keys: below, joining the parts costs more than it
    gains.
    """

    tile: int
    splits: int
    programs: int
    span: int
    warps: int
    stages: int
    registers: int | None = None
    unsplit: int = 0


THREE_PROGRAMS = 168
"""Registers of a thread of which a processor has enough for three programs of four warps."""


@triton.jit
def all_keys(starts, shared_keys, requests, WINDOW: tl.constexpr, SHARED: tl.constexpr):
    """How many keys all requests attend to."""
    keys = 0
    for first in tl.range(0, requests, 256):
        request = first + tl.arange(0, 256)
        length = tl.load(starts + request, mask=request < requests, other=-1).to(tl.int32) + 1
        if WINDOW > 0:
            length = tl.minimum(length, WINDOW)
        if SHARED:
            length -= tl.load(shared_keys + request, mask=request < requests, other=0)
        keys += tl.sum(length, axis=0)
    return keys


@Launcher
@triton.jit(
    do_not_specialize=["requests", "splits", "programs", "prefix_parts"],
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
    scales: tl.tensor | None,
    sinks: tl.tensor | None,
    scale: tl.float32,
    softcap: tl.float32,
    query_stride: tl.int64,
    table_stride: tl.int64,
    requests,
    splits,
    programs,
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
    SPAN: tl.constexpr,
    UNSPLIT: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    # The batch's description was written well before the kernel that this one overlaps with.
    length = tl.load(starts + request).to(tl.int32) + 1
    table = block_table + tl.load(slots + request).to(tl.int64) * table_stride
    shared = 0
    before = 0
    base = first_tile(length - 1, block_size, WINDOW, TILE)
    if SHARED:
        shared = tl.load(shared_keys + request)
        base = shared
        before = prefix_parts
    pieces = 1
    if splits > 1:
        fair = tl.cdiv(all_keys(starts, shared_keys, requests, WINDOW, SHARED) * kv_heads, programs)
        pieces = tl.minimum(tl.maximum((length - base) // tl.maximum(fair, 1), 1), splits)
        if UNSPLIT > 0:
            pieces = tl.where(length - base <= UNSPLIT, 1, pieces)
    span = tl.maximum(tl.cdiv(tl.cdiv(length - base, pieces), TILE) * TILE, SPAN)
    used = tl.cdiv(length - base, span)
    begin = base + split * span
    end = tl.minimum(begin + span, length)
    block = first_blocks(table, begin, end, block_size, TILE)
    if split < used:  # the others end, so that programs of the next kernel have their place
        if OVERLAP:
            wait_for_previous()
        row = tl.arange(0, GROUP)
        dim = tl.arange(0, DIM)
        head = kv_head * group + row
        in_query = (row < group)[:, None] & (dim < head_dim)[None, :]
        queries = tl.load(
            query + request * query_stride + head[:, None] * head_dim + dim[None, :], mask=in_query, other=0.0
        )
        queries = query_factors(queries, scales, key_cache.dtype.element_ty)
        scale = score_scale(scale, scales, kv_head, key_cache.dtype.element_ty)
        maximum, total, gathered = attend(
            queries, block, begin, end, length - 1 + row * 0, key_cache, value_cache, table, kv_head, scale, softcap,
            kv_heads, head_dim, block_size, WINDOW, SOFTCAP, False, GROUP, DIM, TILE,
        )  # fmt: skip
        index = request * kv_heads * group + head
        target = out + index[:, None] * head_dim + dim[None, :]
        divisor = tl.where(total == 0.0, 1.0, total)
        gathered = in_values(gathered / divisor[:, None], scales, kv_head, kv_heads, key_cache.dtype.element_ty)
        if (used == 1) & (shared == 0):
            if sinks is not None:
                gathered = beside_sinks(gathered, maximum + tl.log2(divisor), sinks, head, row < group)
            tl.store(target, gathered.to(out.dtype.element_ty), mask=in_query)
        else:
            # Whoever arrives last joins the parts, in their order, so that the order of arrival changes nothing.
            parts = before + splits
            part = partial + index[:, None] * parts * head_dim + dim[None, :]
            sums = tl.where(total == 0.0, float("-inf"), maximum + tl.log2(divisor))
            tl.store(part + (before + split) * head_dim, gathered, mask=in_query)
            tl.store(partial_sum + index * parts + before + split, sums, mask=row < group)
            tl.debug_barrier()
            counter = arrived + request * kv_heads + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel") == used - 1:
                tl.debug_barrier()
                first = tl.where(shared == 0, before, 0)
                member = tl.arange(0, HEADS)
                place = (request * kv_heads + kv_head) * group + member
                real = member < group
                mixed, all_sums = join_parts(
                    partial, partial_sum, place * parts + first, real, before + used - first, 1, head_dim, HEADS, DIM,
                    PARTS,
                )  # fmt: skip
                if sinks is not None:
                    mixed = beside_sinks(mixed, all_sums, sinks, kv_head * group + member, real)
                joined = out + place[:, None] * head_dim + dim[None, :]
                tl.store(joined, mixed.to(out.dtype.element_ty), mask=real[:, None] & (dim < head_dim)[None, :])
                tl.store(counter, 0)


def decode_shape(requests: int, kv_heads: int, head_dim: int, processors: int, element_size: int = 2) -> DecodeShape:
    """Tiles that keep the memory busy, by how many programs there are if none of the requests is split.

    Of numbers of one byte more keys are on their way: as many bytes.
    """
    whole = requests * kv_heads
    splits = max(1, min(64, 1024 // next_power_of_2(whole)))
    programs = 3 * processors
    if head_dim > 256:
        keys, stages = {4: (16, 2), 2: (16, 3), 1: (32, 3)}[element_size]
        return DecodeShape(keys, splits, 2 * processors, 256, 4, stages)
    if element_size == 4:
        return DecodeShape(32 if head_dim <= 128 else 16, splits, programs, 256, 4, 2)
    if head_dim > 128:
        return DecodeShape(32 if element_size == 2 else 64, splits, programs, 256, 4, 3)
    if element_size == 1 and whole <= 8 * processors:
        return DecodeShape(128, splits, programs * (1 if whole <= 2 * processors else 2), 128, 4, 3, THREE_PROGRAMS)
    if whole <= 2 * processors:
        return DecodeShape(64, splits, programs, 128, 4, 3, unsplit=512)
    if whole <= 8 * processors:
        return DecodeShape(128, splits, 2 * programs, 128, 4, 2)
    return DecodeShape(32, 1, 1, 256, 1, 3 if element_size == 2 else 5)


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
    """Attention of one query for each of R requests over all its keys, its own included.

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
    partial = partial_sum = out
    before = 0 if shared is None else prefix_parts(kv_heads, len(shared.members))
    parts = shape.splits + before
    if parts > 1:
        partial = torch.empty(requests, heads, parts, head_dim, dtype=torch.float32, device=query.device)
        partial_sum = torch.empty(requests, heads, parts, dtype=torch.float32, device=query.device)
    if shared is not None:
        given = query, cache, block_table, slots, shared, partial, partial_sum
        attend_to_prefix(*given, scale=scale, softcap=softcap, scales=scales)
    cache = for_kernels(cache)
    rows, dim = next_power_of_2(group), padded_dim(head_dim, cache)
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
        scales,
        sinks,
        scale * LOG2_E,
        (softcap or 0.0) * LOG2_E,
        query.stride(0),
        block_table.stride(0),
        requests,
        shape.splits,
        shape.programs,
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
        shape.span,
        shape.unsplit,
        parts_at_a_time(rows, dim, shape.warps),
        overlap,
        num_warps=shape.warps,
        num_stages=shape.stages,
        maxnreg=shape.registers,
        launch_pdl=overlap,
    )
