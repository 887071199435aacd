"""Attention of runs of queries over the paged cache on Hopper GPUs (compute capability 9.0), causal, in 16 bits.

A program is three groups of warps, and stays on its processor while there are tiles of queries: one warp fetches
queries, keys and values through TMA into rings of shared memory, and two groups of four multiply, 64 queries each:

    fetch     K0 K1 V0 K2 V1 K3 V2 ...
    multiply  Q K0 | Q K1, P0 V0 | Q K2, P1 V1 | ...
    vector           softmax of 0 | softmax of 1 while P0 V0 runs | ...

The products of one step run while the weights of the next are computed (FlashAttention-3, Shah et al. 2024), over the
border of two tiles of queries too: a tile's first product with keys is under way while the one before is written.
"""

import math
from typing import NamedTuple

import torch
import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kvern.kernels.attention_arguments import CachedLayer, Runs, scored
from kvern.kernels.attention_hopper_consumer import consume, items_of, key_tiles, tile_of

QUERIES = 128
"""The queries of one tile: two groups of warps with 64 each, the rows of one product."""
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232
"""The registers of a thread; with idle warps that fill the producer's group they are all of a processor's."""


class HopperShape(NamedTuple):
    """The use of shared memory: keys of a tile, tiles in the ring, and tiles of queries."""

    keys: int
    stages: int
    buffers: int


