"""Attention of decodes to a prefix that several of them have in common, which is read once for all of a tile.

Its results are parts, which the decode kernel joins with those of each request's own keys.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kvern.kernels.attention_arguments import CachedLayer, Pages, Parts, pages_of, scored, stages_of, tile_shape
from kvern.kernels.attention_loop import attend, first_blocks, most_rows
from kvern.kernels.eight_bit import in_values, query_factors, score_scale
from kvern.kernels.launch import Launcher, Rows, next_power_of_2, rows_of, wait_for_previous


class SharedPrefix(NamedTuple):
    """Decodes that begin with the same blocks, in tiles that attend to them together.

    members    [tiles, members] int32: indices of requests, the first of a tile always one; -1: none
    tile_keys  [tiles] int32: how many keys they have in common, 0: the tile is empty
    keys       [R] int32: the same for each request, 0: it is in no tile
    """

    members: torch.Tensor
    tile_keys: torch.Tensor
    keys: torch.Tensor


def prefix_members(group: int, head_dim: int, element_size: int = 2) -> int:
    """Returns how many requests share a tile, each with a group of query heads."""
    members: int = most_rows(head_dim, element_size) // next_power_of_2(group)
    return max(1, members)


def tiles_for(requests: int, members: int) -> int:
    """Returns the most tiles of a batch: enough for one prefix, and as many again for smaller groups."""
    return 2 * -(-requests // members)


def prefix_parts(kv_heads: int, tiles: int) -> int:
    """Returns how many programs share the keys of a tile's prefix, so that they fill the card."""
    parts: int = 512 // next_power_of_2(kv_heads * tiles)
    return max(1, min(16, parts))


def _tile(head_dim: int, element_size: int) -> tuple[int, int, int]:
    """Keys of a tile, warps and stages."""
    wide = element_size == 4
    if head_dim > 256:
        return (16, 4, 2) if wide else (32, 8, 2)
    if head_dim > 128:
        return 32 >> wide, 4, 2 - wide + (element_size == 1)
    return 64 >> wide, 4, 3 - wide + (element_size == 1)


class _Batch(NamedTuple):
    """Arguments that the kernel is not compiled for: rows of block tables, tiles of `SharedPrefix`, parts of a head."""

    slots: Any
    members: Any
    tile_keys: Any
    parts: Any


@Launcher
@triton.jit(do_not_specialize=["batch"])
def _prefix_attention_kernel(
    query: Rows,
    pages: Pages,
    batch: _Batch,
    parts: Parts,
    scale: tl.float32,
    softcap: tl.float32,
    SHAPE: tl.constexpr,
    GROUP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    kv_head = tl.program_id(0)
    tile = tl.program_id(1)
    part = tl.program_id(2)
    # The batch's description was written well before the kernel that this one overlaps with.
    keys = tl.load(batch.tile_keys + tile)
    MEMBERS: tl.constexpr = SHAPE.ROWS // GROUP
    row = tl.arange(0, SHAPE.ROWS)
    member = tl.load(batch.members + tile * MEMBERS + row // GROUP).to(tl.int64)
    leader = tl.load(batch.members + tile * MEMBERS)
    wait_for_previous(OVERLAP)
    if keys > 0:
        table = pages.table + tl.load(batch.slots + leader).to(tl.int64) * pages.table_stride
        span = tl.cdiv(tl.cdiv(keys, tl.num_programs(2)), SHAPE.KEYS) * SHAPE.KEYS
        end = tl.minimum((part + 1) * span, keys)
        head = kv_head * SHAPE.group + row % GROUP
        dim = tl.arange(0, SHAPE.DIM)
        real = (member >= 0) & (row % GROUP < SHAPE.group)
        inside = real[:, None] & (dim < SHAPE.head_dim)[None, :]
        queries = tl.load(
            query.pointer + member[:, None] * query.stride + head[:, None] * SHAPE.head_dim + dim[None, :],
            mask=inside,
            other=0.0,
        )
        queries = query_factors(queries, pages.scales, pages.keys.dtype.element_ty)
        scale = score_scale(scale, pages.scales, kv_head, pages.keys.dtype.element_ty)
        # All queries come after the last of these keys.
        block = first_blocks(table, part * span, end, SHAPE)
        maximum, total, gathered = attend(
            queries, block, part * span, end, row, row, pages, table, kv_head, scale, softcap, SHAPE, False
        )
        divisor = tl.where(total == 0.0, 1.0, total)
        index = (member * SHAPE.kv_heads * SHAPE.group + head) * batch.parts + part
        target = parts.means + index[:, None] * SHAPE.head_dim + dim[None, :]
        gathered = in_values(
            gathered / divisor[:, None], pages.scales, kv_head, SHAPE.kv_heads, pages.keys.dtype.element_ty
        )
        tl.store(target, gathered, mask=inside)
        sums = tl.where(total == 0.0, float("-inf"), maximum + tl.log2(divisor))
        tl.store(parts.sums + index, sums, mask=real)


def attend_to_prefix(
    query: torch.Tensor,
    layer: CachedLayer,
    table: torch.Tensor,
    slots: torch.Tensor,
    shared: SharedPrefix,
    parts: Parts,
) -> None:
    """Write to the first `prefix_parts` of each member's `parts` [R, heads, parts, head_dim] and [R, heads, parts].

    What comes before is as in `decode_attention`.
    """
    tiles, members = shared.members.shape
    keys, warps, stages = _tile(query.shape[2], layer.cache.element_size())
    of_tile = tile_shape(query, layer._replace(window=None), 0, keys)
    group = max(next_power_of_2(of_tile.group), 16 // members)  # rows of a product, of which there are 16 at least
    _prefix_attention_kernel[(of_tile.kv_heads, tiles, prefix_parts(of_tile.kv_heads, tiles))](
        rows_of(query),
        pages_of(layer._replace(sinks=None), table),
        _Batch(slots, shared.members, shared.tile_keys, parts.sums.shape[-1]),
        parts,
        *scored(layer),
        of_tile._replace(ROWS=members * group),
        group,
        num_warps=warps,
        num_stages=stages_of(query, layer, of_tile, stages),
    )
