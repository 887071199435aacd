"""Attention within texts that stand one behind the other: every token sees those on both sides, or a window of them.

Keys and values are read where they lie, without blocks. All scores are kept as powers of two.
"""

import torch
import triton
import triton.language as tl

from kvern.kernels.attention_prefill import LOG2_E, PrefillShape
from kvern.kernels.launch import Launcher, next_power_of_2


@triton.jit
def _tile(
    queries,
    maximum,
    total,
    gathered,
    position,
    count,
    query_position,
    keys,
    values,
    key_stride,
    value_stride,
    scale,
    head_dim: tl.constexpr,
    WINDOW: tl.constexpr,
    DIM: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Gather from the keys at `position`; all of them are seen if not `MASKED`."""
    dim = tl.arange(0, DIM)
    key_place = keys + position[None, :] * key_stride + dim[:, None]
    value_place = values + position[:, None] * value_stride + dim[None, :]
    if MASKED:
        known = position < count
        in_head = dim < head_dim
        key = tl.load(key_place, mask=known[None, :] & in_head[:, None], other=0.0)
        value = tl.load(value_place, mask=known[:, None] & in_head[None, :], other=0.0)
    elif head_dim == DIM:
        key = tl.load(key_place)
        value = tl.load(value_place)
    else:
        key = tl.load(key_place, mask=(dim < head_dim)[:, None], other=0.0)
        value = tl.load(value_place, mask=(dim < head_dim)[None, :], other=0.0)
    scores = tl.dot(queries, key, input_precision="ieee")
    if MASKED:
        visible = (position < count)[None, :]
        if WINDOW > 0:
            distance = position[None, :] - query_position[:, None]
            visible = visible & (distance < WINDOW) & (distance > -WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(maximum, tl.max(scores, axis=1) * scale)
    if MASKED and WINDOW > 0:  # a query may see nothing of its first keys
        higher = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores * scale - higher[:, None])
    shrink = tl.exp2(maximum - higher)
    total = total * shrink + tl.sum(weights, axis=1)
    gathered = gathered * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
    return higher, total, gathered


@Launcher
@triton.jit(do_not_specialize_on_alignment=["starts", "counts", "tile_text", "tile_first"])
def _text_attention_kernel(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    starts: tl.tensor,
    counts: tl.tensor,
    tile_text: tl.tensor,
    tile_first: tl.tensor,
    out: tl.tensor,
    scale: tl.float32,
    query_stride: tl.int32,
    key_stride: tl.int32,
    value_stride: tl.int32,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    WINDOW: tl.constexpr,
    DIM: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    head = tl.program_id(0)
    text = tl.load(tile_text + tl.program_id(1))
    first = tl.load(tile_first + tl.program_id(1))
    count = tl.load(counts + text)
    start = tl.load(starts + text).to(tl.int64)
    row = first + tl.arange(0, QUERIES)
    dim = tl.arange(0, DIM)
    inside = (row < count)[:, None] & (dim < head_dim)[None, :]
    queries = tl.load(
        query + start * query_stride + row[:, None] * query_stride + head * head_dim + dim[None, :],
        mask=inside,
        other=0.0,
    )
    keys = key + start * key_stride + head * head_dim
    values = value + start * value_stride + head * head_dim
    maximum = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    gathered = tl.zeros([QUERIES, DIM], tl.float32)
    begin = 0
    unmasked = count // KEYS * KEYS
    end = count
    if WINDOW > 0:
        begin = tl.maximum(first - WINDOW + 1, 0) // KEYS * KEYS
        unmasked = begin
        end = tl.minimum(count, first + QUERIES + WINDOW - 1)
    for position in tl.range(begin, unmasked, KEYS):
        maximum, total, gathered = _tile(
            queries, maximum, total, gathered, position + tl.arange(0, KEYS), count, row, keys, values, key_stride,
            value_stride, scale, head_dim, WINDOW, DIM, False,
        )  # fmt: skip
    for position in tl.range(unmasked, end, KEYS):
        maximum, total, gathered = _tile(
            queries, maximum, total, gathered, position + tl.arange(0, KEYS), count, row, keys, values, key_stride,
            value_stride, scale, head_dim, WINDOW, DIM, True,
        )  # fmt: skip
    target = out + ((start + row[:, None]) * heads + head) * head_dim + dim[None, :]
    tl.store(target, (gathered / total[:, None]).to(out.dtype.element_ty), mask=inside)


def text_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    counts: torch.Tensor,
    tile_text: torch.Tensor,
    tile_first: torch.Tensor,
    out: torch.Tensor,
    shape: PrefillShape,
    *,
    scale: float,
    window: int | None = None,
) -> None:
    """Attention of all tokens of S texts to those of the same text, less than `window` away if there is one.

    query, key, value   [T, heads, head_dim], rows may have gaps
    starts, counts      [S] int32: the index of each text's first token among the T, and the number of its tokens
    tile_text, tile_first   [tiles] int32: for each run of `shape.queries` tokens the text, and the first one's index
                            within it
    out                 [T, heads, head_dim]; only the rows of these texts are written

    The rows of one text, gaps included, have less than 2**31 entries.

    Computes 4 * heads * head_dim operations for each pair of tokens that see each other.
    """
    _, heads, head_dim = query.shape
    _text_attention_kernel[(heads, tile_text.shape[0])](
        query,
        key,
        value,
        starts,
        counts,
        tile_text,
        tile_first,
        out,
        scale * LOG2_E,
        query.stride(0),
        key.stride(0),
        value.stride(0),
        heads,
        head_dim,
        window or 0,
        max(16, next_power_of_2(head_dim)),
        shape.queries,
        shape.keys,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
