"""Sums of what several ranks have, each GPU writing into memory of the others, with what follows a sum in a layer.

    whole  x of this rank -> to all others -> [x of all, in rank order] -> [residual +=] -> [norm]
    parts  parts of x -> to the ranks that sum them -> [this rank's part of all] -> to all -> [residual +=] -> [norm]

In parts each rank sums a part of every row and hands that on: of two steps, but 2 / size of the bytes.

A word is 32 bits: two neighbouring numbers of 16 bits, or one of 32. Memory for words holds ABSENT until one comes,
which is never that (a sender makes another NaN of that one), and whoever has read a row's words leaves ABSENT there
again. So there is no flag and no fence, and nothing is sent but numbers. Each row has a slot, and each slot a counter
of epochs on its own device, which the kernel advances: a CUDA graph can hold it.

Of a slot there are two copies, of even and of odd epochs. Two are enough: a rank writes words of epoch e + 1 after it
has ended e, and so after all other ranks have begun e. They have ended e - 1 by then, since launches follow each other,
and removed the words that stood where those of e + 1 go. Both ways use the same slots: a rank's words are where it
sends whole rows, and where it sends a part's sum, which is never where it sends a part to be summed by another.

A program sends all its rows before it waits for any, then what it sums before it waits for sums, and waits for nothing
but programs of other ranks. All of a launch must be on the device together; there are no more than processors.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kvern.kernels.launch import INTERPRETED, Launcher, next_power_of_2, overlaps, wait_for_previous
from kvern.kernels.norm import PLAIN
from kvern.kernels.quantize_rows import Coding, RowCodes, store_codes

ABSENT = tl.constexpr(-1)
ANOTHER_NAN = tl.constexpr(0x7FFF7FFF)
"""Of 32 bits, and twice of 16."""
MOST_ROWS = 512
MOST_BYTES = 64 << 20
"""Of a rank's memory that others write to."""
PACKED = 4
"""Words of each rank that a thread waits for at once."""


class PeerMemory(NamedTuple):
    """What a rank needs for sums of up to `rows` rows of `row_words` words each.

    memory    int64, to which others write, all ABSENT at first: words [2, size, rows, row_words] of 32 bits, by the
              epoch's parity, sender, row
    buffers   [size] int64, addresses of each rank's memory as this one's device sees them
    epochs    [rows] int32, of this rank, zero at first
    programs  how many may wait for each other: no more than the processors of any rank's device
    """

    memory: torch.Tensor
    buffers: torch.Tensor
    epochs: torch.Tensor
    rank: int
    size: int
    rows: int
    row_words: int
    programs: int


def row_words_of(width: int, dtype: torch.dtype) -> int:
    """How many words a row of so many numbers takes; 0: such rows are not summed."""
    return width * dtype.itemsize // 4 if dtype.itemsize in (2, 4) and width % 16 == 0 else 0


