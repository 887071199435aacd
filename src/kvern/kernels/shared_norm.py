"""A rank's share of a norm over rows that all ranks have summands of: it sums, adds and normalises some of the rows.

What others send is copied to memory of this rank, and behind it flags: numbers of a turn, which is another each time.
"""

import torch
import triton
import triton.language as tl

from kvern.kernels.launch import INTERPRETED, Launcher, next_power_of_2, wait_for_previous
from kvern.kernels.peer_words import POLLS

AWAIT = tl.constexpr(
    "{ .reg .pred other; .reg .b32 found, polls; mov.u32 found, %tid.x; setp.ne.u32 other, found, 0; @other bra end;"
    " mov.b32 polls, 0; again: ld.acquire.sys.global.b32 found, [$1]; setp.eq.b32 other, found, $2; @other bra end;"
    f" add.u32 polls, polls, 1; and.b32 found, polls, {POLLS.value - 1}; setp.ne.b32 other, found, 0; @other bra again;"
    " ld.relaxed.sys.global.b32 found, [$3]; setp.eq.b32 other, found, 0; @other bra again; end: mov.b32 $0, 0; }"
)
"""One thread of a program waits; the others go on."""


@triton.jit
def _await_others(flags, turn, lost, RANK: tl.constexpr, SIZE: tl.constexpr):
    """Until the flags of all others `[SIZE]` show the turn, or the host says at the address `lost` that a rank is."""
    for other in tl.static_range(SIZE):
        if other != RANK:
            if INTERPRETED:
                while (tl.load(flags + other) != turn) & (tl.load(lost.to(tl.pointer_type(tl.int32))) == 0):
                    pass
            else:
                address = (flags + other).to(tl.int64)
                tl.inline_asm_elementwise(AWAIT, "=r,l,r,l", [address, turn, lost], tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()


@Launcher
@triton.jit(do_not_specialize=["turn", "lost", "first", "sent_rows"])
def _shared_norm_kernel(
    x: tl.tensor,
    sent: tl.tensor,
    hidden: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    flags: tl.tensor,
    turn,
    lost: tl.int64,
    first: tl.int64,
    sent_rows: tl.int64,
    hidden_stride: tl.int64,
    epsilon: tl.float32,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    width: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    dtype: tl.constexpr = x.dtype.element_ty
    column = tl.arange(0, BLOCK)
    inside = column < width
    if NORM:
        gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(OVERLAP)
    _await_others(flags, turn, lost, RANK, SIZE)
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for other in tl.static_range(SIZE):
        if other == RANK:
            part = tl.load(x + (first + row) * width + column, mask=inside, other=0.0)
        else:
            source = sent + (other * sent_rows + row) * width + column
            part = tl.load(source, mask=inside, other=0.0, cache_modifier=".cg")
        total += part.to(tl.float32)
    residual = hidden + (first + row) * hidden_stride + column
    total = total.to(dtype).to(tl.float32) + tl.load(residual, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        tl.store(residual, total.to(dtype), mask=inside)
        total = total.to(dtype).to(tl.float32)
        total *= tl.rsqrt(tl.sum(total * total, axis=0) / width + epsilon) * gain
    tl.store(out + (first + row) * width + column, total.to(dtype), mask=inside)


@Launcher
@triton.jit(do_not_specialize=["turn", "lost"])
def _await_kernel(
    flags: tl.tensor, turn, lost: tl.int64, RANK: tl.constexpr, SIZE: tl.constexpr, OVERLAP: tl.constexpr
):
    wait_for_previous(OVERLAP)
    _await_others(flags, turn, lost, RANK, SIZE)


def shared_norm(
    x: torch.Tensor,
    sent: torch.Tensor,
    hidden: torch.Tensor,
    out: torch.Tensor,
    own: range,
    flags: torch.Tensor,
    turn: int,
    lost: torch.Tensor,
    rank: int,
    weight: torch.Tensor | None = None,
    epsilon: float = 0.0,
) -> None:
    """Adds the sum over ranks to `hidden` for this rank's `own` rows, with the norm in `out`, like `add_rms_norm`.

    x [T, width] are this rank's summands, sent [size, rows, width] those that others have for its rows, once their
    flags [size] int32 show the turn, or `lost` [1] int32 of the host is not 0: then all is wrong. Without a weight the
    sum and the residual are in `out`, and `hidden` is as it was.
    """
    size, sent_rows, width = sent.shape
    block = next_power_of_2(width)
    _shared_norm_kernel[(len(own),)](
        x,
        sent,
        hidden,
        x if weight is None else weight,
        out,
        flags,
        turn,
        lost.data_ptr(),
        own.start,
        sent_rows,
        hidden.stride(0),
        epsilon,
        rank,
        size,
        width,
        weight is not None,
        block,
        num_warps=min(16, max(1, block // 512)),
    )


def await_flags(flags: torch.Tensor, turn: int, lost: torch.Tensor, rank: int) -> None:
    """Waits until the flags [size] int32 of all other ranks show the turn, before later launches begin; see above."""
    _await_kernel[(1,)](flags, turn, lost.data_ptr(), rank, len(flags), num_warps=1)
