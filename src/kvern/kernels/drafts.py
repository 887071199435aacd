"""Steps in which rows of the batch have drafts, where all that is read and decided stays on the device."""

import torch
import triton
import triton.language as tl

from kvern.kernels.batch import Drafted, TokenRuns, read_tokens
from kvern.kernels.launch import Launcher, cdiv

MOST_TOKENS = 32
"""The most tokens of a row whose drafts are verified."""


def read_drafts(
    tokens: torch.Tensor,
    block_table: torch.Tensor,
    computed: torch.Tensor,
    turns: tuple[torch.Tensor, torch.Tensor],
    runs: TokenRuns,
    exact_starts: torch.Tensor,
    total: int,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `read_tokens`, the positions that are sampled after each token, [4, total] int64, and the row of each
    token, [total] int32.

    runs          `total` tokens together; a start below 0 means that `computed` [slots] int32 has the start
    exact_starts  [R] int32: the starts, written here
    """
    token_slots = torch.empty(total, dtype=torch.int32, device=tokens.device)
    drafted = Drafted(computed, exact_starts, token_slots)
    return read_tokens(tokens, block_table, turns, runs, total, total, block_size, drafted), token_slots


@Launcher
@triton.jit(
    do_not_specialize=["scratch", "token_stride"],
    do_not_specialize_on_alignment=["runs", "sampled", "kept"],
)
def _accept_drafts_kernel(
    tokens: tl.tensor,
    computed: tl.tensor,
    runs: TokenRuns,
    sampled: tl.tensor,
    kept: tl.tensor,
    scratch,
    token_stride: tl.int64,
    BLOCK: tl.constexpr,
):
    run = tl.program_id(0)
    slot = tl.load(runs.slots + run).to(tl.int64)
    count = tl.load(runs.counts + run)
    start = tl.load(runs.starts + run)
    offset = tl.arange(0, BLOCK)
    inside = (offset < count) & (slot != scratch)
    place = tokens + slot * token_stride + start + 1 + offset
    chosen = tl.load(sampled + tl.load(runs.firsts + run) + offset, mask=inside, other=0).to(tl.int32)
    draft = tl.load(place, mask=inside, other=0)
    wrong = (draft != chosen) | (offset >= count - 1)
    right = tl.min(tl.where(wrong, offset, BLOCK), axis=0)
    tl.store(place, chosen, mask=inside)
    if slot != scratch:
        tl.store(computed + slot, start + right + 1)
        tl.store(kept + run, (right + 1).to(tl.int64))


def accept_drafts(
    tokens: torch.Tensor,
    computed: torch.Tensor,
    runs: TokenRuns,
    sampled: torch.Tensor,
    kept: torch.Tensor,
) -> None:
    """Keep what was `sampled [total] int64` behind the tokens of runs as far as their drafts agree, and one more.

    What is sampled takes the drafts' places in `tokens [slots, positions]`; `computed [slots]` says how far rows are
    computed, all int32, and `kept [R] int64` how many are kept.

    TokenRuns have at most MOST_TOKENS; those of the last row, which pads, may have any.
    """
    _accept_drafts_kernel[(runs.slots.shape[0],)](
        tokens,
        computed,
        runs,
        sampled,
        kept,
        tokens.shape[0] - 1,
        tokens.stride(0),
        MOST_TOKENS,
        num_warps=1,
    )


@Launcher
@triton.jit(
    do_not_specialize=["rows", "scratch"],
    do_not_specialize_on_alignment=["asked", "pairs", "state"],
)
def _begin_drafts_kernel(
    computed: tl.tensor,
    asked: tl.tensor,
    pairs: tl.tensor,
    state: tl.tensor,
    rows,
    scratch,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    guesses = tl.load(asked + rows + row, mask=inside, other=0)
    wanted = guesses > 0
    slot = tl.where(wanted, tl.load(asked + row, mask=inside, other=0), scratch)
    newest = tl.load(computed + slot, mask=wanted, other=0)
    tl.store(pairs + 2 * row, slot, mask=inside)
    tl.store(pairs + 2 * row + 1, slot, mask=inside)
    tl.store(pairs + 2 * rows + 2 * row, tl.maximum(newest - 1, 0), mask=inside)
    tl.store(pairs + 2 * rows + 2 * row + 1, newest, mask=inside)
    tl.store(state + row, slot, mask=inside)
    tl.store(state + rows + row, newest, mask=inside)
    tl.store(state + 2 * rows + row, guesses, mask=inside)


def begin_drafts(
    computed: torch.Tensor, asked: torch.Tensor, pairs: torch.Tensor, state: torch.Tensor, scratch: int
) -> None:
    """Chooses the tokens that a draft model reads first: the newest of each row, and the one before it, which may have
    no keys.

    computed  [slots] int32: the positions of the newest tokens, above 0
    asked     [2, R] int32: rows, and how many drafts each wants; 0: it pads
    pairs     [2, 2 * R] int32, written: rows and positions of both tokens of each; of row `scratch` where it pads
    state     [3, R] int32, written: rows, positions of the newest tokens, and drafts to come
    """
    rows = asked.shape[1]
    _begin_drafts_kernel[(cdiv(rows, 64),)](computed, asked, pairs, state, rows, scratch, 64, num_warps=2)


@Launcher
@triton.jit(
    do_not_specialize=["rows", "scratch", "token_stride"],
    do_not_specialize_on_alignment=["state", "sampled"],
)
def _write_drafts_kernel(
    tokens: tl.tensor,
    state: tl.tensor,
    sampled: tl.tensor,
    rows,
    scratch,
    token_stride: tl.int64,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    slot = tl.load(state + row, mask=inside, other=0)
    position = tl.load(state + rows + row, mask=inside, other=0)
    left = tl.load(state + 2 * rows + row, mask=inside, other=0)
    draft = tl.load(sampled + row, mask=inside, other=0).to(tl.int32)
    tl.store(tokens + slot.to(tl.int64) * token_stride + position + 1, draft, mask=inside & (left > 0))
    goes_on = left > 1
    tl.store(state + row, tl.where(goes_on, slot, scratch), mask=inside)
    tl.store(state + rows + row, tl.where(goes_on, position + 1, 0), mask=inside)
    tl.store(state + 2 * rows + row, left - 1, mask=inside)


def write_drafts(tokens: torch.Tensor, state: torch.Tensor, sampled: torch.Tensor) -> None:
    """Write `sampled [R] int64` to `tokens [slots, positions]` behind the tokens that `state [3, R] int32` says, which
    goes on to these; rows that have all their drafts become the last one, which pads.
    """
    rows = state.shape[1]
    _write_drafts_kernel[(cdiv(rows, 64),)](
        tokens, state, sampled, rows, tokens.shape[0] - 1, tokens.stride(0), 64, num_warps=2
    )
