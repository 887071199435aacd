"""Attention of decodes to a prefix that several of them have in common, which is read once for all of a tile.

Its results are parts, which the decode kernel joins with those of each request's own keys.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvern.kernels.attention_loop import attend, first_blocks, most_rows
from kvern.kernels.attention_prefill import LOG2_E
from kvern.kernels.eight_bit import for_kernels, in_values, padded_dim, query_factors, score_scale
from kvern.kernels.launch import Launcher, next_power_of_2, overlaps, wait_for_previous


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


@Launcher
@triton.jit(do_not_specialize=["parts"], do_not_specialize_on_alignment=["slots", "members", "tile_keys"])
def _prefix_attention_kernel(
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    block_table: tl.tensor,
    slots: tl.tensor,
    members: tl.tensor,
    tile_keys: tl.tensor,
    partial: tl.tensor,
    partial_sum: tl.tensor,
    scales: tl.tensor | None,
    scale: tl.float32,
    softcap: tl.float32,
    query_stride: tl.int64,
    table_stride: tl.int64,
    parts,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    block_size: tl.constexpr,
    SOFTCAP: tl.constexpr,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    kv_head = tl.program_id(0)
    tile = tl.program_id(1)
    part = tl.program_id(2)
    # The batch's description was written well before the kernel that this one overlaps with.
    keys = tl.load(tile_keys + tile)
    row = tl.arange(0, MEMBERS * GROUP)
    member = tl.load(members + tile * MEMBERS + row // GROUP).to(tl.int64)
    leader = tl.load(members + tile * MEMBERS)
    if OVERLAP:
        wait_for_previous()
    if keys > 0:
        table = block_table + tl.load(slots + leader).to(tl.int64) * table_stride
        span = tl.cdiv(tl.cdiv(keys, tl.num_programs(2)), KEYS) * KEYS
        end = tl.minimum((part + 1) * span, keys)
        head = kv_head * group + row % GROUP
        dim = tl.arange(0, DIM)
        real = (member >= 0) & (row % GROUP < group)
        inside = real[:, None] & (dim < head_dim)[None, :]
        queries = tl.load(
            query + member[:, None] * query_stride + head[:, None] * head_dim + dim[None, :], mask=inside, other=0.0
        )
        queries = query_factors(queries, scales, key_cache.dtype.element_ty)
        scale = score_scale(scale, scales, kv_head, key_cache.dtype.element_ty)
        # All queries come after the last of these keys.
        block = first_blocks(table, part * span, end, block_size, KEYS)
        maximum, total, gathered = attend(
            queries, block, part * span, end, row, key_cache, value_cache, table, kv_head, scale, softcap, kv_heads,
            head_dim, block_size, 0, SOFTCAP, False, MEMBERS * GROUP, DIM, KEYS,
        )  # fmt: skip
        divisor = tl.where(total == 0.0, 1.0, total)
        index = (member * kv_heads * group + head) * parts + part
        target = partial + index[:, None] * head_dim + dim[None, :]
        gathered = in_values(gathered / divisor[:, None], scales, kv_head, kv_heads, key_cache.dtype.element_ty)
        tl.store(target, gathered, mask=inside)
        sums = tl.where(total == 0.0, float("-inf"), maximum + tl.log2(divisor))
        tl.store(partial_sum + index, sums, mask=real)


def attend_to_prefix(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    slots: torch.Tensor,
    shared: SharedPrefix,
    partial: torch.Tensor,
    partial_sum: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    scales: torch.Tensor | None = None,
) -> None:
    """Write to the first `prefix_parts` parts of each member's `partial` [R, heads, parts, head_dim] and `partial_sum`.

    What comes before is as in `decode_attention`.
    """
    _, heads, head_dim = query.shape
    _, _, block_size, kv_heads, _ = cache.shape
    group = heads // kv_heads
    tiles, members = shared.members.shape
    splits = prefix_parts(kv_heads, tiles)
    overlap = overlaps(query.device)
    keys, warps, stages = _tile(head_dim, cache.element_size())
    cache = for_kernels(cache)
    _prefix_attention_kernel[(kv_heads, tiles, splits)](
        query,
        cache[0],
        cache[1],
        block_table,
        slots,
        shared.members,
        shared.tile_keys,
        partial,
        partial_sum,
        scales,
        scale * LOG2_E,
        (softcap or 0.0) * LOG2_E,
        query.stride(0),
        block_table.stride(0),
        partial_sum.shape[-1],
        kv_heads,
        group,
        head_dim,
        block_size,
        softcap is not None,
        max(next_power_of_2(group), 16 // members),  # rows of a product, of which there are 16 at least
        members,
        padded_dim(head_dim, cache),
        keys,
        overlap,
        num_warps=warps,
        num_stages=stages,
        launch_pdl=overlap,
    )