SHAPES = {64: HopperShape(128, 2, 2), 128: HopperShape(128, 2, 2), 256: HopperShape(64, 2, 1)}
"""Shapes by head_dim that fit in 227 KiB of shared memory."""
SWIZZLED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@gluon.jit
def _places(table, position, known, nowhere, KEYS: gl.constexpr, BOX: gl.constexpr, block_size: gl.constexpr):
    """Rows of the cache where the boxes of a tile of keys begin; `nowhere` behind the last key: TMA reads zeros."""
    places = ()
    for box in gl.static_range(KEYS // BOX):
        at = position + box * BOX
        block = gl.load(table + at // block_size, mask=at < known, other=0)
        places += (gl.where(at < known, block * block_size + at % block_size, nowhere),)  # type: ignore[assignment]
    return places


@gluon.jit
def _fetch(cache, places, behind, column, buffer, full, BOX: gl.constexpr):
    mbarrier.expect(full, buffer.shape[0] * buffer.shape[1] * 2)
    for box in gl.static_range(buffer.shape[0] // BOX):
        tma.async_copy_global_to_shared(cache, [places[box] + behind, column], full, buffer.slice(box * BOX, BOX))


@gluon.jit
def _produce(
    query, cache, block_table, slots, starts, tokens, counts, tile_request, tile_first, tiles, table_stride, cache_rows,
    q, q_full, q_empty, ring, ring_full, ring_empty,
    heads: gl.constexpr, group: gl.constexpr, head_dim: gl.constexpr, block_size: gl.constexpr, WINDOW: gl.constexpr,
    KEYS: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr, VALUES: gl.constexpr,
):  # fmt: skip
    """Fetches queries and keys, or values, in the consumers' order, as soon as these have released their places."""
    turn = 0
    for index in range(items_of(tiles, heads)):
        tile, head = tile_of(index, tiles, heads)
        request = gl.load(tile_request + tile)
        first = gl.load(tile_first + tile)
        count = gl.load(counts + request)
        start = gl.load(starts + request)
        table = block_table + gl.load(slots + request).to(gl.int64) * table_stride
        column = head // group * head_dim
        begin, steps = key_tiles(start, count, first, WINDOW, 2 * q.shape[1], KEYS, BOX)
        if not VALUES:
            token = gl.load(tokens + request)
            buffer = index % BUFFERS
            mbarrier.wait(q_empty.index(buffer), (index // BUFFERS & 1) ^ 1)
            mbarrier.expect(q_full.index(buffer), 2 * q.shape[1] * head_dim * 2)
            for half in gl.static_range(2):
                tma.async_copy_global_to_shared(
                    query, [token + first + half * q.shape[1], head * head_dim], q_full.index(buffer),
                    q.index(buffer * 2 + half),
                )  # fmt: skip
        for step in range(steps):
            places = _places(table, begin + step * KEYS, start + count, 2 * cache_rows, KEYS, BOX, block_size)
            stage = turn % STAGES
            mbarrier.wait(ring_empty.index(stage), (turn // STAGES & 1) ^ 1)
            _fetch(cache, places, VALUES * cache_rows, column, ring.index(stage), ring_full.index(stage), BOX)
            turn += 1


@gluon.jit(
    do_not_specialize=["tiles", "table_stride", "cache_rows"],
    do_not_specialize_on_alignment=["slots", "starts", "tokens", "counts", "tile_request", "tile_first"],
)
def _hopper_prefill_kernel(
    query, cache, block_table, slots, starts, tokens, counts, tile_request, tile_first, out, sinks, tiles, scale,
    softcap, table_stride, cache_rows,
    heads: gl.constexpr, group: gl.constexpr, head_dim: gl.constexpr, block_size: gl.constexpr, WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr, KEYS: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr,
    PRODUCER: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = query.block_shape[0]
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q = gl.allocate_shared_memory(query.dtype, [2 * BUFFERS, ROWS, head_dim], query.layout)
    k = gl.allocate_shared_memory(cache.dtype, [STAGES, KEYS, head_dim], cache.layout)
    v = gl.allocate_shared_memory(cache.dtype, [STAGES, KEYS, head_dim], cache.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for buffer in gl.static_range(BUFFERS):
        mbarrier.init(q_full.index(buffer), count=1)
        mbarrier.init(q_empty.index(buffer), count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                consume,
                (
                    starts, tokens, counts, tile_request, tile_first, tiles, out, sinks, scale, softcap,
                    q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                    heads, WINDOW, SOFTCAP, BOX, STAGES, BUFFERS, 0,
                ),
            ),
            (
                consume,
                (
                    starts, tokens, counts, tile_request, tile_first, tiles, out, sinks, scale, softcap,
                    q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                    heads, WINDOW, SOFTCAP, BOX, STAGES, BUFFERS, 1,
                ),
            ),
            (
                _produce,
                (
                    query, cache, block_table, slots, starts, tokens, counts, tile_request, tile_first, tiles,
                    table_stride, cache_rows, q, q_full, q_empty, k, k_full, k_empty,
                    heads, group, head_dim, block_size, WINDOW, KEYS, BOX, STAGES, BUFFERS, False,
                ),
            ),
            (
                _produce,
                (
                    query, cache, block_table, slots, starts, tokens, counts, tile_request, tile_first, tiles,
                    table_stride, cache_rows, q, q_full, q_empty, v, v_full, v_empty,
                    heads, group, head_dim, block_size, WINDOW, KEYS, BOX, STAGES, BUFFERS, True,
                ),
            ),
        ],
        [4, 1, 1],
        [CONSUMER, PRODUCER, PRODUCER],
    )  # fmt: skip


def hopper_fits(head_dim: int, block_size: int, dtype: torch.dtype) -> bool:
    """The kernel knows heads of this size, in blocks of this many tokens. TMA writes shared memory by eight rows."""
    return head_dim in SHAPES and block_size % 8 == 0 and dtype in (torch.bfloat16, torch.float16)


def hopper_prefill(
    query: torch.Tensor, layer: CachedLayer, table: torch.Tensor, runs: Runs, out: torch.Tensor, processors: int
) -> None:
    """Computes `prefill_attention`, with its arguments, in tiles of `QUERIES` queries.

    Query and cache have the same dtype of 16 bits, and fit (`hopper_fits`). `processors`: of the device.
    """
    count, heads, head_dim = query.shape
    _, blocks, block_size, kv_heads, _ = layer.cache.shape
    shape = SHAPES[head_dim]
    rows = blocks * block_size
    tiles = runs.tile_request.shape[0]
    box = math.gcd(block_size, shape.keys)
    width = [heads * head_dim, kv_heads * head_dim]
    _hopper_prefill_kernel[(min(processors, tiles * heads),)](
        TensorDescriptor(query, [count, width[0]], [query.stride(0), 1], [QUERIES // 2, head_dim], SWIZZLED),
        TensorDescriptor(layer.cache, [2 * rows, width[1]], [width[1], 1], [box, head_dim], SWIZZLED),
        table,
        *runs[:6],
        out,
        layer.sinks,
        tiles,
        *scored(layer),
        table.stride(0),
        rows,
        heads,
        heads // kv_heads,
        head_dim,
        block_size,
        layer.window or 0,
        layer.softcap is not None,
        shape.keys,
        box,
        shape.stages,
        shape.buffers,
        PRODUCER_REGISTERS,
        CONSUMER_REGISTERS,
        num_warps=4,
    )
