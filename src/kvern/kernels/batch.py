"""Reading a step's tokens from the batch on the device, and writing what was sampled back to it."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kvern.kernels.launch import Launcher, cdiv, wait_for_previous


class TokenRuns(NamedTuple):
    """R runs of tokens of a step of T tokens: [R] int32 each.

    slots, starts, counts   row, first position and number of tokens of each run
    firsts                  index of the first token of each run among the T tokens
    """

    slots: Any
    starts: Any
    firsts: Any
    counts: Any


class Drafted(NamedTuple):
    """The further arguments of runs with drafts: how far rows are computed, and what is written of starts and rows."""

    computed: Any = None
    exact_starts: Any = None
    token_slots: Any = None


NO_DRAFTS = Drafted()


@Launcher
@triton.jit(
    do_not_specialize=["total", "token_stride", "table_stride"], do_not_specialize_on_alignment=["runs", "drafted"]
)
def _read_tokens_kernel(
    tokens: tl.tensor,
    block_table: tl.tensor,
    turn_first: tl.tensor,
    turn_shift: tl.tensor,
    runs: TokenRuns,
    drafted: Drafted,
    described: tl.tensor,
    total,
    token_stride: tl.int64,
    table_stride: tl.int64,
    block_size: tl.constexpr,
    BLOCK: tl.constexpr,
):
    run = tl.program_id(0)
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < tl.load(runs.counts + run)
    slot = tl.load(runs.slots + run).to(tl.int64)
    start = tl.load(runs.starts + run)
    if drafted.computed is not None:
        start = tl.where(start < 0, tl.load(drafted.computed + slot), start)
        if tl.program_id(1) == 0:
            tl.store(drafted.exact_starts + run, start)
    position = start + offset
    target = described + tl.load(runs.firsts + run) + offset
    token = tl.load(tokens + slot * token_stride + position, mask=inside, other=0)
    block = tl.load(block_table + slot * table_stride + position // block_size, mask=inside, other=0).to(tl.int64)
    shift = tl.where(position >= tl.load(turn_first + slot), tl.load(turn_shift + slot), 0)
    tl.store(target, token.to(tl.int64), mask=inside)
    tl.store(target + total, position.to(tl.int64) + shift, mask=inside)
    tl.store(target + 2 * total, block * block_size + position % block_size, mask=inside)
    if drafted.computed is not None:
        tl.store(target + 3 * total, position.to(tl.int64) + 1, mask=inside)
        tl.store(drafted.token_slots + tl.load(runs.firsts + run) + offset, slot.to(tl.int32), mask=inside)


def read_tokens(
    tokens: torch.Tensor,
    block_table: torch.Tensor,
    turns: tuple[torch.Tensor, torch.Tensor],
    runs: TokenRuns,
    total: int,
    longest: int,
    block_size: int,
    drafted: Drafted = NO_DRAFTS,
) -> torch.Tensor:
    """Token ids, positions and slot mapping of a step, [3, total] int64.

    tokens [slots, positions] and block_table [slots, blocks] int32 and turns, [slots] int64 each, are the batch: from
    the position turns[0] on positions are shifted by turns[1]. TokenRuns have `longest` tokens at most.
    """
    few = drafted.computed is not None
    described = torch.empty(4 if few else 3, total, dtype=torch.int64, device=tokens.device)
    block = 64 if few else 1024
    _read_tokens_kernel[(runs.slots.shape[0], cdiv(longest, block))](
        tokens,
        block_table,
        *turns,
        runs,
        drafted,
        described,
        total,
        tokens.stride(0),
        block_table.stride(0),
        block_size,
        block,
        num_warps=2 if few else 4,
    )
    return described


@Launcher
@triton.jit(
    do_not_specialize=["rows", "total", "table_stride"],
    do_not_specialize_on_alignment=["runs", "slot_mappings"],
)
def _read_slots_kernel(
    tables: tl.tensor,
    runs: TokenRuns,
    slot_mappings: tl.tensor,
    rows,
    total,
    table_stride: tl.int64,
    block_size: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0)
    table = tl.program_id(2)
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < tl.load(runs.counts + request)
    row = ((table + 1) * rows + tl.load(runs.slots + request)).to(tl.int64)
    position = tl.load(runs.starts + request) + offset
    block = tl.load(tables + row * table_stride + position // block_size, mask=inside, other=0).to(tl.int64)
    target = table.to(tl.int64) * total + tl.load(runs.firsts + request) + offset
    tl.store(slot_mappings + target, block * block_size + position % block_size, mask=inside)


def read_slots(
    tables: torch.Tensor,
    rows: int,
    runs: TokenRuns,
    total: int,
    longest: int,
    block_size: int,
) -> torch.Tensor:
    """Slot mappings of a step by all block tables but the first, [tables - 1, total] int64.

    tables [tables * rows, blocks] int32 are those of a batch, one behind the other; what follows is as for
    `read_tokens`.
    """
    count = len(tables) // rows - 1
    slot_mappings = torch.empty(count, total, dtype=torch.int64, device=tables.device)
    block = 1024 if longest > 1 else 16
    _read_slots_kernel[(runs.slots.shape[0], cdiv(longest, block), count)](
        tables,
        runs,
        slot_mappings,
        rows,
        total,
        tables.stride(0),
        block_size,
        block,
        num_warps=4 if longest > 1 else 1,
    )
    return slot_mappings


@Launcher
@triton.jit(
    do_not_specialize=["requests", "token_stride", "table_stride"],
    do_not_specialize_on_alignment=["slots", "starts", "token_ids", "positions", "slot_mapping", "next_positions"],
)
def _read_decodes_kernel(
    tokens: tl.tensor,
    block_table: tl.tensor,
    turn_first: tl.tensor,
    turn_shift: tl.tensor,
    slots: tl.tensor,
    starts: tl.tensor,
    token_ids: tl.tensor,
    positions: tl.tensor,
    slot_mapping: tl.tensor,
    next_positions: tl.tensor,
    requests,
    token_stride: tl.int64,
    table_stride: tl.int64,
    block_size: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous(OVERLAP)
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = request < requests
    slot = tl.load(slots + request, mask=inside, other=0).to(tl.int64)
    position = tl.load(starts + request, mask=inside, other=0)
    token = tl.load(tokens + slot * token_stride + position, mask=inside, other=0)
    block = tl.load(block_table + slot * table_stride + position // block_size, mask=inside, other=0).to(tl.int64)
    first = tl.load(turn_first + slot, mask=inside, other=0)
    shift = tl.load(turn_shift + slot, mask=inside, other=0)
    tl.store(token_ids + request, token.to(tl.int64), mask=inside)
    tl.store(positions + request, position.to(tl.int64) + tl.where(position >= first, shift, 0), mask=inside)
    tl.store(slot_mapping + request, block * block_size + position % block_size, mask=inside)
    tl.store(next_positions + request, position.to(tl.int64) + 1, mask=inside)


def read_decodes(
    tokens: torch.Tensor,
    block_table: torch.Tensor,
    turns: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    starts: torch.Tensor,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`read_tokens` for one token of each request, and the positions that are sampled; each [R] int64."""
    requests = slots.shape[0]
    token_ids, positions, slot_mapping, next_positions = torch.empty(
        4, requests, dtype=torch.int64, device=tokens.device
    )
    _read_decodes_kernel[(cdiv(requests, 64),)](
        tokens,
        block_table,
        *turns,
        slots,
        starts,
        token_ids,
        positions,
        slot_mapping,
        next_positions,
        requests,
        tokens.stride(0),
        block_table.stride(0),
        block_size,
        64,
        num_warps=2,
    )
    return token_ids, positions, slot_mapping, next_positions


