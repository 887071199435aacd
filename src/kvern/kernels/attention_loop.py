"""The loop over the paged keys that a program attends to, for kernels that read memory more than they compute.

Layout of keys and of values: [blocks, block_size, kv_heads, head_dim]. All scores are kept as powers of two.
"""

import triton
import triton.language as tl

from kvern.kernels.attention_prefill import capped
from kvern.kernels.eight_bit import factor_pairs, factors


@triton.jit
def attend(
    queries,
    begin,
    end,
    position,
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
    CAUSAL: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
):
    """What queries [ROWS, DIM], as `query_factors`, find among the keys from `begin` to before `end`.

    position  [ROWS]: of each query; unless `CAUSAL`, all keys are at or before it

    Values of 8 bits come in pairs, see `factor_pairs`.

    Returns the highest score and the sum of the weights of each row, and the values, weighted but not divided by it.
    """
    dim = tl.arange(0, DIM)
    column = tl.arange(0, KEYS)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    PAIRS: tl.constexpr = 2 if value_cache.dtype.element_ty == tl.int16 else 1
    entry = tl.arange(0, DIM // PAIRS)
    gathered = tl.zeros([ROWS, DIM // PAIRS], tl.float32)
    second = gathered
    block = tl.load(table + (begin + column) // block_size, mask=begin + column < end, other=0)
    for start in tl.range(begin, end, KEYS):
        at = start + column
        known = at < end
        row = (block.to(tl.int64) * block_size + at % block_size) * kv_heads + kv_head
        place = row * head_dim
        key = tl.load(
            key_cache + place[None, :] + dim[:, None], mask=known[None, :] & (dim < head_dim)[:, None], other=0.0
        )
        if PAIRS == 2:
            place = row * (head_dim // 2)
        value = tl.load(
            value_cache + place[:, None] + entry[None, :],
            mask=known[:, None] & (entry < head_dim // PAIRS)[None, :],
            other=0.0,
        )
        # Triton fetches several tiles ahead only if their addresses wait for no other load: the next blocks come here.
        block = tl.load(table + (at + KEYS) // block_size, mask=at + KEYS < end, other=0)
        key = factors(key)
        scores = tl.dot(queries, key, input_precision="ieee") * scale
        if SOFTCAP:
            scores = capped(scores, softcap)
        visible = known[None, :]
        if CAUSAL:
            visible = visible & (at[None, :] <= position[:, None])
        if WINDOW > 0:
            visible = visible & (at[None, :] > position[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(maximum, tl.max(scores, axis=1))
        higher = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(maximum - higher)
        total = total * shrink + tl.sum(weights, axis=1)
        if PAIRS == 2:
            first_value, second_value = factor_pairs(value, key_cache.dtype.element_ty)
            weights = weights.to(tl.float16)
            gathered = gathered * shrink[:, None] + tl.dot(weights, first_value)
            second = second * shrink[:, None] + tl.dot(weights, second_value)
        else:
            gathered = gathered * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        maximum = higher
    if PAIRS == 2:
        gathered = tl.join(gathered, second).reshape(ROWS, DIM)
    return maximum, total, gathered
