"""Memory of ranks' GPUs that the others write to, and what a kernel does with it.

A word is 32 bits: two neighbouring numbers of 16 bits, or one of 32. Memory for words holds ABSENT until one comes,
which is never that (a sender makes another NaN of that one), and whoever has read a row's words leaves ABSENT there
again. So there is no flag and no fence, and nothing is sent but numbers. Each row has a slot, and each slot a counter
of epochs on its own device, which the kernel advances: a CUDA graph can hold it.

Of a slot there are two copies, of even and of odd epochs. Two are enough: a rank writes words of epoch e + 1 after it
has ended e, and so after all other ranks have begun e. They have ended e - 1 by then, since launches follow each other,
and removed the words that stood where those of e + 1 go.

A program sends before it waits for anything, and waits for nothing but programs of other ranks. All of a launch must be
on the device together; there are no more than processors. It waits no longer once the host has said that a rank is
lost: what it computes then is wrong.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kvern.kernels.launch import INTERPRETED, next_power_of_2

ABSENT = tl.constexpr(-1)
ANOTHER_NAN = tl.constexpr(0x7FFF7FFF)
"""A NaN of 32 bits, and twice of 16."""
MOST_ROWS = 512
MOST_BYTES = 64 << 20
"""The most bytes of a rank's memory that others write to."""
PACKED = 4
"""Words of each rank that a thread waits for at once."""
POLLS = tl.constexpr(4096)
"""So often in vain, some milliseconds, before a thread looks whether a rank is lost."""


class PeerMemory(NamedTuple):
    """The memory of a rank for sums of up to `rows` rows of `row_words` words each.

    memory    int64, to which others write, all ABSENT at first: words [2, size, rows, row_words] of 32 bits, by the
              epoch's parity, sender, row
    buffers   [size + 1] int64, see `addresses_of`
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


def addresses_of(memories: Sequence[torch.Tensor], lost: torch.Tensor) -> list[int]:
    """Returns the addresses of each rank's memory for this device, and of the host's word `lost` [1] int32, 0 until one
    is."""
    return [memory.data_ptr() for memory in (*memories, lost)]


def row_words_of(width: int, dtype: torch.dtype) -> int:
    """Returns the words of a row of so many numbers; 0 if such rows are not summed."""
    return width * dtype.itemsize // 4 if dtype.itemsize in (2, 4) and width % 16 == 0 else 0


def rows_kept(size: int, row_words: int) -> int:
    """For how many rows ranks keep memory."""
    return min(MOST_ROWS, MOST_BYTES // (8 * memory_of(size, 1, row_words)))


def memory_of(size: int, rows: int, row_words: int) -> int:
    """Returns the number of int64 in a rank's memory."""
    return size * rows * row_words


def launched(row_words: int) -> tuple[int, int, int]:
    """Words of a program of a row, its warps, and words of a thread."""
    block = next_power_of_2(row_words)
    warps = max(1, block // (32 * max(PACKED, block // 1024)))
    return block, warps, max(1, block // (32 * warps))


SEND = tl.constexpr(
    "{ .reg .pred inside; setp.ne.b32 inside, $3, 0; @inside st.relaxed.sys.global.b32 [$1], $2; mov.b32 $0, 0; }"
)


@triton.constexpr_function
def _await(senders: tuple[int, ...], stride: int, pack: int) -> str:
    """Loads words of these ranks, which lie `stride` bytes apart, until none is absent, or a rank is lost.

    It changes nothing, since a compiler may have them loaded twice, for threads that want them elsewhere.
    """
    address, inside, lost = ((len(senders) + operand) * pack for operand in range(3))
    places = [
        (place, sender, part) for place, (sender, part) in enumerate((s, p) for s in senders for p in range(pack))
    ]
    lines = [f"{{ .reg .pred missing, waits, inside<{pack}>; .reg .b32 polls, found; mov.b32 polls, 0;"]
    lines += [f"setp.ne.b32 inside{part}, ${inside + part}, 0;" for part in range(pack)]
    lines += [f"mov.b32 ${place}, 0;" for place, _, _ in places]
    lines.append("again: setp.ne.b32 missing, 0, 0;")
    for place, sender, part in places:
        lines.append(f"@inside{part} ld.relaxed.sys.global.b32 ${place}, [${address + part}+{sender * stride}];")
    lines += [f"setp.eq.or.b32 missing, ${place}, {ABSENT.value}, missing;" for place, _, _ in places]
    lines += ["@!missing bra done; add.u32 polls, polls, 1;", f"and.b32 found, polls, {POLLS.value - 1};"]
    lines += ["setp.ne.b32 waits, found, 0; @waits bra again;", f"ld.relaxed.sys.global.b32 found, [${lost}];"]
    return " ".join([*lines, "setp.eq.b32 waits, found, 0; @waits bra again; done: mov.b32 polls, 0; }"])


@triton.constexpr_function
def _await_constraints(senders: tuple[int, ...], pack: int) -> str:
    """Returns the constraints of `_await`; results are written before its last use of the others."""
    return ",".join(["=&r"] * (len(senders) * pack) + ["l"] * pack + ["r"] * pack + ["l"] * pack)


@triton.constexpr_function
def others_of(rank: int, size: int) -> tuple[int, ...]:
    """All ranks but this."""
    return tuple(other for other in range(size) if other != rank)


@triton.jit
def numbers_of(word, dtype: tl.constexpr):
    """Returns the numbers in 32 bits as float32, with zeros if one number takes all bits."""
    if dtype.primitive_bitwidth == 32:
        low, high = word.to(tl.float32, bitcast=True), tl.zeros(word.shape, tl.float32)
    else:
        low = word.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        high = (word >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def joined(low, high, dtype: tl.constexpr):
    """Returns two numbers as 32 bits, rounded."""
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
def received(address, inside, lost, SENDERS: tl.constexpr, STRIDE: tl.constexpr, PACK: tl.constexpr):
    """The words of these ranks, as a tuple, once they are there; `address`: those of the first rank.

    `lost`: the address of the word that ends the waiting.
    """
    COUNT: tl.constexpr = len(SENDERS)
    if INTERPRETED:
        found: tuple[Any, ...] = ()
        for place in tl.static_range(COUNT):
            pointer = (address + SENDERS[place] * STRIDE).to(tl.pointer_type(tl.int32))
            words = tl.load(pointer, mask=inside, other=0)
            while (tl.max((words == ABSENT).to(tl.int32), 0) == 1) & (tl.load(lost.to(tl.pointer_type(tl.int32))) == 0):
                words = tl.load(pointer, mask=inside, other=0)
            found = (*found, words)
        return found
    else:
        return tl.inline_asm_elementwise(
            _await(SENDERS, STRIDE, PACK),
            _await_constraints(SENDERS, PACK),
            [address, inside.to(tl.int32), lost],
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
