"""Sums of what several ranks have, each GPU writing into memory of the others, with what follows a sum in a layer.

    x of this rank -> words to all others -> [words of all others + x, in rank order] -> [residual +=] -> [norm]

A word is 8 bytes: two neighbouring numbers of 16 bits, or one of 32, and an epoch. It is written and read whole, so
that a reader who finds the present epoch has the numbers that came with it: there is no barrier, and no fence. Each row
has a slot, and each slot a counter of epochs on its own device, which the kernel advances: a CUDA graph can hold it.

Of each rank's words there are two copies, of even and of odd epochs. Two are enough: a rank writes words of epoch e + 1
after it has ended e, and so after words of e came from every other rank. Those were sent after that rank had ended
e - 1, since launches follow each other; so it has read the words that are overwritten, those of e - 1. Nobody is ever
more than one epoch ahead. All rows have as many words, so each of a slot's is written in each epoch, and has the epoch
e or e - 2: never an older one, which could be taken for e when the counter starts again.

A program sends all its rows before it waits for any, and waits for nothing but the same program of other ranks. All of
a launch must be on the device together; there are no more programs than processors.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kvern.kernels.launch import INTERPRETED, Launcher, next_power_of_2, overlaps, processors, wait_for_previous
from kvern.kernels.norm import PLAIN
from kvern.kernels.quantize_rows import Coding, RowCodes, store_codes

WORD_BYTES = 8
MOST_ROWS = 512
MOST_BYTES = 32 << 20
"""Of a rank's memory that others write to."""
PACKED = 4
"""Words of each rank that a thread waits for at once."""


class PeerMemory(NamedTuple):
    """What a rank needs for sums of up to `rows` rows of `row_words` words each; all is zero at first.

    words    int64, to which others write: [2, size, rows, row_words], by the epoch's parity, sender, row
    buffers  [size] int64, addresses of each rank's words as this one's device sees them
    epochs   [rows] int32, of this rank
    """

    words: torch.Tensor
    buffers: torch.Tensor
    epochs: torch.Tensor
    rank: int
    size: int
    rows: int
    row_words: int


def row_words_of(width: int, dtype: torch.dtype) -> int:
    """How many words a row of so many numbers takes; 0: such rows are not summed."""
    return width * dtype.itemsize // 4 if dtype.itemsize in (2, 4) and width % 16 == 0 else 0


