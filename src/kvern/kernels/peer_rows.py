"""Sums over ranks as in `peer_sum.py`, for more rows: numbers alone are sent, and a flag behind those of a program.

    x of this rank -> rows to all others, then flags -> [rows of all + x, in rank order] -> [residual +=] -> [norm]

Half as many bytes go to others as with an epoch beside the numbers, but a flag has to wait until all that was written
before is there. A row's program is the same on all ranks and in all launches: `row % programs`, of which there are no
more than any rank's device has processors. It counts its epochs, and of rows and flags there are copies of even and of
odd ones; why two are enough `peer_sum.py` says. A program sends all its rows, then its flags, and only then waits.

Of still more rows each is summed by one rank, its owner, to whom the others send it, and who sends them the sum:

    x of this rank -> rows to their owners, flags -> [rows of all + x] of own rows -> sums to all others, flags -> ...

Of each row a rank sends (or is owner, and sends) 2 / size of what it has to send otherwise, in two steps. A program's
rows have one owner, the rank `program % size`. Both kinds of sums use the same memory and count the same epochs: behind
both a rank knows that all others have ended the epoch before, as the owner has heard of all before it answers.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvern.kernels.launch import INTERPRETED, Launcher, next_power_of_2, overlaps, wait_for_previous
from kvern.kernels.norm import PLAIN
from kvern.kernels.quantize_rows import Coding, RowCodes, store_codes

MOST_ROWS = 512
MOST_BYTES = 64 << 20
"""Of a rank's memory that others write to."""


class PeerRows(NamedTuple):
    """What a rank needs for sums of up to `rows` rows of `width` numbers; all is zero at first.

    memory   int64, to which others write: numbers [2, size, rows, width] by the epoch's parity, sender, row; then
             flags [2, size, programs] int32
    buffers  [size] int64, addresses of each rank's memory as this one's device sees them
    epochs   [programs] int32, of this rank; the least of all ranks' processors
    """

    memory: torch.Tensor
    buffers: torch.Tensor
    epochs: torch.Tensor
    rank: int
    size: int
    rows: int
    width: int


