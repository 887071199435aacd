"""What LoRA adapters add to a linear layer's output, for rows that use different adapters or none.

    shrink   low [splits, rows, parts * rank] = x [rows, inputs] @ down[adapter of the row].T, in parts of the inputs
    expand   out [rows, outputs]             += low @ up[adapter of the row].T

A program belongs to one adapter and reads and writes only the rows that use it, so that programs never meet, and each
adapter's weights are read once for each tile of rows. Ranks go in chunks, so that a low rank costs little where a high
one fits. The adapters' places are slots of stacked weights; `adapters
[rows]` holds each row's slot, or -1. The parts of a layer (queries, keys and values) have their own matrices.
"""

import torch
import triton
import triton.language as tl

from kvern.kernels.launch import overlaps, wait_for_previous

SMALLEST_TILE = 16
"""Of the matrix units."""
LARGEST_TILE = 64
OUTPUTS = 128
INPUTS = 128
CHUNK = 16
"""Ranks of one program, or of one step of its sum; with many rows more, lest these be read often."""
LARGEST_CHUNK = 64
MOST_SPLITS = 16
INPUTS_OF_SPLIT = 512
SPLIT_ROWS = 512
"""With more rows the tiles of rows alone fill the card."""


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
    PARTS: tl.constexpr,
    MOST: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    INPUTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(1) % PARTS
    split = (tl.program_id(1) // PARTS) % SPLITS
    first = tl.program_id(1) // (PARTS * SPLITS) * CHUNK
    slot = tl.program_id(2)
    highest = tl.load(ranks + slot)
    rank = first + tl.arange(0, CHUNK)
    known = rank < highest
    mine = tl.load(adapters + row, mask=row < rows, other=-1) == slot
    used = (tl.max(mine.to(tl.int32), axis=0) > 0) & (first < highest)
    if OVERLAP:
        wait_for_previous()
    if used:
        column = tl.arange(0, INPUTS)
        place = (slot.to(tl.int64) * PARTS + part) * MOST + rank
        weight_tile = down + place[None, :] * inputs + column[:, None]
        x_tile = x + row.to(tl.int64)[:, None] * x_stride + column[None, :]
        span = tl.cdiv(tl.cdiv(inputs, INPUTS), SPLITS) * INPUTS
        total = tl.zeros([ROWS, CHUNK], tl.float32)
        for start in tl.range(split * span, tl.minimum(split * span + span, inputs), INPUTS):
            inside = start + column < inputs
            values = tl.load(x_tile + start, mask=mine[:, None] & inside[None, :], other=0.0)
            weights = tl.load(weight_tile + start, mask=known[None, :] & inside[:, None], other=0.0)
            total = tl.dot(values, weights, total, input_precision="ieee")
        target = (split.to(tl.int64) * rows + row)[:, None] * (PARTS * MOST) + part * MOST + rank[None, :]
        tl.store(low + target, total, mask=mine[:, None] & known[None, :])


@triton.jit
def _sum_of_splits(low_tile, mask, rows, WIDTH: tl.constexpr, SPLITS: tl.constexpr):
    total = tl.load(low_tile, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(low_tile + rows.to(tl.int64) * (split * WIDTH), mask=mask, other=0.0)
    return total


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
    outputs,
    PARTS: tl.constexpr,
    MOST: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    OUTPUTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    # The parts end at first_end, second_end and outputs; no tile has outputs of two parts.
    tile = tl.program_id(0)
    first_tiles = tl.cdiv(first_end, OUTPUTS)
    two_tiles = first_tiles + tl.cdiv(second_end - first_end, OUTPUTS)
    part = (tile >= first_tiles).to(tl.int32) + (tile >= two_tiles).to(tl.int32)
    begin = tl.where(part == 0, 0, tl.where(part == 1, first_end, second_end))
    end = tl.where(part == 0, first_end, tl.where(part == 1, second_end, outputs))
    tile -= tl.where(part == 0, 0, tl.where(part == 1, first_tiles, two_tiles))
    output = begin + tile * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    slot = tl.program_id(2)
    rank = tl.arange(0, CHUNK)
    highest = tl.load(ranks + slot)
    mine = tl.load(adapters + row, mask=row < rows, other=-1) == slot
    used = (tl.max(mine.to(tl.int32), axis=0) > 0) & (highest > 0)
    inside = output < end
    up_tile = up + (slot.to(tl.int64) * outputs + output)[None, :] * MOST + rank[:, None]
    low_tile = low + row.to(tl.int64)[:, None] * (PARTS * MOST) + part * MOST + rank[None, :]
    weights = tl.load(up_tile, mask=used & (rank < highest)[:, None] & inside[None, :], other=0.0)
    if OVERLAP:
        wait_for_previous()
    if used:
        values = _sum_of_splits(low_tile, mine[:, None] & (rank < highest)[None, :], rows, PARTS * MOST, SPLITS)
        update = tl.dot(values.to(weights.dtype), weights, input_precision="ieee")
        for start in tl.range(CHUNK, highest, CHUNK):
            known = start + rank < highest
            weights = tl.load(up_tile + start, mask=known[:, None] & inside[None, :], other=0.0)
            values = _sum_of_splits(low_tile + start, mine[:, None] & known[None, :], rows, PARTS * MOST, SPLITS)
            update = tl.dot(values.to(weights.dtype), weights, update, input_precision="ieee")
        target = out + row.to(tl.int64)[:, None] * outputs + output[None, :]
        mask = mine[:, None] & inside[None, :]
        result = tl.load(target, mask=mask, other=0.0).to(tl.float32) + update
        tl.store(target, result.to(out.dtype.element_ty), mask=mask)


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

    adapters  [rows] int32 or int64   the slot of each row's adapter; -1: none, and the row is not touched
    down      [slots, parts, most, inputs]   up [slots, outputs, most]
    ranks     [slots] int32           how many of the `most` ranks a slot has; 0: it changes nothing here
    ends      where each of the parts, three at most, ends among the outputs

    With `deterministic` a row's result does not depend on how many rows there are.
    """
    rows, inputs = x.shape
    slots, parts, most, _ = down.shape
    first_end, second_end, outputs = (*ends, ends[-1], ends[-1])[:3] if len(ends) < 3 else ends
    tile = LARGEST_TILE
    splits = max(1, min(MOST_SPLITS, inputs // INPUTS_OF_SPLIT))
    chunk = CHUNK
    if not deterministic:
        tile = min(LARGEST_TILE, max(SMALLEST_TILE, triton.next_power_of_2(rows)))
    if not deterministic and rows >= SPLIT_ROWS:
        splits, chunk = 1, max(CHUNK, min(LARGEST_CHUNK, triton.next_power_of_2(most)))
    overlap = overlaps(x.device)
    low = torch.empty(splits, rows, parts * most, dtype=torch.float32, device=x.device)
    row_tiles = triton.cdiv(rows, tile)
    _shrink_kernel[(row_tiles, parts * splits * triton.cdiv(most, chunk), slots)](
        x,
        adapters,
        down,
        ranks,
        low,
        rows,
        inputs,
        x.stride(0),
        parts,
        most,
        splits,
        tile,
        chunk,
        INPUTS,
        overlap,
        num_warps=4,
        num_stages=3,
        launch_pdl=overlap,
    )
    begins = (0, *ends[:-1])
    out_tiles = sum(triton.cdiv(end - begin, OUTPUTS) for begin, end in zip(begins, ends, strict=True))
    _expand_kernel[(out_tiles, row_tiles, slots)](
        low,
        adapters,
        up,
        ranks,
        out,
        rows,
        first_end,
        second_end,
        outputs,
        parts,
        most,
        splits,
        tile,
        CHUNK,
        OUTPUTS,
        overlap,
        num_warps=4,
        launch_pdl=overlap,
    )