@Launcher
@triton.jit(
    do_not_specialize=["requests", "scratch", "token_stride"],
    do_not_specialize_on_alignment=["slots", "positions", "sampled", "starts"],
)
def _write_sampled_kernel(
    tokens: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    sampled: tl.tensor,
    starts: tl.tensor,
    requests,
    scratch,
    token_stride: tl.int64,
    ADVANCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = request < requests
    slot = tl.load(slots + request, mask=inside, other=0).to(tl.int64)
    position = tl.load(positions + request, mask=inside, other=0)
    token = tl.load(sampled + request, mask=inside, other=0)
    tl.store(tokens + slot * token_stride + position, token.to(tl.int32), mask=inside)
    if ADVANCE:
        start = tl.load(starts + request, mask=inside, other=0)
        tl.store(starts + request, tl.where(slot == scratch, start, start + 1), mask=inside)


def write_sampled(
    tokens: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    sampled: torch.Tensor,
    starts: torch.Tensor | None = None,
) -> None:
    """Write `sampled [R] int64` to the batch's `tokens [slots, positions]` at its `positions [R] int64`.

    `starts [R] int32`, if given, are advanced by one, but for the last row of the batch, which pads.
    """
    requests = slots.shape[0]
    _write_sampled_kernel[(cdiv(requests, 64),)](
        tokens,
        slots,
        positions,
        sampled,
        slots if starts is None else starts,
        requests,
        tokens.shape[0] - 1,
        tokens.stride(0),
        starts is not None,
        64,
        num_warps=2,
    )


@Launcher
@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=["runs", "data"])
def _write_runs_kernel(target: tl.tensor, runs: tl.tensor, data: tl.tensor, stride: tl.int64, BLOCK: tl.constexpr):
    run = runs + tl.program_id(0) * 4
    slot = tl.load(run).to(tl.int64)
    first = tl.load(run + 1)
    source = tl.load(run + 2)
    count = tl.load(run + 3)
    for start in tl.range(0, count, BLOCK):
        offset = start + tl.arange(0, BLOCK)
        inside = offset < count
        values = tl.load(data + source + offset, mask=inside, other=0)
        tl.store(target + slot * stride + first + offset, values, mask=inside)


