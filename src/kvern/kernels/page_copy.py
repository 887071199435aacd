"""Pages of a KV cache packed to one piece of memory each, and unpacked, summed in passing.

A page has the payload of one head for some blocks, as `runner/page_mover.py` describes it. Its sum is

    the sum over all words w at index i of mix(w + (i + 1) * 0x9E3779B97F4A7C15), modulo 2^64

where `mix` is the finaliser of SplitMix64 (Steele, Lea and Flood, 2014), which maps each word to another: so any change
of one word changes the sum, and words that change places do, too. Words have 8 bytes, or 4 or 1 if rows of heads need
that.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvern.kernels.launch import Launcher, cdiv

WORDS = 2048
"""The words that a thread block copies."""
STEP = 0x9E3779B97F4A7C15
FIRST = 0xBF58476D1CE4E5B9
SECOND = 0x94D049BB133111EB
_STEP = tl.constexpr(STEP)
_FIRST = tl.constexpr(FIRST)
_SECOND = tl.constexpr(SECOND)


class Rows(NamedTuple):
    """The places of the rows of heads: `segments` int64 [S, 5], one for each layer and what is stored in it.

    A segment has its address, and, in words, what lies between blocks, between tokens, between heads, and before it in
    the payload. `words` is the length of a row, `tokens` those of a block.
    """

    segments: torch.Tensor
    words: int
    tokens: int
    dtype: torch.dtype


class PageTable(NamedTuple):
    """Pieces of `heads` heads each: `rows` int64 [P, 2 + B] have the place of a piece in `memory`, in words, its first
    head, and its blocks, where those below 0 are left out (packed as zeros). A head begins `stride` words behind the
    head before it."""

    rows: torch.Tensor
    heads: int
    stride: int


@Launcher
@triton.jit(
    do_not_specialize=["page_blocks", "heads", "stride"], do_not_specialize_on_alignment=["table", "sums"]
)  # one form, which a start compiles
def _page_copy_kernel(
    memory: tl.tensor,
    segments: tl.tensor,
    table: tl.tensor,
    sums: tl.tensor,
    page_blocks: tl.int32,
    heads: tl.int32,
    stride: tl.int32,
    row: tl.constexpr,
    tokens: tl.constexpr,
    packs: tl.constexpr,
    COUNT: tl.constexpr,
):
    page = tl.program_id(0)
    entry = table + page // heads * (2 + page_blocks)
    head = (page % heads).to(tl.int64)
    segment = segments + tl.program_id(1) * 5
    word = tl.program_id(2).to(tl.int64) * COUNT + tl.arange(0, COUNT)
    inside = word < page_blocks * tokens * row
    token = word // row
    block = tl.load(entry + 2 + token // tokens, mask=inside, other=-1)
    cache = tl.load(segment).to(tl.pointer_type(memory.dtype.element_ty))
    cache += block * tl.load(segment + 1) + token % tokens * tl.load(segment + 2) + word % row
    cache += (tl.load(entry + 1) + head) * tl.load(segment + 3)
    index = tl.load(segment + 4) + word
    places = memory + tl.load(entry) + head * stride + index
    if packs:
        found = tl.load(cache, mask=inside & (block >= 0), other=0)
        tl.store(places, found, mask=inside)
    else:
        found = tl.load(places, mask=inside, other=0)
        tl.store(cache, found, mask=inside & (block >= 0))
    mixed = found.to(tl.uint64) + (index + 1).to(tl.uint64) * _STEP
    mixed = (mixed ^ (mixed >> 30)) * _FIRST
    mixed = (mixed ^ (mixed >> 27)) * _SECOND
    mixed = mixed ^ (mixed >> 31)
    total = tl.sum(tl.where(inside, mixed.to(tl.int64, bitcast=True), 0), axis=0)
    tl.atomic_add(sums + page, total)


def page_copy(memory: torch.Tensor, rows: Sequence[Rows], table: PageTable, sums: torch.Tensor, packs: bool) -> None:
    """Copies pieces from the cache to `memory`, uint8, if it packs, and back otherwise.

    A head is [layer, stored, token, word] in order, of all `rows`; its sum is added to `sums` int64 [P * heads]. Moves
    each byte once.
    """
    count, width = table.rows.shape
    for of_width in rows:
        chunks = cdiv((width - 2) * of_width.tokens * of_width.words, WORDS)
        _page_copy_kernel[(count * table.heads, len(of_width.segments), chunks)](
            memory.view(of_width.dtype),
            of_width.segments,
            table.rows,
            sums,
            width - 2,
            table.heads,
            table.stride,
            of_width.words,
            of_width.tokens,
            packs,
            WORDS,
        )
