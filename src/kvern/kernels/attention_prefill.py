"""Attention of runs of queries over the paged cache, causal but for spans.

Layout of keys and of values: [blocks, block_size, kv_heads, head_dim]. All scores are kept as powers of two.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvern.kernels.attention_arguments import CachedLayer, Pages, Runs, pages_of, scored, stages_of, tile_shape
from kvern.kernels.eight_bit import factors, in_values, query_factors, score_scale
from kvern.kernels.launch import Launcher, Rows, rows_of


@triton.jit
def capped(scores, softcap):
    """softcap * tanh(scores / softcap), with both in powers of two."""
    turn = tl.exp2(scores * (2.0 * 1.4426950408889634 / softcap))
    return softcap * (1.0 - 2.0 / (turn + 1.0))


@triton.jit
def last_keys(position, query, inside, ends):
    """Returns the position of the last key that queries see: their own, or that before their `ends`, if there are such.

    query  [ROWS]: indices of the queries, of which those `inside` are some
    """
    return position if ends is None else tl.maximum(position, tl.load(ends + query, mask=inside, other=0) - 1)


class PrefillShape(NamedTuple):
    """The shape of a prefill launch: queries and keys of one tile."""

    queries: int
    keys: int
    warps: int
    stages: int


@triton.jit
def prefill_tile(
    queries,
    maximum,
    total,
    gathered,
    start,
    end,
    low,
    query_position,
    last,
    pages,
    table,
    kv_head,
    scale,
    softcap,
    SHAPE: tl.constexpr,
    MASKED: tl.constexpr,
):
    dim = tl.arange(0, SHAPE.DIM)
    position = start + tl.arange(0, SHAPE.KEYS)
    if MASKED:
        known = position < end
        if SHAPE.WINDOW > 0:
            known &= position > low - SHAPE.WINDOW
        block = tl.load(table + position // SHAPE.block_size, mask=known, other=0).to(tl.int64)
    else:
        block = tl.load(table + position // SHAPE.block_size).to(tl.int64)
    place = ((block * SHAPE.block_size + position % SHAPE.block_size) * SHAPE.kv_heads + kv_head) * SHAPE.head_dim
    if MASKED:  # what lies behind the last key, or before all windows, is another's, and 0 * NaN is NaN
        in_head = dim < SHAPE.head_dim
        key = tl.load(pages.keys + place[None, :] + dim[:, None], mask=known[None, :] & in_head[:, None], other=0.0)
        value = tl.load(pages.vals + place[:, None] + dim[None, :], mask=known[:, None] & in_head[None, :], other=0.0)
    elif SHAPE.head_dim == SHAPE.DIM:
        key = tl.load(pages.keys + place[None, :] + dim[:, None])
        value = tl.load(pages.vals + place[:, None] + dim[None, :])
    else:
        key = tl.load(pages.keys + place[None, :] + dim[:, None], mask=(dim < SHAPE.head_dim)[:, None], other=0.0)
        value = tl.load(pages.vals + place[:, None] + dim[None, :], mask=(dim < SHAPE.head_dim)[None, :], other=0.0)
    key = factors(key)
    value = factors(value)
    # Without a soft cap the scale is applied with the maximum's subtraction, in one operation.
    scores = tl.dot(queries, key, input_precision="ieee")
    if SHAPE.SOFTCAP:
        scores = capped(scores * scale, softcap)
    if MASKED:
        visible = position[None, :] <= last[:, None]
        if SHAPE.WINDOW > 0:
            visible = visible & (position[None, :] > query_position[:, None] - SHAPE.WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
    step = 1.0 if SHAPE.SOFTCAP else scale
    higher = tl.maximum(maximum, tl.max(scores, axis=1) * step)
    if MASKED:
        higher = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores * step - higher[:, None])
    shrink = tl.exp2(maximum - higher)
    total = total * shrink + tl.sum(weights, axis=1)
    gathered = gathered * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
    return higher, total, gathered


@Launcher
@triton.jit(do_not_specialize_on_alignment=["runs"])
def _prefill_attention_kernel(
    query: Rows, pages: Pages, runs: Runs, out, scale: tl.float32, softcap: tl.float32, SHAPE: tl.constexpr
):
    head = tl.program_id(0)
    kv_head = head // SHAPE.group
    request = tl.load(runs.tile_request + tl.program_id(1))
    first = tl.load(runs.tile_first + tl.program_id(1))
    count = tl.load(runs.counts + request)
    start = tl.load(runs.starts + request)
    token = tl.load(runs.tokens + request).to(tl.int64)
    table = pages.table + tl.load(runs.slots + request).to(tl.int64) * pages.table_stride
    row = first + tl.arange(0, SHAPE.ROWS)
    dim = tl.arange(0, SHAPE.DIM)
    inside = (row < count)[:, None] & (dim < SHAPE.head_dim)[None, :]
    queries = tl.load(
        query.pointer + (token + row[:, None]) * query.stride + head * SHAPE.head_dim + dim[None, :],
        mask=inside,
        other=0.0,
    )
    queries = query_factors(queries, pages.scales, pages.keys.dtype.element_ty)
    scale = score_scale(scale, pages.scales, kv_head, pages.keys.dtype.element_ty)
    query_position = start + row
    low = start + first
    end = tl.minimum(start + count, low + SHAPE.ROWS)
    last = last_keys(query_position, token + row, row < count, runs.ends)
    if runs.ends is not None:
        end = tl.minimum(start + count, tl.max(last, axis=0) + 1)
    begin = 0
    unmasked = low // SHAPE.KEYS * SHAPE.KEYS
    if SHAPE.WINDOW > 0:  # at a multiple of `KEYS`, so that a token's sums do not depend on where its chunk begins
        begin = tl.maximum(low - SHAPE.WINDOW + 1, 0) // SHAPE.KEYS * SHAPE.KEYS
        unmasked = begin
    maximum = tl.full([SHAPE.ROWS], float("-inf"), tl.float32)
    total = tl.full([SHAPE.ROWS], 0.0, tl.float32)
    gathered = tl.full([SHAPE.ROWS, SHAPE.DIM], 0.0, tl.float32)
    for key in tl.range(begin, unmasked, SHAPE.KEYS):
        maximum, total, gathered = prefill_tile(
            queries, maximum, total, gathered, key, end, low, query_position, last, pages, table, kv_head, scale,
            softcap, SHAPE, False,
        )  # fmt: skip
    for key in tl.range(unmasked, end, SHAPE.KEYS):
        maximum, total, gathered = prefill_tile(
            queries, maximum, total, gathered, key, end, low, query_position, last, pages, table, kv_head, scale,
            softcap, SHAPE, True,
        )  # fmt: skip
    if pages.sinks is not None:
        total += tl.exp2(tl.load(pages.sinks + head) * 1.4426950408889634 - maximum)
    target = out + ((token + row[:, None]) * SHAPE.kv_heads * SHAPE.group + head) * SHAPE.head_dim + dim[None, :]
    gathered = in_values(gathered / total[:, None], pages.scales, kv_head, SHAPE.kv_heads, pages.keys.dtype.element_ty)
    tl.store(target, gathered.to(out.dtype.element_ty), mask=inside)


def prefill_shape(head_dim: int, long: bool = False, element_size: int = 2) -> PrefillShape:
    """Tiles for a head dimension, the accumulator of which must stay in registers, and for long or short contexts.

    Numbers of four bytes are multiplied on the ordinary cores. Their tiles, and those of heads above 256, fit the
    shared memory of every card.
    """
    if head_dim > 256:
        return PrefillShape(16, 16, 4, 2) if element_size == 4 else PrefillShape(32, 32, 8, 2)
    if element_size == 4:
        return PrefillShape(32, 32 if head_dim <= 128 else 16, 4, 2)
    if head_dim > 128:
        return PrefillShape(64, 32, 8, 2)
    return PrefillShape(128, 64, 4, 3) if long else PrefillShape(64, 64, 4, 2)


def prefill_attention(
    query: torch.Tensor, layer: CachedLayer, table: torch.Tensor, runs: Runs, out: torch.Tensor, shape: PrefillShape
) -> None:
    """Attention of runs of queries, causal or up to `runs.ends`, over the cache, which holds their own keys already.

    query  [T, heads, head_dim], rows may have gaps
    table  [slots, max_blocks] int32: block tables
    runs   in tiles of `shape.queries` queries
    out    [T, heads, head_dim]; only the rows of these requests are written

    Computes 4 * heads * head_dim operations for each pair of a query and a key it sees.
    """
    of_tile = tile_shape(query, layer, shape.queries, shape.keys)
    _prefill_attention_kernel[(query.shape[1], runs.tile_request.shape[0])](
        rows_of(query),
        pages_of(layer, table),
        runs,
        out,
        *scored(layer),
        of_tile,
        num_warps=shape.warps,
        num_stages=stages_of(query, layer, of_tile, shape.stages),
    )
