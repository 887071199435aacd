"""Rows of which each rank has its own, brought to all of them and summed for the rank whose they are.

    x of this rank -> to all others -> [rows of all, one rank's behind the other's]
    x of all ranks' rows -> each to the rank whose it is -> [x of all, in rank order] of own rows

Through the memory, and by the protocol, of `peer_words.py`.
"""

import torch
import triton
import triton.language as tl

from kvern.kernels.launch import Launcher, wait_for_previous
from kvern.kernels.peer_words import PeerMemory, joined, launched, others_of, received, remove, send, total_of


@Launcher
@triton.jit(do_not_specialize=["rows"])
def _peer_exchange_kernel(
    x: tl.tensor,
    out: tl.tensor,
    buffers: tl.tensor,
    epochs: tl.tensor,
    rows,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
    WORDS: tl.constexpr,
    GATHERS: tl.constexpr,
    BLOCK: tl.constexpr,
    PACK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """`rows` of each rank, WORDS of a row; else as `_peer_sum_kernel`."""
    dtype: tl.constexpr = x.dtype.element_ty
    BITS: tl.constexpr = tl.pointer_type(tl.int32)
    OF_RANK: tl.constexpr = SLOTS * WORDS * 4
    column = tl.arange(0, BLOCK)
    inside = column < WORDS
    word = tl.max_contiguous(tl.minimum(column, WORDS - 1), 1)  # neighbouring threads send neighbouring words
    own_memory, lost = tl.load(buffers + RANK), tl.load(buffers + SIZE)
    wait_for_previous(OVERLAP)
    first = tl.program_id(0).to(tl.int64)
    for row in range(first, rows, tl.num_programs(0)):
        parity = (tl.load(epochs + row) & 1).to(tl.int64)
        place = ((parity * SIZE + RANK) * SLOTS + row) * (WORDS * 4) + word * 4
        for other in tl.static_range(SIZE):
            if other != RANK:
                source = row if GATHERS else other * rows + row
                numbers = tl.load(x.to(BITS) + source * WORDS + word, mask=inside, other=0)
                send(tl.load(buffers + other) + place, numbers, inside)
    for row in range(first, rows, tl.num_programs(0)):
        epoch = tl.load(epochs + row)
        own = tl.load(x.to(BITS) + (row if GATHERS else RANK * rows + row) * WORDS + word, mask=inside, other=0)
        place = own_memory + ((epoch & 1).to(tl.int64) * (SIZE * SLOTS) + row) * (WORDS * 4) + word * 4
        OTHERS: tl.constexpr = others_of(RANK, SIZE)
        words = received(place, inside, lost, OTHERS, OF_RANK, PACK)
        if GATHERS:
            tl.store(out.to(BITS) + (RANK * rows + row) * WORDS + word, own, mask=inside)
            for index in tl.static_range(SIZE - 1):
                target = OTHERS[index] * rows + row
                tl.store(out.to(BITS) + target * WORDS + word, words[index], mask=inside)
        else:
            low, high = total_of(own, words, dtype, RANK, SIZE)
            tl.store(out.to(BITS) + row * WORDS + word, joined(low, high, dtype), mask=inside)
        tl.debug_barrier()  # all threads have read the words and the epoch
        remove(place, inside, OTHERS, OF_RANK)
        tl.store(epochs + row, epoch + 1)


def peer_gather(x: torch.Tensor, peers: PeerMemory) -> torch.Tensor:
    """`x [rows, width]` of all ranks, one behind the other: `[size * rows, width]`; at most `peers.rows` rows."""
    out = x.new_empty(peers.size * x.shape[0], x.shape[1])
    _launch(x, out, x.shape[0], peers, gathers=True)
    return out


def peer_sum_scattered(x: torch.Tensor, peers: PeerMemory) -> torch.Tensor:
    """Returns this rank's rows of the sum of all ranks' `x [size * rows, width]`, in their order and in float32."""
    out = x.new_empty(x.shape[0] // peers.size, x.shape[1])
    _launch(x, out, out.shape[0], peers, gathers=False)
    return out


def _launch(x: torch.Tensor, out: torch.Tensor, rows: int, peers: PeerMemory, *, gathers: bool) -> None:
    block, warps, pack = launched(peers.row_words)
    _peer_exchange_kernel[(min(rows, peers.programs),)](
        x,
        out,
        peers.buffers,
        peers.epochs,
        rows,
        peers.rank,
        peers.size,
        peers.rows,
        peers.row_words,
        gathers,
        block,
        pack,
        num_warps=warps,
    )
