"""The warps that multiply in the attention kernel for Hopper (`attention_hopper`), and what all its parts share."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def tile_of(index, tiles, heads):
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
def items_of(tiles, heads):
    """Returns the number of items of this program."""
    programs = gl.num_programs(0)
    place = gl.program_id(0)
    rounds = tiles * heads // programs
    if rounds % 2 == 1:
        place = programs - 1 - place
    return rounds + (place < tiles * heads % programs).to(gl.int32)


@gluon.jit
def key_tiles(start, count, first, WINDOW: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, BOX: gl.constexpr):
    """Returns the start and the number of the tiles of keys that a tile of queries sees.

    The first box has the first key that is seen: what lies before may be another request's by now.
    """
    low = start + first
    end = gl.minimum(start + count, low + ROWS)
    begin = 0
    if WINDOW > 0:
        begin = gl.maximum(low - WINDOW + 1, 0) // BOX * BOX
    return begin, gl.maximum((end - begin + KEYS - 1) // KEYS, 1)


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
def opaque(number):
    """`number`, of which the compiler knows nothing.

    Addresses that two loops have in common are else computed before the first alone, where it may be skipped (ptxas
    12.8: registers that are shared by a warp).
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


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
def consume(
    starts, tokens, counts, tile_request, tile_first, tiles, out, sinks, scale, softcap,
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
    items = items_of(tiles, heads)
    turn = 0
    tile, head = tile_of(0, tiles, heads)
    request = gl.load(tile_request + tile)
    first = gl.load(tile_first + tile)
    count = gl.load(counts + request)
    start = gl.load(starts + request)
    token = gl.load(tokens + request)
    tile, next_head = tile_of(1, tiles, heads)
    request = gl.load(tile_request + tile)
    next_first = gl.load(tile_first + tile)
    begin, steps = key_tiles(start, count, first, WINDOW, 2 * ROWS, KEYS, BOX)
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
        tile, next_head = tile_of(index + 2, tiles, heads)
        request = gl.load(tile_request + tile)
        next_first = gl.load(tile_first + tile)
        gathered = gl.zeros([ROWS, DIM], gl.float32, GATHERED)
        # All queries of this half see the tiles of keys from `seen` to `causal` whole.
        causal = gl.minimum(gl.maximum((low + 1 - begin) // KEYS, 1), steps)
        seen = 1
        if WINDOW > 0:
            seen = gl.minimum(gl.maximum((low + ROWS - WINDOW - begin + KEYS - 1) // KEYS, 1), causal)
            query = q.index(opaque(index % BUFFERS * 2 + HALF))
            for step in range(1, seen):
                weights, maximum, total, gathered, turn = _step(
                    weights, maximum, total, gathered, turn, begin + step * KEYS, low, scale, softcap, query,
                    k, v, k_full, k_empty, v_full, v_empty, WINDOW, SOFTCAP, STAGES, True, SCORES,
                )  # fmt: skip
        query = q.index(opaque(index % BUFFERS * 2 + HALF))
        for step in range(seen, causal):
            weights, maximum, total, gathered, turn = _step(
                weights, maximum, total, gathered, turn, begin + step * KEYS, low, scale, softcap, query,
                k, v, k_full, k_empty, v_full, v_empty, WINDOW, SOFTCAP, STAGES, False, SCORES,
            )  # fmt: skip
        query = q.index(opaque(index % BUFFERS * 2 + HALF))
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
        if sinks is not None:
            total += gl.exp2(gl.load(sinks + head) * 1.4426950408889634 - maximum)
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
        begin, steps = key_tiles(start, count, first, WINDOW, 2 * ROWS, KEYS, BOX)
        low = start + first + HALF * ROWS
        scores = warpgroup_mma_wait(0, (scores,))
        mbarrier.arrive(k_empty.index(stage_k), pred=more)
        weights, maximum, total, _unused = _softmax(
            scores, lowest, none, begin, low, scale, softcap, KIND, WINDOW, SOFTCAP, True, OPERAND
        )
