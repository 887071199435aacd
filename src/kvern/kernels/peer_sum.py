"""Sums of what several ranks have, each GPU writing into memory of the others, with what follows a sum in a layer.

    whole  x of this rank -> to all others -> [x of all, in rank order] -> [residual +=] -> [norm]
    parts  parts of x -> to the ranks that sum them -> [this rank's part of all] -> to all -> [residual +=] -> [norm]

In parts each rank sums a part of every row and hands that on: of two steps, but 2 / size of the bytes.

Both use the same memory, by the protocol of `peer_words.py`: a rank's words are where it sends whole rows, and where it
sends a part's sum, which is never where it sends a part to be summed by another. Behind both a rank knows that all
others have ended the epoch before, as a part's sum takes words of all. A program sends all its rows, then sums its part
of each and sends that, then takes the sums.
"""

import torch
import triton
import triton.language as tl

from kvern.kernels.launch import Launcher, next_power_of_2, wait_for_previous
from kvern.kernels.peer_words import (
    PeerMemory,
    joined,
    launched,
    numbers_of,
    others_of,
    received,
    remove,
    send,
    total_of,
)
from kvern.kernels.quantize_rows import Coding, Destination, RowCodes, Strides, Target, store_codes


@Launcher
@triton.jit(do_not_specialize=["rows", "strides"])
def _peer_sum_kernel(
    x: tl.tensor,
    hidden: tl.tensor,
    weight: tl.tensor,
    target: Target,
    strides: Strides,
    buffers: tl.tensor,
    epochs: tl.tensor,
    rows,
    hidden_stride: tl.int64,
    epsilon: tl.float32,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
    WORDS: tl.constexpr,
    PART: tl.constexpr,
    NORM: tl.constexpr,
    RULE: tl.constexpr,
    BLOCK: tl.constexpr,
    PART_BLOCK: tl.constexpr,
    PACK: tl.constexpr,
    PART_PACK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """WORDS of a row, BLOCK of a program, of which threads have PACK each; PART of them are summed here, 0: all.

    RULE: that of codes, in which the norm is, or None.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    BITS: tl.constexpr = tl.pointer_type(tl.int32)
    WIDTH: tl.constexpr = WORDS * 32 // dtype.primitive_bitwidth
    OF_RANK: tl.constexpr = SLOTS * WORDS * 4
    index = tl.arange(0, BLOCK)
    inside = index < WORDS
    word = tl.max_contiguous(tl.minimum(index, WORDS - 1), 1)  # neighbouring threads send neighbouring words
    if NORM:
        if weight.dtype.element_ty.primitive_bitwidth == dtype.primitive_bitwidth:
            low_gain, high_gain = numbers_of(tl.load(weight.to(BITS) + word), weight.dtype.element_ty)
        else:
            low_gain, high_gain = tl.load(weight + 2 * word), tl.load(weight + 2 * word + 1)
    own_memory, lost = tl.load(buffers + RANK), tl.load(buffers + SIZE)
    if PART:
        summing = word // PART
        their_memory = tl.load(buffers + summing)
        part = tl.arange(0, PART_BLOCK)
        part_word = RANK * PART + part
        of_part = (part < PART) & (part_word < WORDS)
    wait_for_previous(OVERLAP)
    first = tl.program_id(0).to(tl.int64)
    for row in range(first, rows, tl.num_programs(0)):
        parity = (tl.load(epochs + row) & 1).to(tl.int64)
        numbers = tl.load((x + row * WIDTH).to(BITS) + word)
        place = ((parity * SIZE + RANK) * SLOTS + row) * (WORDS * 4) + word * 4
        if PART:
            send(their_memory + place, numbers, inside & (summing != RANK))
        else:
            for other in tl.static_range(SIZE):
                if other != RANK:
                    send(tl.load(buffers + other) + place, numbers, inside)
    if PART:
        for row in range(first, rows, tl.num_programs(0)):
            parity = (tl.load(epochs + row) & 1).to(tl.int64)
            own = tl.load((x + row * WIDTH).to(BITS) + part_word, mask=of_part, other=0)
            place = (parity * (SIZE * SLOTS) + row) * (WORDS * 4) + part_word * 4
            parts = received(own_memory + place, of_part, lost, others_of(RANK, SIZE), OF_RANK, PART_PACK)
            low, high = total_of(own, parts, dtype, RANK, SIZE)
            total = joined(low, high, dtype)
            for other in tl.static_range(SIZE):
                send(tl.load(buffers + other) + place + RANK * OF_RANK, total, of_part)
    for row in range(first, rows, tl.num_programs(0)):
        epoch = tl.load(epochs + row)
        parity = (epoch & 1).to(tl.int64)
        if NORM:
            residual = (hidden + row * hidden_stride).to(BITS) + word
            low_residual, high_residual = numbers_of(tl.load(residual), dtype)
        memory = own_memory + (parity * (SIZE * SLOTS) + row) * (WORDS * 4)
        place = memory + word * 4
        if PART:
            summed = received(place + summing * OF_RANK, inside, lost, (0,), OF_RANK, PACK)
            low, high = numbers_of(summed[0], dtype)
        else:
            own = tl.load((x + row * WIDTH).to(BITS) + word)
            rows_of_others = received(place, inside, lost, others_of(RANK, SIZE), OF_RANK, PACK)
            low, high = total_of(own, rows_of_others, dtype, RANK, SIZE)
        if NORM:
            low, high = numbers_of(joined(low, high, dtype), dtype)
            total = joined(low + low_residual, high + high_residual, dtype)
            tl.store(residual, total, mask=inside)
            low, high = numbers_of(total, dtype)
            squares = tl.where(inside, low * low + high * high, 0.0)
            inverse = tl.rsqrt(tl.sum(squares, axis=0) / WIDTH + epsilon)
            low, high = low * inverse * low_gain, high * inverse * high_gain
        made = joined(low, high, dtype)
        if RULE is not None:
            low, high = numbers_of(tl.where(inside, made, 0), dtype)
            normal = low if dtype.primitive_bitwidth == 32 else tl.interleave(low, high)
            column = tl.arange(0, normal.shape[0])
            store_codes(normal, row, column, WIDTH, target, strides, RULE)
        else:
            tl.store((target.out + row * WIDTH).to(BITS) + word, made, mask=inside)
        tl.debug_barrier()  # all threads have read the words and the epoch
        if PART:
            remove(memory + part_word * 4, of_part, others_of(RANK, SIZE), OF_RANK)
            remove(place + summing * OF_RANK, inside, (0,), OF_RANK)
        else:
            remove(place, inside, others_of(RANK, SIZE), OF_RANK)
        tl.store(epochs + row, epoch + 1)


def peer_sum(x: torch.Tensor, peers: PeerMemory, *, parts: bool = False) -> torch.Tensor:
    """The sum of all ranks' `x [rows, width]`, in their order and in float32; at most `peers.rows` rows.

    Writes as many bytes to each other rank as `x` has, and reads as many; in `parts` 2 / size of that.
    """
    out = torch.empty_like(x)
    _launch(x, None, None, 0.0, peers, parts, (Target(out), Strides(), None))
    return out


def peer_sum_norm(
    x: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    peers: PeerMemory,
    *,
    parts: bool = False,
) -> torch.Tensor:
    """`add_rms_norm(hidden, peer_sum(x), weight, epsilon)` in one launch: `hidden` is added to in place."""
    out = torch.empty_like(x)
    _launch(x, hidden, weight, epsilon, peers, parts, (Target(out), Strides(), None))
    return out


def coded_peer_sum_norm(
    x: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    peers: PeerMemory,
    coding: Coding,
    *,
    parts: bool = False,
) -> RowCodes:
    """Returns `peer_sum_norm` as coded by `coding`, whose groups are no longer than a row."""
    made = coding.empty(x.shape[0], x.shape[1], x.device)
    _launch(x, hidden, weight, epsilon, peers, parts, coding.arguments(made))
    return made


def _launch(
    x: torch.Tensor,
    hidden: torch.Tensor | None,
    weight: torch.Tensor | None,
    epsilon: float,
    peers: PeerMemory,
    parts: bool,
    destination: Destination,
) -> None:
    rows = x.shape[0]
    target, strides, rule = destination
    part = -(-peers.row_words // peers.size)
    part_block, (block, warps, pack) = next_power_of_2(part), launched(peers.row_words)
    _peer_sum_kernel[(min(rows, peers.programs),)](
        x,
        x if hidden is None else hidden,
        x if weight is None else weight,
        target,
        strides,
        peers.buffers,
        peers.epochs,
        rows,
        0 if hidden is None else hidden.stride(0),
        epsilon,
        peers.rank,
        peers.size,
        peers.rows,
        peers.row_words,
        part if parts else 0,
        hidden is not None,
        rule,
        block,
        part_block if parts else 0,
        pack,
        max(1, part_block // (32 * warps)) if parts else 0,
        num_warps=warps,
    )
