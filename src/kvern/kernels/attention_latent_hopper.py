"""Attention of single queries to latents on Hopper GPUs (compute capability 9.0), in 16 bits.

A program has all heads of a query, and a part of the keys: one warp fetches tiles of keys through TMA into a ring of
shared memory, and two groups of four warps multiply, each every other tile:

    scores     [keys, rows]          keys by queries, which lie in shared memory
    gathered   2 x [half, rows]      the latents of the same tile, turned, by the weights

Memory never waits: while one group multiplies, the other's tile is on its way. Each group leaves a part of its own,
which `_join_latents_kernel` joins with the others.
"""

import math

import torch
import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kvern.kernels.attention_arguments import CachedLayer, Parts, Runs, scored
from kvern.kernels.attention_hopper_consumer import opaque

KEYS = 64
STAGES = 2
GROUPS = 2
"""Keys of a tile, tiles in the ring, and groups of warps that multiply."""
LATENT, REST = 512, 64
"""Entries of a row of the cache, of which the first are its value."""
MOST_ROWS = 32
"""Queries that fit beside the ring."""
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232


@gluon.jit
def _produce(
    query, query_rest, cache, cache_rest, table, asked, begin, end, length, cache_rows,
    queries, rest_queries, asked_full, keys, rest_keys, full, empty,
    HALF: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr, block_size: gl.constexpr,
):  # fmt: skip
    """Fetches the queries, and the tiles of keys as soon as their places are released."""
    ROWS: gl.constexpr = queries.shape[1]
    TILE: gl.constexpr = keys.shape[1]
    WIDTH: gl.constexpr = 2 * HALF + rest_keys.shape[2]
    mbarrier.expect(asked_full, ROWS * WIDTH * 2)
    for half in gl.static_range(2):
        tma.async_copy_global_to_shared(query, [asked, half * HALF], asked_full, queries.index(half))
    tma.async_copy_global_to_shared(query_rest, [asked, 2 * HALF], asked_full, rest_queries)
    for step in range((end - begin + TILE - 1) // TILE):
        stage = step % STAGES
        position = begin + step * TILE
        places = ()
        for box in gl.static_range(TILE // BOX):
            at = position + box * BOX
            block = gl.load(table + at // block_size, mask=at < length, other=0)
            # TMA reads zeros behind the last row.
            places += (gl.where(at < length, block * block_size + at % block_size, cache_rows),)  # type: ignore[assignment]
        mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
        mbarrier.expect(full.index(stage), TILE * WIDTH * 2)
        for box in gl.static_range(TILE // BOX):
            for half in gl.static_range(2):
                tma.async_copy_global_to_shared(
                    cache, [places[box], half * HALF], full.index(stage),
                    keys.index(stage * 2 + half).slice(box * BOX, BOX),
                )  # fmt: skip
            tma.async_copy_global_to_shared(
                cache_rest, [places[box], 2 * HALF], full.index(stage), rest_keys.index(stage).slice(box * BOX, BOX)
            )


@gluon.jit
def _erase(values, known, BOX: gl.constexpr, LINES: gl.constexpr):
    """Zeros behind the last key in its block, which may hold anything: 0 * NaN is NaN."""
    for box in gl.static_range(values.shape[0] // BOX):
        if (known > box * BOX) & (known < box * BOX + BOX):
            part = values.slice(box * BOX, BOX)
            place = box * BOX + gl.arange(0, BOX, gl.SliceLayout(1, LINES))
            part.store(gl.where((place < known)[:, None], part.load(LINES), 0.0))


@gluon.jit
def _consume(
    partial, partial_sum, place, begin, end, length, scale,
    queries, rest_queries, asked_full, keys, rest_keys, weights, full, empty,
    heads: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Attends to every other tile of keys."""
    ROWS: gl.constexpr = queries.shape[1]
    HALF: gl.constexpr = queries.shape[2]
    TILE: gl.constexpr = keys.shape[1]
    KIND: gl.constexpr = keys.dtype
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HALF, HALF // 8], [4, 1], [1, 0])
    of_row: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    maximum = gl.full([ROWS], -1e30, gl.float32, of_row)
    total = gl.zeros([TILE, ROWS], gl.float32, LAYOUT)
    nothing = gl.zeros([TILE, ROWS], gl.float32, LAYOUT)
    first = gl.zeros([HALF, ROWS], gl.float32, LAYOUT)
    second = gl.zeros([HALF, ROWS], gl.float32, LAYOUT)
    own = weights.index(GROUP)
    mbarrier.wait(asked_full, 0)
    for step in range(GROUP, (end - begin + TILE - 1) // TILE, GROUPS):
        stage = step % STAGES
        place_of_queries = opaque(0)
        position = begin + step * TILE
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        low = keys.index(stage * 2)
        high = keys.index(stage * 2 + 1)
        scores = warpgroup_mma(
            low, queries.index(place_of_queries).permute((1, 0)), nothing, use_acc=False, is_async=True
        )
        scores = warpgroup_mma(high, queries.index(place_of_queries + 1).permute((1, 0)), scores, is_async=True)
        scores = warpgroup_mma(rest_keys.index(stage), rest_queries.permute((1, 0)), scores, is_async=True)
        scores = warpgroup_mma_wait(0, (scores,))
        known = length - position
        if known < TILE:
            key = gl.arange(0, TILE, gl.SliceLayout(1, LAYOUT))
            scores = gl.where((key < known)[:, None], scores, float("-inf"))
            if known % BOX != 0:
                _erase(low, known, BOX, LINES)
                _erase(high, known, BOX, LINES)
        higher = gl.maximum(maximum, gl.max(scores, axis=0) * scale)
        shrink = gl.exp2(maximum - higher)
        maximum = higher
        chances = gl.exp2(scores * scale - higher[None, :])
        total = total * shrink[None, :] + chances
        own.store(chances.to(KIND))
        fence_async_shared()
        first = warpgroup_mma(low.permute((1, 0)), own, first * shrink[None, :], is_async=True)
        second = warpgroup_mma(high.permute((1, 0)), own, second * shrink[None, :], is_async=True)
        first, second = warpgroup_mma_wait(0, (first, second))
        mbarrier.arrive(empty.index(stage))
    sums = gl.sum(total, axis=0)
    divisor = gl.where(sums == 0.0, 1.0, sums)
    row = gl.arange(0, ROWS, of_row)
    entry = gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT))
    at = (place + GROUP * heads + row).to(gl.int64)
    target = partial + at[None, :] * (2 * HALF) + entry[:, None]
    real = ((row < heads) & (sums > 0.0))[None, :]
    gl.store(target, first / divisor[None, :], mask=real)
    gl.store(target + HALF, second / divisor[None, :], mask=real)
    found = gl.where(sums == 0.0, float("-inf"), maximum + gl.log2(divisor))
    gl.store(partial_sum + at, found, mask=row < heads)


@gluon.jit(do_not_specialize=["requests", "splits", "programs", "table_stride", "cache_rows"])
def _latent_hopper_kernel(
    query, query_rest, cache, cache_rest, block_table, slots, starts, partial, partial_sum, scale,
    table_stride, cache_rows, requests, splits, programs,
    heads: gl.constexpr, block_size: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
    SPAN: gl.constexpr, PRODUCER: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = query.block_shape[0]
    HALF: gl.constexpr = query.block_shape[1]
    REST: gl.constexpr = query_rest.block_shape[1]
    TILE: gl.constexpr = 64
    WARP: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    request = gl.program_id(1)
    split = gl.program_id(0)
    length = gl.load(starts + request).to(gl.int32) + 1
    keys_of_all = 0
    for first in range(0, requests, 128):
        index = first + gl.arange(0, 128, WARP)
        keys_of_all += gl.sum(gl.load(starts + index, mask=index < requests, other=-1).to(gl.int32) + 1, axis=0)
    fair = gl.maximum((keys_of_all + programs - 1) // programs, 1)
    pieces = gl.minimum(gl.maximum(length // fair, 1), splits)
    part = (length + pieces - 1) // pieces
    span = gl.maximum((part + TILE - 1) // TILE * TILE, SPAN)
    begin = split * span
    end = gl.minimum(begin + span, length)
    place = (request * splits + split) * (GROUPS * heads)
    if begin >= end:
        row = gl.arange(0, 128, WARP)
        for turn in gl.static_range((GROUPS * heads + 127) // 128):
            at = turn * 128 + row
            nothing = gl.full([128], float("-inf"), gl.float32, WARP)
            gl.store(partial_sum + place + at, nothing, mask=at < GROUPS * heads)
    else:
        table = block_table + gl.load(slots + request).to(gl.int64) * table_stride
        BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
        WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, ROWS], cache.dtype)
        queries = gl.allocate_shared_memory(cache.dtype, [2, ROWS, HALF], query.layout)
        rest_queries = gl.allocate_shared_memory(cache.dtype, [ROWS, REST], query_rest.layout)
        keys = gl.allocate_shared_memory(cache.dtype, [2 * STAGES, TILE, HALF], cache.layout)
        rest_keys = gl.allocate_shared_memory(cache.dtype, [STAGES, TILE, REST], cache_rest.layout)
        weights = gl.allocate_shared_memory(cache.dtype, [GROUPS, TILE, ROWS], WEIGHTS)
        asked_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
        full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
        mbarrier.init(asked_full, count=1)
        for stage in gl.static_range(STAGES):
            mbarrier.init(full.index(stage), count=1)
            mbarrier.init(empty.index(stage), count=1)
        fence_async_shared()
        gl.warp_specialize(
            [
                (
                    _consume,
                    (
                        partial, partial_sum, place, begin, end, length, scale,
                        queries, rest_queries, asked_full, keys, rest_keys, weights, full, empty,
                        heads, BOX, STAGES, GROUPS, 0,
                    ),
                ),
                (
                    _consume,
                    (
                        partial, partial_sum, place, begin, end, length, scale,
                        queries, rest_queries, asked_full, keys, rest_keys, weights, full, empty,
                        heads, BOX, STAGES, GROUPS, 1,
                    ),
                ),
                (
                    _produce,
                    (
                        query, query_rest, cache, cache_rest, table, request * heads, begin, end, length, cache_rows,
                        queries, rest_queries, asked_full, keys, rest_keys, full, empty,
                        HALF, BOX, STAGES, block_size,
                    ),
                ),
            ],
            [4, 1],
            [CONSUMER, PRODUCER],
        )  # fmt: skip


def latent_hopper_fits(heads: int, width: int, latent: int, block_size: int, dtype: torch.dtype) -> bool:
    """The kernel knows such queries and rows, in blocks of this many tokens. TMA writes shared memory by eight rows."""
    known = (latent, width - latent) == (LATENT, REST) and dtype in (torch.bfloat16, torch.float16)
    return known and heads <= MOST_ROWS and block_size % 8 == 0


def latent_hopper(
    query: torch.Tensor,
    layer: CachedLayer,
    table: torch.Tensor,
    decodes: Runs,
    parts: Parts,
    *,
    programs: int,
    span: int,
) -> None:
    """Computes `latent_attention` for single queries, in parts that are joined later.

    parts  [R, splits * GROUPS, heads, latent] and without the latent; the sum of a part without keys is -inf
    programs, span  how keys are shared out, as in `latent_attention`
    """
    requests, heads, width = query.shape
    splits = parts.sums.shape[1] // GROUPS
    _, blocks, block_size, _, _ = layer.cache.shape
    rows = max(16, 1 << (heads - 1).bit_length())
    box = math.gcd(block_size, KEYS)
    half = LATENT // 2
    swizzled = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)

    def boxes(matrix: torch.Tensor, lines: int, columns: int) -> TensorDescriptor:
        flat = matrix.view(-1, width)
        return TensorDescriptor(flat, list(flat.shape), [width, 1], [lines, columns], swizzled)

    _latent_hopper_kernel[(splits, requests)](
        boxes(query, rows, half),
        boxes(query, rows, REST),
        boxes(layer.cache, box, half),
        boxes(layer.cache, box, REST),
        table,
        decodes.slots,
        decodes.starts,
        *parts,
        scored(layer)[0],
        table.stride(0),
        blocks * block_size,
        requests,
        splits,
        programs,
        heads,
        block_size,
        box,
        STAGES,
        GROUPS,
        span,
        PRODUCER_REGISTERS,
        CONSUMER_REGISTERS,
        num_warps=4,
    )
