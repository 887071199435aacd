"""Contributions of LoRA adapters to a linear layer's output, for rows with different adapters or none.

    shrink   low [splits, rows, parts * rank] = x [rows, inputs] @ down[adapter of the row].T, in parts of the inputs
    expand   out [rows, outputs]             += low @ up[adapter of the row].T

A program multiplies its tile of rows with the matrices of several adapters side by side, and each row takes what its
own adapter made: the matrix units do that in less time than it would take to sort rows by their adapters, and the
weights of each adapter are read once for each tile of rows. Adapters that no row of the tile uses are not read. Ranks
go in chunks, so that a low rank costs little where a high one fits. The adapters stand in places of stacked weights;
`adapters [rows]` holds the index of each row's place, or -1. The parts of a layer (queries, keys and values) have their
own matrices.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvern.kernels.launch import Launcher, gdc_launch_dependents, gdc_wait, stages, wait_for_previous

SMALLEST_TILE = 16
"""The smallest tile of the matrix units."""
LARGEST_TILE = 64
INPUTS = tl.constexpr(128)
CHUNK = tl.constexpr(16)
"""Ranks of one program, or of one step of its sum."""
SHRINK_ADAPTERS = 4
EXPAND_ADAPTERS = 4
"""Side by side in one product."""
MOST_SPLITS = 16
INPUTS_OF_SPLIT = 1024
SPLIT_ROWS = 512
"""The number of rows above which tiles of rows alone fill the card."""
MOST_PARTS = 4
"""The most parts of a layer."""
WARPS = 4
WIDE = 128
"""Outputs of a tile, or half as many."""
MANY_OUTPUTS = 16384
"""The number of outputs with which wider tiles still give every processor one."""


class LowRanks(NamedTuple):
    """The shape of what adapters make of rows: parts of a layer, and in each the most ranks.

    splits    so many programs have a part of the inputs each
    places    of adapters; matrices of so many of them stand side by side in one product: `together`
    """

    parts: int
    most: int
    splits: int
    places: int
    together: int


@Launcher
@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["adapters"])
def _shrink_kernel(
    x: tl.tensor,
    adapters: tl.tensor,
    down: tl.tensor,
    ranks: tl.tensor,
    low: tl.tensor,
    rows,
    inputs,
    x_stride,
    LOW: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    TOGETHER: tl.constexpr = LOW.together
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(1) % LOW.parts
    split = tl.program_id(1) // LOW.parts
    adapter_index = tl.program_id(2) * TOGETHER + tl.arange(0, TOGETHER)
    using = tl.load(adapters + row, mask=row < rows, other=-1)
    mine = (using[:, None] == adapter_index[None, :]) & (adapter_index < LOW.places)[None, :]
    highest = tl.load(ranks + adapter_index, mask=adapter_index < LOW.places, other=0)
    highest = tl.where(tl.max(mine.to(tl.int32), axis=0) > 0, highest, 0)
    its = tl.max(tl.where(mine, highest[None, :], 0), axis=1)
    column = tl.arange(0, INPUTS)
    x_tile = x + row.to(tl.int64)[:, None] * x_stride + column[None, :]
    span = tl.cdiv(tl.cdiv(inputs, INPUTS), LOW.splits) * INPUTS
    if OVERLAP:  # the next kernel begins with what this one reads, which must be there before it may start
        gdc_wait()
        gdc_launch_dependents()
    for first in tl.range(0, tl.max(highest, axis=0), CHUNK):
        rank = first + tl.arange(0, CHUNK)
        known = tl.reshape(rank[None, :] < highest[:, None], [TOGETHER * CHUNK])
        weight_row = (adapter_index.to(tl.int64)[:, None] * LOW.parts + part) * LOW.most + rank[None, :]
        weight_row = tl.reshape(weight_row, [TOGETHER * CHUNK])
        weight_tile = down + weight_row[None, :] * inputs + column[:, None]
        total = tl.zeros([ROWS, TOGETHER * CHUNK], tl.float32)
        for start in tl.range(split * span, tl.minimum(split * span + span, inputs), INPUTS):
            inside = start + column < inputs
            values = tl.load(x_tile + start, mask=(row < rows)[:, None] & inside[None, :], other=0.0)
            weights = tl.load(weight_tile + start, mask=known[None, :] & inside[:, None], other=0.0)
            total = tl.dot(values, weights, total, input_precision="ieee")
        each = tl.reshape(total, [ROWS, TOGETHER, CHUNK])
        own = tl.sum(tl.where(mine[:, :, None], each, 0.0), axis=1)
        target = (split.to(tl.int64) * rows + row)[:, None] * (LOW.parts * LOW.most) + part * LOW.most + rank[None, :]
        tl.store(low + target, own, mask=(first < its)[:, None])  # whole chunks: what lies beyond a rank is zero


@triton.jit
def matrices_of_group(up, using, ranks, group, first, outputs, inside, LOW: tl.constexpr):
    """One chunk of the ranks of adapters from `group` on, [TOGETHER * CHUNK, OUTPUTS]; zero where no row uses it."""
    TOGETHER: tl.constexpr = LOW.together
    OUTPUTS: tl.constexpr = inside.shape[0]
    adapter_index = group + tl.arange(0, TOGETHER)
    rank = first + tl.arange(0, CHUNK)
    used = (tl.max((using[:, None] == adapter_index[None, :]).to(tl.int32), axis=0) > 0) & (adapter_index < LOW.places)
    limit = tl.load(ranks + adapter_index, mask=used, other=0)
    there = tl.reshape(rank[None, :] < limit[:, None], [TOGETHER * CHUNK])
    weight_row = tl.reshape(adapter_index.to(tl.int64)[:, None] * LOW.most + rank[None, :], [TOGETHER * CHUNK])
    up_tile = up + weight_row[:, None] * outputs + tl.arange(0, OUTPUTS)[None, :]
    return tl.load(up_tile, mask=there[:, None] & inside[None, :], other=0.0)


@triton.jit
def _sum_of_splits(low, its, first, between, SPLITS: tl.constexpr):
    tile = low + (first + tl.arange(0, CHUNK))[None, :]
    mask = (first < its)[:, None]
    total = tl.load(tile, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(tile + between * split, mask=mask, other=0.0)
    return total


@triton.jit
def _spread(values, using, group, ROWS: tl.constexpr, TOGETHER: tl.constexpr):
    """Each row's values where its own adapter's ranks are, zero elsewhere: [ROWS, TOGETHER * CHUNK]."""
    mine = using[:, None] == (group + tl.arange(0, TOGETHER))[None, :]
    each = tl.where(mine[:, :, None], values[:, None, :], 0.0).to(values.dtype)
    return tl.reshape(each, [ROWS, TOGETHER * CHUNK])


@Launcher
@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["adapters"])
def _expand_kernel(
    low: tl.tensor,
    adapters: tl.tensor,
    up: tl.tensor,
    ranks: tl.tensor,
    out: tl.tensor,
    rows,
    first_end,
    second_end,
    third_end,
    outputs,
    LOW: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    EVEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    # The parts end at first_end, second_end, third_end and outputs; no tile has outputs of two parts.
    tile = tl.program_id(0)
    first_tiles = tl.cdiv(first_end, OUTPUTS)
    two_tiles = first_tiles + tl.cdiv(second_end - first_end, OUTPUTS)
    three_tiles = two_tiles + tl.cdiv(third_end - second_end, OUTPUTS)
    part = (tile >= first_tiles).to(tl.int32) + (tile >= two_tiles).to(tl.int32) + (tile >= three_tiles).to(tl.int32)
    begin = tl.where(part == 0, 0, tl.where(part == 1, first_end, tl.where(part == 2, second_end, third_end)))
    end = tl.where(part == 0, first_end, tl.where(part == 1, second_end, tl.where(part == 2, third_end, outputs)))
    tile -= tl.where(part == 0, 0, tl.where(part == 1, first_tiles, tl.where(part == 2, two_tiles, three_tiles)))
    column = tl.arange(0, OUTPUTS)
    start = begin + tile * OUTPUTS
    if EVEN:
        start = tl.multiple_of(start, 16)
    inside = column < (OUTPUTS if EVEN else end - start)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    using = tl.load(adapters + row, mask=row < rows, other=-1)
    its = tl.load(ranks + using, mask=using >= 0, other=0)
    highest = tl.max(its, axis=0)
    wait_for_previous(OVERLAP)
    if highest > 0:
        target = out + start + row.to(tl.int64)[:, None] * outputs + column[None, :]
        update = tl.load(target, mask=(its > 0)[:, None] & inside[None, :], other=0.0).to(tl.float32)
        its_low = low + row.to(tl.int64)[:, None] * (LOW.parts * LOW.most) + part * LOW.most
        between = rows.to(tl.int64) * (LOW.parts * LOW.most)
        PLACES: tl.constexpr = LOW.places
        TOGETHER: tl.constexpr = LOW.together
        for first in tl.range(0, highest, CHUNK):
            values = _sum_of_splits(its_low, its, first, between, LOW.splits).to(up.dtype.element_ty)
            for group in tl.static_range(0, PLACES, TOGETHER):
                weights = matrices_of_group(up + start, using, ranks, group, first, outputs, inside, LOW)
                spread = _spread(values, using, group, ROWS, TOGETHER)
                update = tl.dot(spread, weights, update, input_precision="ieee")
        mask = (its > 0)[:, None] & inside[None, :]
        tl.store(target, update.to(out.dtype.element_ty), mask=mask)


def shrink(
    x: torch.Tensor, adapters: torch.Tensor, down: torch.Tensor, ranks: torch.Tensor, splits: int, tile: int
) -> torch.Tensor:
    """Returns the low-rank products of x: [splits, rows, parts * most] float32, in whole chunks of each row's ranks."""
    rows, inputs = x.shape
    places, parts, most, _ = down.shape
    low = torch.empty(splits, rows, parts * most, dtype=torch.float32, device=x.device)
    together = min(SHRINK_ADAPTERS, triton.next_power_of_2(places))
    _shrink_kernel[(triton.cdiv(rows, tile), parts * splits, triton.cdiv(places, together))](
        x,
        adapters,
        down,
        ranks,
        low,
        rows,
        inputs,
        x.stride(0),
        LowRanks(parts, most, splits, places, together),
        tile,
        num_warps=WARPS,
        num_stages=3,
    )
    return low


