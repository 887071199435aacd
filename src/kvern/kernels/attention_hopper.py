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
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kvern.kernels.attention_prefill import LOG2_E

QUERIES = 128
"""Of one tile: two groups of warps with 64 each, the rows of one product."""
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232
"""Of a thread; together with as many idle warps as fill the producer's group, they are the processor's."""


class HopperShape(NamedTuple):
    """How shared memory is cut: keys of a tile, tiles in the ring, and tiles of queries."""

    keys: int
    stages: int
    buffers: int


SHAPES = {64: HopperShape(128, 2, 2), 128: HopperShape(128, 2, 2), 256: HopperShape(64, 2, 1)}
"""By head_dim: what the 227 KiB of shared memory hold."""


@gluon.jit
def _tile(index, tiles, heads):
    """Place in the list of tiles, and head, of an item of this program: items go to the programs there and back.

    The last tile where there are no more.
    """
    programs = gl.num_programs(0)
    place = gl.program_id(0)
    if index % 2 == 1:
        place = programs - 1 - place
    item = index * programs + place
    return gl.minimum(item // heads, tiles - 1), item % heads


@gluon.jit
def _items(tiles, heads):
    """How many items this program has."""
    programs = gl.num_programs(0)
    place = gl.program_id(0)
    rounds = tiles * heads // programs
    if rounds % 2 == 1:
        place = programs - 1 - place
    return rounds + (place < tiles * heads % programs).to(gl.int32)


@gluon.jit
def _bounds(start, count, first, WINDOW: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr):
    """The first key, and the number of tiles of keys, that a tile of queries sees."""
    low = start + first
    end = gl.minimum(start + count, low + ROWS)
    begin = 0
    if WINDOW > 0:
        begin = gl.maximum(low - WINDOW + 1, 0) // KEYS * KEYS
    return begin, gl.maximum((end - begin + KEYS - 1) // KEYS, 1)


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
    q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    heads: gl.constexpr, group: gl.constexpr, head_dim: gl.constexpr, block_size: gl.constexpr, WINDOW: gl.constexpr,
    KEYS: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """Fetches what the consumers multiply, in their order, as soon as they have released its place."""
    turn = 0
    for index in range(_items(tiles, heads)):
        tile, head = _tile(index, tiles, heads)
        request = gl.load(tile_request + tile)
        first = gl.load(tile_first + tile)
        count = gl.load(counts + request)
        start = gl.load(starts + request)
        token = gl.load(tokens + request)
        table = block_table + gl.load(slots + request).to(gl.int64) * table_stride
        column = head // group * head_dim
        begin, steps = _bounds(start, count, first, WINDOW, 2 * q.shape[1], KEYS)
        places = _places(table, begin, start + count, 2 * cache_rows, KEYS, BOX, block_size)
        buffer = index % BUFFERS
        mbarrier.wait(q_empty.index(buffer), (index // BUFFERS & 1) ^ 1)
        mbarrier.expect(q_full.index(buffer), 2 * q.shape[1] * head_dim * 2)
        for half in gl.static_range(2):
            tma.async_copy_global_to_shared(
                query, [token + first + half * q.shape[1], head * head_dim], q_full.index(buffer),
                q.index(buffer * 2 + half),
            )  # fmt: skip
        stage = turn % STAGES
        mbarrier.wait(k_empty.index(stage), (turn // STAGES & 1) ^ 1)
        _fetch(cache, places, 0, column, k.index(stage), k_full.index(stage), BOX)
        for step in range(1, steps + 1):
            stage_v = turn % STAGES
            phase_v = (turn // STAGES & 1) ^ 1
            turn += 1
            before = places
            if step < steps:
                stage = turn % STAGES
                places = _places(table, begin + step * KEYS, start + count, 2 * cache_rows, KEYS, BOX, block_size)
                mbarrier.wait(k_empty.index(stage), (turn // STAGES & 1) ^ 1)
                _fetch(cache, places, 0, column, k.index(stage), k_full.index(stage), BOX)
            mbarrier.wait(v_empty.index(stage_v), phase_v)
            _fetch(cache, before, cache_rows, column, v.index(stage_v), v_full.index(stage_v), BOX)


@gluon.jit
def _softmax(
    scores, maximum, total, position, low, scale, softcap, KIND: gl.constexpr, WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr, MASKED: gl.constexpr, OPERAND: gl.constexpr,
):  # fmt: skip
    """Weights as the operand of a product, the new maximum and total, and by what to multiply what was gathered."""
    ROWS: gl.constexpr = scores.shape[0]
    KEYS: gl.constexpr = scores.shape[1]
    LAYOUT: gl.constexpr = scores.type.layout
    if SOFTCAP:
        turn = gl.exp2(scores * (scale * 2.0 * 1.4426950408889634 / softcap))
        scores = softcap - 2.0 * softcap / (turn + 1.0)
        scale = 1.0
    if MASKED:
        row = low + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        key = position + gl.arange(0, KEYS, gl.SliceLayout(0, LAYOUT))
        visible = key[None, :] <= row[:, None]
        if WINDOW > 0:
            visible = visible & (key[None, :] > row[:, None] - WINDOW)
        scores = gl.where(visible, scores, float("-inf"))
    higher = gl.maximum(maximum, gl.max(scores, axis=1) * scale)
    if MASKED and WINDOW > 0:
        higher = gl.maximum(higher, -1e30)  # of a row that sees nothing yet
    weights = gl.exp2(scores * scale - higher[:, None])
    shrink = gl.exp2(maximum - higher)
    total = total * shrink + gl.sum(weights, axis=1)
    return gl.convert_layout(weights.to(KIND), OPERAND), higher, total, shrink


@gluon.jit
def _in_order(total):
    """`total`, by an assembly that keeps the compiler from moving what computes it behind what follows.

    It takes a wait for a product for a thing to do early, and nothing would then run beside the product. A sum of
    weights is never negative: nothing is stored.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred never; .reg .b32 place; mov.b32 place, 0; setp.lt.f32 never, $1, 0f00000000; "
        "@never st.shared.b32 [place], $1; mov.b32 $0, $1; }",
        "=r,r", [total], dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _step(
    weights, maximum, total, gathered, turn, position, low, scale, softcap, query,
    k, v, k_full, k_empty, v_full, v_empty,
    WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """One tile of keys: its product with the queries, and that of the weights before with their values."""
    ROWS: gl.constexpr = query.shape[0]
    KEYS: gl.constexpr = k.shape[1]
    KIND: gl.constexpr = v.dtype
    OPERAND: gl.constexpr = weights.type.layout
    stage_v = turn % STAGES
    phase_v = turn // STAGES & 1
    turn += 1
    stage_k = turn % STAGES
    mbarrier.wait(k_full.index(stage_k), turn // STAGES & 1)
    nothing = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    scores = warpgroup_mma(query, k.index(stage_k).permute((1, 0)), nothing, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(stage_v), phase_v)
    gathered = warpgroup_mma(weights, v.index(stage_v), gathered, is_async=True)
    scores = warpgroup_mma_wait(1, (scores,))
    mbarrier.arrive(k_empty.index(stage_k))
    following, maximum, total, shrink = _softmax(
        scores, maximum, total, position, low, scale, softcap, KIND, WINDOW, SOFTCAP, MASKED, OPERAND,
    )  # fmt: skip
    total = _in_order(total)
    gathered, weights, following = warpgroup_mma_wait(0, (gathered, weights, following))
    mbarrier.arrive(v_empty.index(stage_v))
    gathered = gathered * gl.convert_layout(shrink, gl.SliceLayout(1, gathered.type.layout))[:, None]
    return following, maximum, total, gathered, turn


@gluon.jit
def _erase(values, known, BOX: gl.constexpr, LINES: gl.constexpr):
    """Zeros behind the last key in its block, which may hold anything: 0 * NaN is NaN."""
    if (known < values.shape[0]) & (known % BOX != 0):
        for box in gl.static_range(values.shape[0] // BOX):
            if (known > box * BOX) & (known < box * BOX + BOX):
                part = values.slice(box * BOX, BOX)
                place = box * BOX + gl.arange(0, BOX, gl.SliceLayout(1, LINES))
                part.store(gl.where((place < known)[:, None], part.load(LINES), 0.0))
        fence_async_shared()


@gluon.jit
def _consume(
    starts, tokens, counts, tile_request, tile_first, tiles, out, scale, softcap,
    q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    heads: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr,
    BUFFERS: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """Attends for one half of each tile of queries."""
    ROWS: gl.constexpr = q.shape[1]
    KEYS: gl.constexpr = k.shape[1]
    DIM: gl.constexpr = q.shape[2]
    KIND: gl.constexpr = v.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    GATHERED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, GATHERED, 2)
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    lowest = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    none = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
    nothing = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    items = _items(tiles, heads)
    turn = 0
    tile, head = _tile(0, tiles, heads)
    request = gl.load(tile_request + tile)
    first = gl.load(tile_first + tile)
    count = gl.load(counts + request)
    start = gl.load(starts + request)
    token = gl.load(tokens + request)
    tile, next_head = _tile(1, tiles, heads)
    request = gl.load(tile_request + tile)
    next_first = gl.load(tile_first + tile)
    begin, steps = _bounds(start, count, first, WINDOW, 2 * ROWS, KEYS)
    low = start + first + HALF * ROWS
    mbarrier.wait(q_full.index(0), 0)
    mbarrier.wait(k_full.index(0), 0)
    scores = warpgroup_mma(q.index(HALF), k.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, (scores,))
    mbarrier.arrive(k_empty.index(0))
    weights, maximum, total, _unused = _softmax(
        scores, lowest, none, begin, low, scale, softcap, KIND, WINDOW, SOFTCAP, True, OPERAND
    )
    for index in range(items):
        # Of the next item, so that nobody waits for memory between two.
        later_first = next_first
        later_head = next_head
        later_count = gl.load(counts + request)
        later_start = gl.load(starts + request)
        later_token = gl.load(tokens + request)
        tile, next_head = _tile(index + 2, tiles, heads)
        request = gl.load(tile_request + tile)
        next_first = gl.load(tile_first + tile)
        # All queries of this half see the tiles of keys from `seen` to `causal` whole.
        causal = gl.minimum(gl.maximum((low + 1 - begin) // KEYS, 1), steps)
        seen = 1
        if WINDOW > 0:
            seen = gl.minimum(gl.maximum((low + ROWS - WINDOW - begin + KEYS - 1) // KEYS, 1), causal)
        gathered = gl.zeros([ROWS, DIM], gl.float32, GATHERED)
        query = q.index(index % BUFFERS * 2 + HALF)
        if WINDOW > 0:
            for step in range(1, seen):
                weights, maximum, total, gathered, turn = _step(
                    weights, maximum, total, gathered, turn, begin + step * KEYS, low, scale, softcap, query,
                    k, v, k_full, k_empty, v_full, v_empty, WINDOW, SOFTCAP, STAGES, True, SCORES,
                )  # fmt: skip
        for step in range(seen, causal):
            weights, maximum, total, gathered, turn = _step(
                weights, maximum, total, gathered, turn, begin + step * KEYS, low, scale, softcap, query,
                k, v, k_full, k_empty, v_full, v_empty, WINDOW, SOFTCAP, STAGES, False, SCORES,
            )  # fmt: skip
        for step in range(causal, steps):
            weights, maximum, total, gathered, turn = _step(
                weights, maximum, total, gathered, turn, begin + step * KEYS, low, scale, softcap, query,
                k, v, k_full, k_empty, v_full, v_empty, WINDOW, SOFTCAP, STAGES, True, SCORES,
            )  # fmt: skip
        # The last product with values, and the first with keys of the next item, if there is one.
        mbarrier.arrive(q_empty.index(index % BUFFERS))
        more = index + 1 < items
        stage_v = turn % STAGES
        mbarrier.wait(v_full.index(stage_v), turn // STAGES & 1)
        _erase(v.index(stage_v), start + count - (begin + (steps - 1) * KEYS), BOX, LINES)
        turn += 1
        stage_k = turn % STAGES
        buffer = (index + 1) % BUFFERS
        mbarrier.wait(q_full.index(buffer), (index + 1) // BUFFERS & 1, pred=more)
        mbarrier.wait(k_full.index(stage_k), turn // STAGES & 1, pred=more)
        gathered = warpgroup_mma(weights, v.index(stage_v), gathered, is_async=True)
        scores = warpgroup_mma(
            q.index(buffer * 2 + HALF), k.index(stage_k).permute((1, 0)), nothing, use_acc=False, is_async=True
        )
        gathered, weights = warpgroup_mma_wait(1, (gathered, weights))
        mbarrier.arrive(v_empty.index(stage_v))
        result = gathered / gl.convert_layout(total, gl.SliceLayout(1, GATHERED))[:, None]
        row = first + HALF * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LINES))
        dim = gl.arange(0, DIM, gl.SliceLayout(0, LINES))
        target = out + ((token + row[:, None]).to(gl.int64) * heads + head) * DIM + dim[None, :]
        gl.store(target, gl.convert_layout(result.to(KIND), LINES), mask=(row < count)[:, None])
        first = later_first
        head = later_head
        count = later_count
        start = later_start
        token = later_token
        begin, steps = _bounds(start, count, first, WINDOW, 2 * ROWS, KEYS)
        low = start + first + HALF * ROWS
        scores = warpgroup_mma_wait(0, (scores,))
        mbarrier.arrive(k_empty.index(stage_k), pred=more)
        weights, maximum, total, _unused = _softmax(
            scores, lowest, none, begin, low, scale, softcap, KIND, WINDOW, SOFTCAP, True, OPERAND
        )


@gluon.jit(do_not_specialize=["tiles", "table_stride", "cache_rows"])
def _hopper_prefill_kernel(
    query, cache, block_table, slots, starts, tokens, counts, tile_request, tile_first, out, tiles, scale, softcap,
    table_stride, cache_rows,
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
                _consume,
                (
                    starts, tokens, counts, tile_request, tile_first, tiles, out, scale, softcap,
                    q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                    heads, WINDOW, SOFTCAP, BOX, STAGES, BUFFERS, 0,
                ),
            ),
            (
                _consume,
                (
                    starts, tokens, counts, tile_request, tile_first, tiles, out, scale, softcap,
                    q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                    heads, WINDOW, SOFTCAP, BOX, STAGES, BUFFERS, 1,
                ),
            ),
            (
                _produce,
                (
                    query, cache, block_table, slots, starts, tokens, counts, tile_request, tile_first, tiles,
                    table_stride, cache_rows,
                    q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                    heads, group, head_dim, block_size, WINDOW, KEYS, BOX, STAGES, BUFFERS,
                ),
            ),
        ],
        [4, 1],
        [CONSUMER, PRODUCER],
    )  # fmt: skip


def hopper_fits(head_dim: int, block_size: int, dtype: torch.dtype) -> bool:
    """The kernel knows heads of this size, in blocks of this many tokens. TMA writes shared memory by eight rows."""
    return head_dim in SHAPES and block_size % 8 == 0 and dtype in (torch.bfloat16, torch.float16)


def hopper_prefill(
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
    *,
    processors: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> None:
    """What `prefill_attention` computes, with its arguments, in tiles of `QUERIES` queries.

    Query and cache have the same dtype of 16 bits, and fit (`hopper_fits`). `processors`: of the device.
    """
    count, heads, head_dim = query.shape
    _, blocks, block_size, kv_heads, _ = cache.shape
    shape, rows, tiles = SHAPES[head_dim], blocks * block_size, tile_request.shape[0]
    box = math.gcd(block_size, shape.keys)
    swizzled = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    width = [heads * head_dim, kv_heads * head_dim]
    _hopper_prefill_kernel[(min(processors, tiles * heads),)](
        TensorDescriptor(query, [count, width[0]], [query.stride(0), 1], [QUERIES // 2, head_dim], swizzled),
        TensorDescriptor(cache, [2 * rows, width[1]], [width[1], 1], [box, head_dim], swizzled),
        block_table,
        slots,
        starts,
        tokens,
        counts,
        tile_request,
        tile_first,
        out,
        tiles,
        scale * LOG2_E,
        (softcap or 0.0) * LOG2_E,
        block_table.stride(0),
        rows,
        heads,
        heads // kv_heads,
        head_dim,
        block_size,
        window or 0,
        softcap is not None,
        shape.keys,
        box,
        shape.stages,
        shape.buffers,
        PRODUCER_REGISTERS,
        CONSUMER_REGISTERS,
        num_warps=4,
    )
