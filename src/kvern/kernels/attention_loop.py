"""The loop over the paged keys that a program attends to, for kernels that read memory more than they compute; and how
what several programs found for the same queries is joined.

Layout of keys and of values: [blocks, block_size, kv_heads, head_dim]. All scores are kept as powers of two.
"""

import math

import triton
import triton.language as tl

from kvern.kernels.attention_prefill import capped
from kvern.kernels.eight_bit import factor_pairs


@triton.constexpr_function
def common_size(block_size, keys):
    """The most tokens that both a block and a tile of keys are a multiple of."""
    return math.gcd(block_size, keys)


@triton.jit
def first_tile(position, SHAPE: tl.constexpr):
    """Returns the start of the tiles of keys for queries from `position` on: the block of the first key that is seen.

    What lies before may be another request's by now, and no number: 0 * NaN is NaN.
    """
    begin = 0
    if SHAPE.WINDOW > 0:
        size: tl.constexpr = common_size(SHAPE.block_size, SHAPE.KEYS)
        begin = tl.maximum(position - SHAPE.WINDOW + 1, 0) // size * size
    return begin


@triton.jit
def first_blocks(table, begin, end, SHAPE: tl.constexpr):
    """The blocks of the first tile of keys: [KEYS]."""
    at = begin + tl.arange(0, SHAPE.KEYS)
    return tl.load(table + at // SHAPE.block_size, mask=at < end, other=0)


@triton.jit
def attend(
    queries,
    block,
    begin,
    end,
    position,
    last,
    pages,
    table,
    kv_head,
    scale,
    softcap,
    SHAPE: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Attends with queries [ROWS, DIM], as `query_factors`, to the keys from `begin` to before `end`.

    block     [KEYS]: the blocks of the first tile's keys, see `first_blocks`
    begin     a multiple of `block_size`, if `KEYS` is one
    position  [ROWS]: the position of each query
    last      [ROWS]: the position of the last key that each query sees; unless `CAUSAL`, no key comes after it

    Numbers of 8 bits are read as pairs of neighbours, see `factor_pairs`.

    Returns the highest score and the sum of the weights of each row, and the values, weighted but not divided by it.
    """
    keys, vals = pages.keys, pages.vals
    KIND: tl.constexpr = keys.dtype.element_ty
    PAIRS: tl.constexpr = 2 if KIND.primitive_bitwidth == 8 else 1
    if PAIRS == 2:
        keys = keys.to(tl.pointer_type(tl.int16), bitcast=True)
        vals = vals.to(tl.pointer_type(tl.int16), bitcast=True)
        queries, second_queries = tl.split(queries.reshape(SHAPE.ROWS, SHAPE.DIM // 2, 2))
    column = tl.arange(0, SHAPE.KEYS)
    maximum = tl.full([SHAPE.ROWS], float("-inf"), tl.float32)
    # Where a row's keys are spread over warps, these add up their weights after the loop.
    SPREAD: tl.constexpr = (SHAPE.ROWS == 16) and (SHAPE.KEYS >= 64)
    total = tl.full([SHAPE.ROWS, SHAPE.KEYS] if SPREAD else [SHAPE.ROWS], 0.0, tl.float32)
    entry = tl.arange(0, SHAPE.DIM // PAIRS)
    gathered = tl.full([SHAPE.ROWS, SHAPE.DIM // PAIRS], 0.0, tl.float32)
    second = gathered
    offset = column % SHAPE.block_size
    for start in tl.range(begin, end, SHAPE.KEYS):
        at = start + column
        known = at < end
        if SHAPE.KEYS % SHAPE.block_size != 0:
            offset = at % SHAPE.block_size
        place = block.to(tl.int64) * (SHAPE.block_size * SHAPE.kv_heads * SHAPE.head_dim // PAIRS)
        place += (offset * SHAPE.kv_heads + kv_head) * (SHAPE.head_dim // PAIRS)
        place = place[:, None] + entry[None, :]
        inside = known[:, None] & (entry < SHAPE.head_dim // PAIRS)[None, :]
        key = tl.load(keys + place, mask=inside, other=0.0)
        value = tl.load(vals + place, mask=inside, other=0.0)
        # Triton fetches several tiles ahead only if their addresses wait for no other load: the next blocks come here.
        block = tl.load(table + (at + SHAPE.KEYS) // SHAPE.block_size, mask=at + SHAPE.KEYS < end, other=0)
        if PAIRS == 2:
            first_key, second_key = factor_pairs(tl.trans(key), KIND)
            scores = tl.dot(second_queries, second_key, tl.dot(queries, first_key)) * scale
        else:
            scores = tl.dot(queries, tl.trans(key), input_precision="ieee") * scale
        if SHAPE.SOFTCAP:
            scores = capped(scores, softcap)
        visible = known[None, :]
        if CAUSAL:
            visible = visible & (at[None, :] <= last[:, None])
        if SHAPE.WINDOW > 0:
            visible = visible & (at[None, :] > position[:, None] - SHAPE.WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(maximum, tl.max(scores, axis=1))
        higher = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(maximum - higher)
        total = total * shrink[:, None] + weights if SPREAD else total * shrink + tl.sum(weights, axis=1)
        if PAIRS == 2:
            first_value, second_value = factor_pairs(value, KIND)
            weights = weights.to(tl.float16)
            gathered = gathered * shrink[:, None] + tl.dot(weights, first_value)
            second = second * shrink[:, None] + tl.dot(weights, second_value)
        else:
            gathered = gathered * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        maximum = higher
    if PAIRS == 2:
        gathered = tl.join(gathered, second).reshape(SHAPE.ROWS, SHAPE.DIM)
    if SPREAD:
        total = tl.sum(total, axis=1)
    return maximum, total, gathered


@triton.jit
def join_parts(parts, place, real, used, stride, SHAPE: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """The mean of `used` parts [ROWS, DIM], weighted by powers of two of their sums, always in the same order.

    Returned with the sum of all [ROWS], as those of the parts.

    place  [ROWS]: of the first part of each row; the next one is `stride` further on

    `PARTS` are fetched at a time, so that they wait for memory together.
    """
    part = tl.arange(0, PARTS)
    dim = tl.arange(0, SHAPE.DIM)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    mixed = tl.full([ROWS, SHAPE.DIM], 0.0, tl.float32)
    for first in tl.range(0, used, PARTS):
        at = place[None, :] + ((first + part) * stride)[:, None]
        known = (first + part < used)[:, None] & real[None, :]
        inside = known[:, :, None] & (dim < SHAPE.head_dim)[None, None, :]
        sums = tl.load(parts.sums + at, mask=known, other=float("-inf"), cache_modifier=".cg")
        values = tl.load(
            parts.means + at[:, :, None] * SHAPE.head_dim + dim[None, None, :],
            mask=inside,
            other=0.0,
            cache_modifier=".cg",
        )
        higher = tl.maximum(highest, tl.max(sums, axis=0))
        higher = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2(highest - higher)
        weight = tl.exp2(sums - higher[None, :])
        mixed = mixed * shrink[:, None] + tl.sum(values * weight[:, :, None], axis=0)
        total = total * shrink + tl.sum(weight, axis=0)
        highest = higher
    divisor = tl.where(total == 0.0, 1.0, total)
    return mixed / divisor[:, None], highest + tl.log2(divisor)


@triton.jit
def beside_sinks(attended, sums, sinks, head, real):
    """Returns `attended` [ROWS, DIM] with sinks in the softmax of keys with these sums [ROWS].

    sinks  [heads] float32, logits
    head   [ROWS], of the rows that are `real`
    """
    sink = tl.load(sinks + head, mask=real, other=0.0) * 1.4426950408889634
    return attended / (1.0 + tl.exp2(sink - sums))[:, None]


def most_rows(head_dim: int, element_size: int) -> int:
    """Rows of a tile: as many as the matrix units take at a time, or fewer, so that long heads have room."""
    if head_dim <= 256:
        return 32 if element_size == 4 and head_dim > 128 else 64
    return 16 if element_size == 4 else 32


def parts_at_a_time(rows: int, dim: int, warps: int) -> int:
    """`PARTS` of `join_parts`, for rows and entries as powers of 2: some 32 numbers of each thread."""
    return max(1, min(16, 1024 * warps // (rows * dim)))
