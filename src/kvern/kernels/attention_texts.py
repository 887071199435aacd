"""Attention within texts that stand one behind the other: tokens see those on both sides, a window, or those before.

Keys and values are read where they lie, without blocks. All scores are kept as powers of two.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kvern.kernels.attention_arguments import LOG2_E
from kvern.kernels.attention_prefill import PrefillShape
from kvern.kernels.launch import Launcher, Rows, next_power_of_2, rows_of


class TextTiles(NamedTuple):
    """Texts of a batch, and the tiles that they are cut into, all int32.

    starts, lengths   [S]: the index of each text's first token among the batch's, and the number of its tokens
    text, first       [tiles]: for each run of `TextShape.QUERIES` tokens the text, and the first one's index within it
    """

    starts: Any
    lengths: Any
    text: Any
    first: Any


class TextForm(NamedTuple):
    """The attention of a layer: the factor of scores, and the keys that a token sees.

    These are all of its text, those less than `window` away, or, if `causal`, those up to itself.
    """

    scale: float
    window: int | None = None
    causal: bool = False


class TextShape(NamedTuple):
    """The constants of the kernel: heads, a window or 0, 1 if causal, and the queries and keys of a tile.

    A head is taken in two parts, DIM entries and REST, which may be 0: tensors have sizes that are powers of two, and
    one for a head of 72 would multiply 56 zeros.
    """

    heads: int
    head_dim: int
    window: int
    causal: int
    DIM: int
    REST: int
    QUERIES: int
    KEYS: int


@triton.jit
def _load(places, dim, known, SHAPE: tl.constexpr, MASKED: tl.constexpr):
    """Load rows of heads, or columns, whose entries are `dim`."""
    if MASKED:
        return tl.load(places, mask=known & (dim < SHAPE.head_dim), other=0.0)
    elif SHAPE.head_dim == SHAPE.DIM + SHAPE.REST:
        return tl.load(places)
    else:
        return tl.load(places, mask=dim < SHAPE.head_dim, other=0.0)


@triton.jit
def _tile(
    queries,
    queries_rest,
    maximum,
    total,
    gathered,
    gathered_rest,
    position,
    count,
    query_position,
    keys,
    values,
    key_stride,
    value_stride,
    scale,
    SHAPE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Gather from the keys at `position`, of which all are seen if not `MASKED`. Without a rest, rests are not used."""
    known = position < count
    dim = tl.arange(0, SHAPE.DIM)
    key_places = keys + position[None, :] * key_stride
    value_places = values + position[:, None] * value_stride
    key = _load(key_places + dim[:, None], dim[:, None], known[None, :], SHAPE, MASKED)
    value = _load(value_places + dim[None, :], dim[None, :], known[:, None], SHAPE, MASKED)
    scores = tl.dot(queries, key, input_precision="ieee")
    if SHAPE.REST > 0:
        rest = SHAPE.DIM + tl.arange(0, SHAPE.REST)
        key_rest = _load(key_places + rest[:, None], rest[:, None], known[None, :], SHAPE, MASKED)
        value_rest = _load(value_places + rest[None, :], rest[None, :], known[:, None], SHAPE, MASKED)
        scores = tl.dot(queries_rest, key_rest, scores, input_precision="ieee")
    if MASKED:
        visible = (position < count)[None, :]
        if SHAPE.window > 0:
            distance = position[None, :] - query_position[:, None]
            visible = visible & (distance < SHAPE.window) & (distance > -SHAPE.window)
        if SHAPE.causal:
            visible = visible & (position[None, :] <= query_position[:, None])
        scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(maximum, tl.max(scores, axis=1) * scale)
    if MASKED and SHAPE.window > 0:  # a query may see nothing of its first keys
        higher = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores * scale - higher[:, None])
    shrink = tl.exp2(maximum - higher)
    total = total * shrink + tl.sum(weights, axis=1)
    weights = weights.to(value.dtype)
    gathered = tl.dot(weights, value, gathered * shrink[:, None], input_precision="ieee")
    if SHAPE.REST > 0:
        gathered_rest = tl.dot(weights, value_rest, gathered_rest * shrink[:, None], input_precision="ieee")
    return higher, total, gathered, gathered_rest