def splits_of(inputs: int) -> int:
    return max(1, min(MOST_SPLITS, inputs // INPUTS_OF_SPLIT))


def add_adapters(
    out: torch.Tensor,
    x: torch.Tensor,
    adapters: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    ranks: torch.Tensor,
    ends: tuple[int, ...],
    deterministic: bool = False,
) -> None:
    """Add to each row of `out [rows, outputs]` what its adapter makes of `x [rows, inputs]`; sums in float32.

    adapters  [rows] int32 or int64   the index of each row's adapter; -1: none, and the row is not touched
    down      [places, parts, most, inputs]   up [places, most, outputs]   `most` a multiple of 16
    ranks     [places] int32          how many of the `most` ranks an adapter has; 0: it changes nothing here
    ends      where each of the parts, four at most, ends among the outputs

    With `deterministic` a row's result does not depend on how many rows there are.
    """
    rows, inputs = x.shape
    places, parts, most, _ = down.shape
    first_end, second_end, third_end, outputs = four_ends(ends)
    tile, splits = LARGEST_TILE, splits_of(inputs)
    if not deterministic:
        tile = min(LARGEST_TILE, max(SMALLEST_TILE, triton.next_power_of_2(rows)))
        splits = 1 if rows >= SPLIT_ROWS else splits
    width = WIDE if outputs >= MANY_OUTPUTS or rows > LARGEST_TILE else WIDE // 2
    low = shrink(x, adapters, down, ranks, splits, tile)
    step_bytes = CHUNK.value * (4 * splits * tile + EXPAND_ADAPTERS * width * x.element_size())
    # Buffers of wide tiles leave a processor too few programs.
    deep = 1 if width == WIDE else stages(x.device, 3, step_bytes)
    begins = (0, *ends[:-1])
    out_tiles = sum(triton.cdiv(end - begin, width) for begin, end in zip(begins, ends, strict=True))
    _expand_kernel[(out_tiles, triton.cdiv(rows, tile))](
        low,
        adapters,
        up,
        ranks,
        out,
        rows,
        first_end,
        second_end,
        third_end,
        outputs,
        LowRanks(parts, most, splits, places, min(EXPAND_ADAPTERS, triton.next_power_of_2(places))),
        tile,
        width,
        all(end % width == 0 for end in ends),
        num_warps=WARPS,
        num_stages=deep,
    )


def four_ends(ends: tuple[int, ...]) -> tuple[int, ...]:
    return (*ends, *[ends[-1]] * 3)[:4]