def write_runs(target: torch.Tensor, runs: torch.Tensor, data: torch.Tensor) -> None:
    """Write runs of `data` to rows of `target [slots, width]`, all int32.

    `runs [R, 4]`: row, first column, first index in data, and length.
    """
    _write_runs_kernel[(runs.shape[0],)](target, runs, data, target.stride(0), 256, num_warps=2)


@triton.jit(do_not_specialize_on_alignment=["sources", "targets"])
def _copy_blocks_kernel(
    source: tl.tensor,
    target: tl.tensor,
    sources: tl.tensor,
    targets: tl.tensor,
    source_stride: tl.int64,
    target_stride: tl.int64,
    size,
    BLOCK: tl.constexpr,
):
    part = tl.program_id(1).to(tl.int64)
    origin = source + part * source_stride + tl.load(sources + tl.program_id(0)) * size
    place = target + part * target_stride + tl.load(targets + tl.program_id(0)) * size
    offset = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    tl.store(place + offset, tl.load(origin + offset, mask=offset < size, other=0), mask=offset < size)


def copy_pool_blocks(pool: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor, order: torch.Tensor) -> None:
    """Copy blocks `sources` [N] of `pool [parts, blocks, ...]` to `targets` [N], all read before one is written.

    `order` [N] are the numbers from 0 on; all three int64. Blocks have an even number of bytes. Moves each
    block twice: it rests in memory of its own between.
    """
    numbers = pool.flatten(2).view(torch.int16)
    parts, _, size = numbers.shape
    count = sources.shape[0]
    kept = torch.empty(parts, count, size, dtype=torch.int16, device=pool.device)
    grid = count, parts, triton.cdiv(size, 8192)
    for origin, place, *indices in ((numbers, kept, sources, order), (kept, numbers, order, targets)):
        _copy_blocks_kernel[grid](origin, place, *indices, origin.stride(0), place.stride(0), size, 8192, num_warps=8)