def rows_kept(size: int, row_words: int) -> int:
    """For how many rows ranks keep memory."""
    return min(MOST_ROWS, MOST_BYTES // (8 * memory_of(size, 1, row_words)))


def memory_of(size: int, rows: int, row_words: int) -> int:
    """How many int64 a rank's memory has."""
    return size * rows * row_words


SEND = tl.constexpr(
    "{ .reg .pred inside; setp.ne.b32 inside, $3, 0; @inside st.relaxed.sys.global.b32 [$1], $2; mov.b32 $0, 0; }"
)


@triton.constexpr_function
def _await(senders: tuple[int, ...], stride: int, pack: int) -> str:
    """Loads words of these ranks, which lie `stride` bytes apart, until none is absent.

    It changes nothing, since a compiler may have them loaded twice, for threads that want them elsewhere.
    """
    address, inside = len(senders) * pack, (len(senders) + 1) * pack
    places = [
        (place, sender, part) for place, (sender, part) in enumerate((s, p) for s in senders for p in range(pack))
    ]
    lines = [f"{{ .reg .pred missing, inside<{pack}>;"]
    lines += [f"setp.ne.b32 inside{part}, ${inside + part}, 0;" for part in range(pack)]
    lines += [f"mov.b32 ${place}, 0;" for place, _, _ in places]
    lines.append("again: setp.ne.b32 missing, 0, 0;")
    for place, sender, part in places:
        lines.append(f"@inside{part} ld.relaxed.sys.global.b32 ${place}, [${address + part}+{sender * stride}];")
    lines += [f"setp.eq.or.b32 missing, ${place}, {ABSENT.value}, missing;" for place, _, _ in places]
    return " ".join([*lines, "@missing bra again; }"])


@triton.constexpr_function
def _await_constraints(senders: tuple[int, ...], pack: int) -> str:
    """Of `_await`; results are written before its last use of the others."""
    return ",".join(["=&r"] * (len(senders) * pack) + ["l"] * pack + ["r"] * pack)


@triton.constexpr_function
def others_of(rank: int, size: int) -> tuple[int, ...]:
    """All ranks but this."""
    return tuple(other for other in range(size) if other != rank)


@triton.jit
def numbers_of(word, dtype: tl.constexpr):
    """Those of 32 bits, in float32; zeros beside one that takes all."""
    if dtype.primitive_bitwidth == 32:
        low, high = word.to(tl.float32, bitcast=True), tl.zeros(word.shape, tl.float32)
    else:
        low = word.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        high = (word >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def joined(low, high, dtype: tl.constexpr):
    """As 32 bits, rounded."""
    if dtype.primitive_bitwidth == 32:
        word = low.to(tl.int32, bitcast=True)
    else:
        word = low.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        word |= high.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) << 16
    return word


@triton.jit
def send(address, word, inside):
    """Words to memory of a rank, none of which is ABSENT any more."""
    word = tl.where(word == ABSENT, ANOTHER_NAN, word)
    if INTERPRETED:
        tl.store(address.to(tl.pointer_type(tl.int32)), word, mask=inside)
    else:
        tl.inline_asm_elementwise(
            SEND, "=r,l,r,r", [address, word, inside.to(tl.int32)], tl.int32, is_pure=False, pack=1
        )


@triton.jit
def received(address, inside, SENDERS: tl.constexpr, STRIDE: tl.constexpr, PACK: tl.constexpr):
    """The words of these ranks, as a tuple, once they are there; `address`: those of the first rank."""
    COUNT: tl.constexpr = len(SENDERS)
    if INTERPRETED:
        found: tuple[Any, ...] = ()
        for place in tl.static_range(COUNT):
            pointer = (address + SENDERS[place] * STRIDE).to(tl.pointer_type(tl.int32))
            words = tl.load(pointer, mask=inside, other=0)
            while tl.max((words == ABSENT).to(tl.int32), 0) == 1:
                words = tl.load(pointer, mask=inside, other=0)
            found = (*found, words)
        return found
    else:
        return tl.inline_asm_elementwise(
            _await(SENDERS, STRIDE, PACK),
            _await_constraints(SENDERS, PACK),
            [address, inside.to(tl.int32)],
            (tl.int32,) * COUNT,
            is_pure=False,
            pack=PACK,
        )


@triton.jit
def remove(address, inside, SENDERS: tl.constexpr, STRIDE: tl.constexpr):
    """Leave those words absent, once all threads of a program have them."""
    for place in tl.static_range(len(SENDERS)):
        pointer = (address + SENDERS[place] * STRIDE).to(tl.pointer_type(tl.int32))
        tl.store(pointer, tl.full(pointer.shape, ABSENT, tl.int32), mask=inside)


@triton.jit
def total_of(own, words, dtype: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr):
    """Words of this rank and of all others, added up in rank order: numbers in float32, two of a word."""
    low, high = numbers_of(own if RANK == 0 else words[0], dtype)
    for other in tl.static_range(1, SIZE):
        if other == RANK:
            more_low, more_high = numbers_of(own, dtype)
        elif other < RANK:
            more_low, more_high = numbers_of(words[other], dtype)
        else:
            more_low, more_high = numbers_of(words[other - 1], dtype)
        low += more_low
        high += more_high
    return low, high


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
    PART: tl.constexpr,
    NORM: tl.constexpr,
    CODED: tl.constexpr,
    LARGEST: tl.constexpr,
    INTEGER: tl.constexpr,
    STATIC: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    PART_BLOCK: tl.constexpr,
    PACK: tl.constexpr,
    PART_PACK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """WORDS of a row, BLOCK of a program, of which threads have PACK each; PART of them are summed here, 0: all.

    CODED: the norm as codes; else all that is said of these is None.
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
    own_memory = tl.load(buffers + RANK)
    if PART:
        summing = word // PART
        their_memory = tl.load(buffers + summing)
        part = tl.arange(0, PART_BLOCK)
        part_word = RANK * PART + part
        of_part = (part < PART) & (part_word < WORDS)
    if OVERLAP:
        wait_for_previous()
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
            parts = received(own_memory + place, of_part, others_of(RANK, SIZE), OF_RANK, PART_PACK)
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
            summed = received(place + summing * OF_RANK, inside, (0,), OF_RANK, PACK)
            low, high = numbers_of(summed[0], dtype)
        else:
            own = tl.load((x + row * WIDTH).to(BITS) + word)
            rows_of_others = received(place, inside, others_of(RANK, SIZE), OF_RANK, PACK)
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
        if CODED:
            low, high = numbers_of(tl.where(inside, made, 0), dtype)
            normal = low if dtype.primitive_bitwidth == 32 else tl.interleave(low, high)
            column = tl.arange(0, normal.shape[0])
            store_codes(
                normal, row, column, WIDTH, out, scales, static, scale_stride, group_stride, limit,
                LARGEST, INTEGER, STATIC, GROUP,
            )  # fmt: skip
        else:
            tl.store((out + row * WIDTH).to(BITS) + word, made, mask=inside)
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
    _launch(x, None, None, 0.0, peers, parts, out)
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
    _launch(x, hidden, weight, epsilon, peers, parts, out)
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
    """What `coding`, whose groups are no longer than a row, makes of `peer_sum_norm`."""
    made = coding.empty(x.shape[0], x.shape[1], x.device)
    _launch(x, hidden, weight, epsilon, peers, parts, made, coding)
    return made


def _launch(
    x: torch.Tensor,
    hidden: torch.Tensor | None,
    weight: torch.Tensor | None,
    epsilon: float,
    peers: PeerMemory,
    parts: bool,
    out: torch.Tensor | RowCodes,
    coding: Coding | None = None,
) -> None:
    """`out`: where the result goes, as codes with a `coding`."""
    variables: tuple[object, ...] = (out, *PLAIN, None)
    constants: tuple[object, ...] = PLAIN
    if coding is not None and isinstance(out, RowCodes):
        variables, constants = coding.arguments(out)
    rows = x.shape[0]
    part = -(-peers.row_words // peers.size)
    block, part_block = next_power_of_2(peers.row_words), next_power_of_2(part)
    warps = max(1, block // (32 * max(PACKED, block // 1024)))
    overlap = overlaps(x.device)
    _peer_sum_kernel[(min(rows, peers.programs),)](
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
        part if parts else 0,
        hidden is not None,
        coding is not None,
        *constants,
        block,
        part_block if parts else 0,
        max(1, block // (32 * warps)),
        max(1, part_block // (32 * warps)) if parts else 0,
        overlap,
        num_warps=warps,
        launch_pdl=overlap,
    )