def rows_kept(size: int, width: int, dtype: torch.dtype) -> int:
    """For how many rows ranks keep memory; 0: such rows are not summed."""
    return min(MOST_ROWS, MOST_BYTES // (2 * size * width * dtype.itemsize)) if width % 16 == 0 else 0


def memory_of(size: int, rows: int, width: int, dtype: torch.dtype, programs: int) -> int:
    """How many int64 a rank's memory of `PeerRows` has."""
    return 2 * size * (rows * width * dtype.itemsize + 4 * programs) // 8


def _by_one(instructions: str) -> tl.constexpr:
    """What one thread of a program does; the others go on."""
    thread = (
        "{ .reg .pred other; .reg .b32 thread; mov.u32 thread, %tid.x; setp.ne.u32 other, thread, 0; @other bra end;"
    )
    return tl.constexpr(f"{thread} {instructions} end: mov.b32 $0, 0; }}")


FENCE = _by_one("fence.acq_rel.sys;")
RAISE = _by_one("st.relaxed.sys.global.b32 [$1], $2;")
AWAIT = _by_one("again: ld.acquire.sys.global.b32 thread, [$1]; setp.ne.b32 other, thread, $2; @other bra again;")


@triton.jit
def _fence():
    """What all threads wrote before is there before anything that one of them writes afterwards."""
    if not INTERPRETED:
        tl.debug_barrier()
        tl.inline_asm_elementwise(FENCE, "=r", [], tl.int32, is_pure=False, pack=1)


@triton.jit
def _raise(flag, epoch):
    if INTERPRETED:
        tl.store(flag.to(tl.pointer_type(tl.int32)), epoch)
    else:
        tl.inline_asm_elementwise(RAISE, "=r,l,r", [flag, epoch], tl.int32, is_pure=False, pack=1)


@triton.jit
def _await(flag, epoch):
    """One thread waits; a barrier has the others wait for that."""
    if INTERPRETED:
        while tl.load(flag.to(tl.pointer_type(tl.int32))) != epoch:
            pass
    else:
        tl.inline_asm_elementwise(AWAIT, "=r,l,r", [flag, epoch], tl.int32, is_pure=False, pack=1)


@triton.jit
def _place(buffer, parity, sender, row, SLOTS: tl.constexpr, ROW_BYTES: tl.constexpr, dtype: tl.constexpr):
    """Where a sender's row is in a rank's memory."""
    return tl.multiple_of((buffer + ((parity + sender) * SLOTS + row) * ROW_BYTES).to(tl.pointer_type(dtype)), 16)


@triton.jit
def _total(
    x, own_buffer, parity, row, column, inside, width: tl.constexpr,
    RANK: tl.constexpr, SIZE: tl.constexpr, SLOTS: tl.constexpr, ROW_BYTES: tl.constexpr,
):  # fmt: skip
    """The sum of a row of this rank and those that the others have sent, in rank order."""
    dtype: tl.constexpr = x.dtype.element_ty
    total = tl.zeros(column.shape, tl.float32)
    for other in tl.static_range(SIZE):
        if other == RANK:
            part = tl.load(x + row * width + column, mask=inside, other=0.0)
        else:
            source = _place(own_buffer, parity, other, row, SLOTS, ROW_BYTES, dtype)
            part = tl.load(source + column, mask=inside, other=0.0, cache_modifier=".cg")
        total += part.to(tl.float32)
    return total


@triton.jit
def _send_to_others(
    buffers, numbers, parity, row, column, inside,
    RANK: tl.constexpr, SIZE: tl.constexpr, SLOTS: tl.constexpr, ROW_BYTES: tl.constexpr,
):  # fmt: skip
    for other in tl.static_range(SIZE):
        if other != RANK:
            target = _place(tl.load(buffers + other), parity, RANK, row, SLOTS, ROW_BYTES, numbers.dtype)
            tl.store(target + column, numbers, mask=inside)


@triton.jit
def _raise_at_others(buffers, flag, epoch, RANK: tl.constexpr, SIZE: tl.constexpr):
    """`flag`: where this rank's is in the memory of each."""
    for other in tl.static_range(SIZE):
        if other != RANK:
            _raise(tl.load(buffers + other) + flag, epoch)


@triton.jit
def _await_others(flags, stride, epoch, RANK: tl.constexpr, SIZE: tl.constexpr):
    for other in tl.static_range(SIZE):
        if other != RANK:
            _await(flags + other * stride, epoch)
    tl.debug_barrier()


@Launcher
@triton.jit(do_not_specialize=["rows", "scale_stride", "group_stride"])
def _peer_rows_kernel(
    x: tl.tensor,
    hidden: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    scales,
    static,
    scale_stride,
    group_stride,
    limit,
    buffers: tl.tensor,
    epochs: tl.tensor,
    rows,
    hidden_stride: tl.int64,
    epsilon: tl.float32,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
    FLAGS: tl.constexpr,
    OWNED: tl.constexpr,
    width: tl.constexpr,
    NORM: tl.constexpr,
    CODED: tl.constexpr,
    LARGEST: tl.constexpr,
    INTEGER: tl.constexpr,
    STATIC: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """SLOTS rows of each rank, and as many FLAGS. OWNED: a program's rows are summed by one rank.

    CODED: the norm as codes; else what is said of these is None.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    ROW_BYTES: tl.constexpr = width * dtype.primitive_bitwidth // 8
    column = tl.arange(0, BLOCK)
    inside = column < width
    if NORM:
        gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    own_buffer = tl.load(buffers + RANK)
    if OVERLAP:
        wait_for_previous()
    first = tl.program_id(0).to(tl.int64)
    owner = first % SIZE
    epoch = tl.load(epochs + first) + 1
    parity = (epoch & 1).to(tl.int64) * SIZE
    flags = 2 * SIZE * SLOTS * ROW_BYTES + (parity * FLAGS + first) * 4
    if OWNED:
        if owner == RANK:
            _await_others(own_buffer + flags, FLAGS * 4, epoch, RANK, SIZE)
            for row in range(first, rows, tl.num_programs(0)):
                total = _total(x, own_buffer, parity, row, column, inside, width, RANK, SIZE, SLOTS, ROW_BYTES)
                _send_to_others(buffers, total.to(dtype), parity, row, column, inside, RANK, SIZE, SLOTS, ROW_BYTES)
                own = _place(own_buffer, parity, RANK, row, SLOTS, ROW_BYTES, dtype)
                tl.store(own + column, total.to(dtype), mask=inside)
            _fence()
            _raise_at_others(buffers, flags + RANK * FLAGS * 4, epoch, RANK, SIZE)
        else:
            target = tl.load(buffers + owner)
            for row in range(first, rows, tl.num_programs(0)):
                numbers = tl.load(x + row * width + column, mask=inside, other=0.0)
                theirs = _place(target, parity, RANK, row, SLOTS, ROW_BYTES, dtype)
                tl.store(theirs + column, numbers, mask=inside)
            _fence()
            _raise(target + flags + RANK * FLAGS * 4, epoch)
            _await(own_buffer + flags + owner * (FLAGS * 4), epoch)
    else:
        for row in range(first, rows, tl.num_programs(0)):
            numbers = tl.load(x + row * width + column, mask=inside, other=0.0)
            _send_to_others(buffers, numbers, parity, row, column, inside, RANK, SIZE, SLOTS, ROW_BYTES)
        _fence()
        _raise_at_others(buffers, flags + RANK * FLAGS * 4, epoch, RANK, SIZE)
        _await_others(own_buffer + flags, FLAGS * 4, epoch, RANK, SIZE)
    tl.debug_barrier()  # all threads have read the epoch, and find what the others have sent
    tl.store(epochs + first, epoch)
    for row in range(first, rows, tl.num_programs(0)):
        if OWNED:
            summed = _place(own_buffer, parity, owner, row, SLOTS, ROW_BYTES, dtype)
            total = tl.load(summed + column, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        else:
            total = _total(x, own_buffer, parity, row, column, inside, width, RANK, SIZE, SLOTS, ROW_BYTES)
        if NORM:
            residual = hidden + row * hidden_stride + column
            total = total.to(dtype).to(tl.float32) + tl.load(residual, mask=inside, other=0.0).to(tl.float32)
            tl.store(residual, total.to(dtype), mask=inside)
            total = total.to(dtype).to(tl.float32)
            total *= tl.rsqrt(tl.sum(total * total, axis=0) / width + epsilon) * gain
        if CODED:
            normal = total.to(dtype).to(tl.float32)
            store_codes(
                normal, row, column, width, out, scales, static, scale_stride, group_stride, limit,
                LARGEST, INTEGER, STATIC, GROUP,
            )  # fmt: skip
        else:
            tl.store(out + row * width + column, total.to(dtype), mask=inside)


def peer_rows(x: torch.Tensor, peers: PeerRows, owned: bool = False) -> torch.Tensor:
    """The sum of all ranks' `x [rows, width]`, in their order and in float32; at most `peers.rows` rows.

    Writes as many bytes to each other rank as `x` has, and reads as many; if rows are `owned`, 2 / size of that.
    """
    out = torch.empty_like(x)
    _launch(x, None, None, 0.0, peers, owned, out)
    return out


def peer_rows_norm(
    x: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    peers: PeerRows,
    owned: bool = False,
) -> torch.Tensor:
    """`add_rms_norm(hidden, peer_rows(x), weight, epsilon)` in one launch: `hidden` is added to in place."""
    out = torch.empty_like(x)
    _launch(x, hidden, weight, epsilon, peers, owned, out)
    return out


def coded_peer_rows_norm(
    x: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    peers: PeerRows,
    coding: Coding,
    owned: bool = False,
) -> RowCodes:
    """What `coding`, whose groups are no longer than a row, makes of `peer_rows_norm`."""
    made = coding.empty(x.shape[0], x.shape[1], x.device)
    _launch(x, hidden, weight, epsilon, peers, owned, made, coding)
    return made


def _launch(
    x: torch.Tensor,
    hidden: torch.Tensor | None,
    weight: torch.Tensor | None,
    epsilon: float,
    peers: PeerRows,
    owned: bool,
    out: torch.Tensor | RowCodes,
    coding: Coding | None = None,
) -> None:
    """`out`: where the result goes, as codes with a `coding`."""
    variables: tuple[object, ...] = (out, *PLAIN, None)
    constants: tuple[object, ...] = PLAIN
    if coding is not None and isinstance(out, RowCodes):
        variables, constants = coding.arguments(out)
    rows, width = x.shape
    block = next_power_of_2(width)
    overlap, programs = overlaps(x.device), len(peers.epochs)
    _peer_rows_kernel[(min(rows, programs),)](
        x,
        x if hidden is None else hidden,
        x if weight is None else weight,
        *variables,
        peers.buffers,
        peers.epochs,
        rows,
        0 if hidden is None else hidden.stride(0),
        epsilon,
        peers.rank,
        peers.size,
        peers.rows,
        programs,
        owned,
        width,
        hidden is not None,
        coding is not None,
        *constants,
        block,
        overlap,
        num_warps=min(16, max(1, block // 512)),
        launch_pdl=overlap,
    )