def slots_of(size: int, row_words: int) -> int:
    """For how many rows ranks keep words: as many as sums in this way could pay for."""
    return min(MOST_ROWS, MOST_BYTES // (WORD_BYTES * words_of(size, 1, row_words)))


def words_of(size: int, rows: int, row_words: int) -> int:
    """How many int64 words others write to in a rank's memory."""
    return 2 * size * rows * row_words


SEND = tl.constexpr(
    "{ .reg .pred inside; .reg .b64 word; setp.ne.b32 inside, $4, 0; mov.b64 word, {$2, $3};"
    " @inside st.relaxed.sys.global.b64 [$1], word; mov.b32 $0, 0; }"
)


@triton.constexpr_function
def _await(peers: tuple[int, ...], stride: int, pack: int) -> str:
    """Loads words of these ranks, which lie `stride` bytes apart, until all have the epoch; gives their numbers."""
    count = len(peers) * pack
    address, epoch = count, count + pack
    lines = [f"{{ .reg .pred missing; .reg .b32 found<{count}>; .reg .b64 word<{count}>; again:"]
    places = [(place, peer, part) for place, (peer, part) in enumerate((p, q) for p in peers for q in range(pack))]
    for place, peer, part in places:
        lines.append(f"ld.relaxed.sys.global.b64 word{place}, [${address + part}+{peer * stride}];")
    lines.append("setp.ne.b32 missing, 0, 0;")
    for place, _, _ in places:
        lines.append(f"mov.b64 {{${place}, found{place}}}, word{place};")
        lines.append(f"setp.ne.or.b32 missing, found{place}, ${epoch}, missing;")
    return " ".join([*lines, "@missing bra again; }"])


@triton.constexpr_function
def _await_constraints(peers: tuple[int, ...], pack: int) -> str:
    """Of `_await`; results are written before its last use of the others."""
    return ",".join(["=&r"] * (len(peers) * pack) + ["l"] * pack + ["r"] * pack)


@triton.constexpr_function
def _others(rank: int, size: int) -> tuple[int, ...]:
    return tuple(other for other in range(size) if other != rank)


@triton.jit
def _numbers(word, dtype: tl.constexpr):
    """Those of 32 bits, in float32; zeros beside one that takes all."""
    if dtype.primitive_bitwidth == 32:
        low, high = word.to(tl.float32, bitcast=True), tl.zeros(word.shape, tl.float32)
    else:
        low = word.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        high = (word >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def _joined(low, high, dtype: tl.constexpr):
    """As 32 bits, rounded."""
    if dtype.primitive_bitwidth == 32:
        word = low.to(tl.int32, bitcast=True)
    else:
        word = low.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        word |= high.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) << 16
    return word


@triton.jit
def _send(address, word, epoch, inside):
    if INTERPRETED:
        whole = (word.to(tl.int64) & 0xFFFFFFFF) | (epoch.to(tl.int64) << 32)
        tl.store(address.to(tl.pointer_type(tl.int64)), whole, mask=inside)
    else:
        tl.inline_asm_elementwise(
            SEND, "=r,l,r,r,r", [address, word, epoch, inside.to(tl.int32)], tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _received(address, epoch, RANK: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, PACK: tl.constexpr):
    """The numbers of all other ranks, as a tuple, once they are there."""
    OTHERS: tl.constexpr = _others(RANK, SIZE)
    if INTERPRETED:
        found: tuple[Any, ...] = ()
        for place in tl.static_range(SIZE - 1):
            pointer = (address + OTHERS[place] * STRIDE).to(tl.pointer_type(tl.int64))
            words = tl.load(pointer)
            while tl.min(((words >> 32).to(tl.int32) == epoch).to(tl.int32), 0) == 0:
                words = tl.load(pointer)
            found = (*found, words.to(tl.int32))
        return found
    else:
        return tl.inline_asm_elementwise(
            _await(OTHERS, STRIDE, PACK),
            _await_constraints(OTHERS, PACK),
            [address, epoch],
            (tl.int32,) * (SIZE - 1),
            is_pure=False,
            pack=PACK,
        )


@Launcher
@triton.jit(do_not_specialize=["rows", "scale_stride", "group_stride"])
def _peer_sum_kernel(
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
    WORDS: tl.constexpr,
    NORM: tl.constexpr,
    CODED: tl.constexpr,
    LARGEST: tl.constexpr,
    INTEGER: tl.constexpr,
    STATIC: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    PACK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """WORDS of a row, BLOCK of a program: beyond the last the last is read again. Threads have PACK of them each.

    CODED: the norm as codes; else all that is said of these is None.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    BITS: tl.constexpr = tl.pointer_type(tl.int32)
    WIDTH: tl.constexpr = WORDS * 32 // dtype.primitive_bitwidth
    OF_RANK: tl.constexpr = SLOTS * WORDS * 8
    index = tl.arange(0, BLOCK)
    inside = index < WORDS
    word = tl.max_contiguous(tl.minimum(index, WORDS - 1), 1)  # neighbouring threads send neighbouring words
    if NORM:
        if weight.dtype.element_ty.primitive_bitwidth == dtype.primitive_bitwidth:
            low_gain, high_gain = _numbers(tl.load(weight.to(BITS) + word), weight.dtype.element_ty)
        else:
            low_gain, high_gain = tl.load(weight + 2 * word), tl.load(weight + 2 * word + 1)
    own_buffer = tl.load(buffers + RANK)
    if OVERLAP:
        wait_for_previous()
    first = tl.program_id(0).to(tl.int64)
    for row in range(first, rows, tl.num_programs(0)):
        epoch = tl.load(epochs + row) + 1
        numbers = tl.load((x + row * WIDTH).to(BITS) + word)
        place = (((epoch & 1) * SIZE + RANK) * SLOTS + row) * (WORDS * 8) + word * 8
        for other in tl.static_range(SIZE):
            if other != RANK:
                _send(tl.load(buffers + other) + place, numbers, epoch, inside)
    for row in range(first, rows, tl.num_programs(0)):
        epoch = tl.load(epochs + row) + 1
        own = tl.load((x + row * WIDTH).to(BITS) + word)
        if NORM:
            residual = (hidden + row * hidden_stride).to(BITS) + word
            low_residual, high_residual = _numbers(tl.load(residual), dtype)
        place = ((epoch & 1) * (SIZE * SLOTS) + row) * (WORDS * 8) + word * 8
        received = _received(own_buffer + place, epoch, RANK, SIZE, OF_RANK, PACK)
        low, high = _numbers(own if RANK == 0 else received[0], dtype)
        for other in tl.static_range(1, SIZE):
            if other == RANK:
                more_low, more_high = _numbers(own, dtype)
            elif other < RANK:
                more_low, more_high = _numbers(received[other], dtype)
            else:
                more_low, more_high = _numbers(received[other - 1], dtype)
            low += more_low
            high += more_high
        if NORM:
            low, high = _numbers(_joined(low, high, dtype), dtype)
            total = _joined(low + low_residual, high + high_residual, dtype)
            tl.store(residual, total, mask=inside)
            low, high = _numbers(total, dtype)
            squares = tl.where(inside, low * low + high * high, 0.0)
            inverse = tl.rsqrt(tl.sum(squares, axis=0) / WIDTH + epsilon)
            low, high = low * inverse * low_gain, high * inverse * high_gain
        made = _joined(low, high, dtype)
        if CODED:
            low, high = _numbers(tl.where(inside, made, 0), dtype)
            normal = low if dtype.primitive_bitwidth == 32 else tl.interleave(low, high)
            column = tl.arange(0, normal.shape[0])
            store_codes(
                normal, row, column, WIDTH, out, scales, static, scale_stride, group_stride, limit,
                LARGEST, INTEGER, STATIC, GROUP,
            )  # fmt: skip
        else:
            tl.store((out + row * WIDTH).to(BITS) + word, made, mask=inside)
        tl.debug_barrier()  # all threads have read the epoch
        tl.store(epochs + row, epoch)


def peer_sum(x: torch.Tensor, peers: PeerMemory) -> torch.Tensor:
    """The sum of all ranks' `x [rows, width]`, in their order and in float32; at most `peers.rows` rows.

    Writes 4 bytes a number to each other rank, and reads as many.
    """
    out = torch.empty_like(x)
    _launch(x, None, None, 0.0, peers, out)
    return out


def peer_sum_norm(
    x: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, epsilon: float, peers: PeerMemory
) -> torch.Tensor:
    """`add_rms_norm(hidden, peer_sum(x), weight, epsilon)` in one launch: `hidden` is added to in place."""
    out = torch.empty_like(x)
    _launch(x, hidden, weight, epsilon, peers, out)
    return out


def coded_peer_sum_norm(
    x: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, epsilon: float, peers: PeerMemory, coding: Coding
) -> RowCodes:
    """What `coding`, whose groups are no longer than a row, makes of `peer_sum_norm`."""
    made = coding.empty(x.shape[0], x.shape[1], x.device)
    _launch(x, hidden, weight, epsilon, peers, made, coding)
    return made


def _launch(
    x: torch.Tensor,
    hidden: torch.Tensor | None,
    weight: torch.Tensor | None,
    epsilon: float,
    peers: PeerMemory,
    out: torch.Tensor | RowCodes,
    coding: Coding | None = None,
) -> None:
    """`out`: where the result goes, as codes with a `coding`."""
    variables: tuple[object, ...] = (out, *PLAIN, None)
    constants: tuple[object, ...] = PLAIN
    if coding is not None and isinstance(out, RowCodes):
        variables, constants = coding.arguments(out)
    rows = x.shape[0]
    block = next_power_of_2(peers.row_words)
    pack = max(PACKED, block // 1024)
    warps = max(1, block // (32 * pack))
    overlap = overlaps(x.device)
    _peer_sum_kernel[(min(rows, processors(x.device)),)](
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
        peers.row_words,
        hidden is not None,
        coding is not None,
        *constants,
        block,
        max(1, block // (32 * warps)),
        overlap,
        num_warps=warps,
        launch_pdl=overlap,
    )