@Launcher
@triton.jit(do_not_specialize_on_alignment=["texts"])
def _text_attention_kernel(
    query: Rows, key: Rows, value: Rows, texts: TextTiles, out, scale: tl.float32, SHAPE: tl.constexpr
):
    head = tl.program_id(0)
    text = tl.load(texts.text + tl.program_id(1))
    first = tl.load(texts.first + tl.program_id(1))
    count = tl.load(texts.lengths + text)
    start = tl.load(texts.starts + text).to(tl.int64)
    row = first + tl.arange(0, SHAPE.QUERIES)
    dim = tl.arange(0, SHAPE.DIM)
    inside = (row < count)[:, None] & (dim < SHAPE.head_dim)[None, :]
    query_row = query.pointer + start * query.stride + row[:, None] * query.stride + head * SHAPE.head_dim
    queries = tl.load(query_row + dim[None, :], mask=inside, other=0.0)
    keys = key.pointer + start * key.stride + head * SHAPE.head_dim
    values = value.pointer + start * value.stride + head * SHAPE.head_dim
    maximum = tl.full([SHAPE.QUERIES], float("-inf"), tl.float32)
    total = tl.full([SHAPE.QUERIES], 0.0, tl.float32)
    gathered = tl.full([SHAPE.QUERIES, SHAPE.DIM], 0.0, tl.float32)
    queries_rest, gathered_rest = queries, total
    if SHAPE.REST > 0:
        rest = SHAPE.DIM + tl.arange(0, SHAPE.REST)
        rest_inside = (row < count)[:, None] & (rest < SHAPE.head_dim)[None, :]
        queries_rest = tl.load(query_row + rest[None, :], mask=rest_inside, other=0.0)
        gathered_rest = tl.full([SHAPE.QUERIES, SHAPE.REST], 0.0, tl.float32)
    begin = 0
    unmasked = count // SHAPE.KEYS * SHAPE.KEYS
    end = count
    if SHAPE.window > 0:
        begin = tl.maximum(first - SHAPE.window + 1, 0) // SHAPE.KEYS * SHAPE.KEYS
        unmasked = begin
        end = tl.minimum(count, first + SHAPE.QUERIES + SHAPE.window - 1)
    if SHAPE.causal:
        unmasked = first // SHAPE.KEYS * SHAPE.KEYS
        end = tl.minimum(count, first + SHAPE.QUERIES)
    for position in tl.range(begin, unmasked, SHAPE.KEYS):
        maximum, total, gathered, gathered_rest = _tile(
            queries, queries_rest, maximum, total, gathered, gathered_rest, position + tl.arange(0, SHAPE.KEYS),
            count, row, keys, values, key.stride, value.stride, scale, SHAPE, False,
        )  # fmt: skip
    for position in tl.range(unmasked, end, SHAPE.KEYS):
        maximum, total, gathered, gathered_rest = _tile(
            queries, queries_rest, maximum, total, gathered, gathered_rest, position + tl.arange(0, SHAPE.KEYS),
            count, row, keys, values, key.stride, value.stride, scale, SHAPE, True,
        )  # fmt: skip
    target = out + ((start + row[:, None]) * SHAPE.heads + head) * SHAPE.head_dim
    tl.store(target + dim[None, :], (gathered / total[:, None]).to(out.dtype.element_ty), mask=inside)
    if SHAPE.REST > 0:
        gathered_rest = (gathered_rest / total[:, None]).to(out.dtype.element_ty)
        tl.store(target + rest[None, :], gathered_rest, mask=rest_inside)


def head_parts(head_dim: int) -> tuple[int, int]:
    """DIM and REST of a TextShape: powers of two of at least 16, together no more than one alone would be."""
    whole = max(16, next_power_of_2(head_dim))
    part = whole // 2
    rest = max(16, next_power_of_2(head_dim - part)) if head_dim < whole else 0
    return (part, rest) if part >= 16 and 0 < rest < part else (whole, 0)


def text_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    texts: TextTiles,
    out: torch.Tensor,
    shape: PrefillShape,
    form: TextForm,
) -> None:
    """Attention of all tokens of S texts to those of the same text that the form says.

    query, key, value   [T, heads, head_dim], rows may have gaps
    out                 [T, heads, head_dim]; only the rows of these texts are written

    The rows of one text, gaps included, have less than 2**31 entries.

    Computes 4 * heads * head_dim operations for each pair of tokens that see each other.
    """
    _, heads, head_dim = query.shape
    assert not (form.causal and form.window), "a window reaches to both sides"
    parts = head_parts(head_dim)
    window, causal = form.window or 0, int(form.causal)
    of_tile = TextShape(heads, head_dim, window, causal, *parts, shape.queries, shape.keys)
    _text_attention_kernel[(heads, texts.text.shape[0])](
        rows_of(query),
        rows_of(key),
        rows_of(value),
        texts,
        out,
        form.scale * LOG2_E,
        of_tile,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
