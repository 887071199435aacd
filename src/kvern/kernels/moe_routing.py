"""Routing of a mixture of experts: each token's experts, blocks of rows of each expert, and their sum."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvern.kernels.launch import Launcher, wait_for_previous

CHUNK = 4096
"""Token-expert pairs that one program sorts at a time."""


LEAST_KEY, LEAST_LONG_KEY = tl.constexpr(-(2**31)), tl.constexpr(-(2**63))


@triton.jit
def _keys(scores, expert):
    """Integers, each of one expert alone, that lie as the scores do, of equal ones the lower expert's above.

    The largest is found in half the time that number and place take.
    """
    scores += 0.0  # the zeros become one
    if scores.dtype.primitive_bitwidth == 16:
        bits = scores.to(tl.int16, bitcast=True).to(tl.int32)
        bits = tl.where(bits < 0, bits ^ 0x7FFF, bits) << 16
    else:
        bits = scores.to(tl.int32, bitcast=True).to(tl.int64)
        bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) << 32
    return bits | (0xFFFF - expert)


@triton.jit
def _score_of(key, dtype: tl.constexpr):
    """The score that a key was made of, as float32."""
    if dtype.primitive_bitwidth == 16:
        bits = key >> 16
        bits = tl.where(bits < 0, bits ^ 0x7FFF, bits).to(tl.int16)
    else:
        bits = key >> 32
        bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int32)
    return bits.to(dtype, bitcast=True).to(tl.float32)


@Launcher
@triton.jit
def _route_kernel(
    logits: tl.tensor,
    weights: tl.tensor,
    topk_ids: tl.tensor,
    counts: tl.tensor,
    slots: tl.tensor,
    stride: tl.int64,
    routed_scale: tl.float32,
    experts: tl.constexpr,
    top_k: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    COUNT: tl.constexpr,
    TURNS: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    known = expert < experts
    dtype: tl.constexpr = logits.dtype.element_ty
    scores = tl.load(logits + token * stride + expert, mask=known, other=float("-inf"))
    left = tl.where(known, _keys(scores, expert), LEAST_KEY if dtype.primitive_bitwidth == 16 else LEAST_LONG_KEY)
    choice = tl.arange(0, CHOICES)
    kept = tl.full([CHOICES], float("-inf"), tl.float32)
    ids = tl.zeros([CHOICES], tl.int32)
    for index in tl.static_range(top_k):
        best = tl.max(left, axis=0)
        left = tl.where(left == best, LEAST_KEY if dtype.primitive_bitwidth == 16 else LEAST_LONG_KEY, left)
        kept = tl.where(choice == index, _score_of(best, dtype), kept)
        ids = tl.where(choice == index, 0xFFFF - (best & 0xFFFF).to(tl.int32), ids)
    most = tl.max(kept, axis=0)
    kept = tl.exp(kept - most)
    kept /= tl.sum(kept, axis=0) if RENORMALIZE else tl.sum(tl.exp(scores.to(tl.float32) - most), axis=0)
    taken = choice < top_k
    tl.store(weights + token * top_k + choice, kept * routed_scale, mask=taken)
    chosen = ids
    if TURNS > 0:
        chosen = tl.load(slots + token % TURNS * experts + ids, mask=taken, other=-1)
    tl.store(topk_ids + token * top_k + choice, chosen, mask=taken)
    if COUNT:
        tl.atomic_add(counts + ids, tl.full([CHOICES], 1, tl.int64), mask=taken, sem="relaxed")


def route(
    logits: torch.Tensor,
    top_k: int,
    renormalize: bool,
    routed_scale: float,
    counts: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `top_k` of a softmax over all experts, largest first, of equal ones the lower expert first.

    logits   [T, experts], any float dtype, rows may have gaps; the softmax is computed in float32
    counts   [experts] int64 or None: each expert's number of tokens is added to it
    slots    [turns, experts] int32 or None: what stands for an expert, in a line that the tokens take in turns
    returns  weights [T, top_k] float32, divided by their sum if `renormalize`, then times `routed_scale`, and the
             topk_ids, or `slots` of them, [T, top_k] int32

    Moves the logits once; one program a token.
    """
    tokens, experts = logits.shape
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    topk_ids = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    _route_kernel[(tokens,)](
        logits,
        weights,
        topk_ids,
        topk_ids if counts is None else counts,
        topk_ids if slots is None else slots,
        logits.stride(0),
        routed_scale,
        experts,
        top_k,
        renormalize,
        counts is not None,
        0 if slots is None else len(slots),
        triton.next_power_of_2(experts),
        triton.next_power_of_2(top_k),
        num_warps=1,
    )
    return weights, topk_ids


class Alignment(NamedTuple):
    """Token-expert pairs in blocks of rows, each block of one expert.

    pairs    [blocks * rows] int32: pair t * top_k + k of row r; the number of pairs where a row is empty
    experts  [blocks] int32: the expert of a block, -1 for the blocks at the end that hold nothing
    places   [pairs] int32: the row of a pair
    """

    pairs: torch.Tensor
    experts: torch.Tensor
    places: torch.Tensor

    @property
    def rows(self) -> int:
        """The rows of a block."""
        return self.pairs.shape[0] // self.experts.shape[0]


def most_blocks(pairs: int, experts: int, rows: int) -> int:
    """The number of blocks that `pairs` need at most: every expert's last block may be all but empty."""
    touched = min(pairs, experts)
    return touched + (pairs - touched) // rows


@Launcher
@triton.jit(do_not_specialize=["pairs"])
def _count_kernel(
    topk_ids: tl.tensor,
    partial: tl.tensor,
    pairs,
    EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous(OVERLAP)
    chunk = tl.program_id(0)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(topk_ids + pair, mask=pair < pairs, other=-1).to(tl.int32)
    counts = tl.histogram(tl.maximum(expert, 0), EXPERTS, mask=expert >= 0)
    tl.store(partial + chunk * EXPERTS + tl.arange(0, EXPERTS), counts)


@Launcher
@triton.jit(do_not_specialize=["pairs", "blocks", "chunks"])
def _align_kernel(
    topk_ids: tl.tensor,
    partial: tl.tensor,
    sorted_pairs: tl.tensor,
    block_experts: tl.tensor,
    places: tl.tensor,
    pairs,
    blocks,
    chunks,
    experts: tl.constexpr,
    COUNTED: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous(OVERLAP)
    expert = tl.program_id(0)
    chunk = tl.program_id(1)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = pair < pairs
    choice = tl.load(topk_ids + pair, mask=inside, other=-1).to(tl.int32)
    other = tl.arange(0, EXPERTS)
    before = 0  # this expert's pairs in the chunks before this one
    if COUNTED:
        row = tl.arange(0, CHUNKS)
        counts = tl.load(partial + row[:, None] * EXPERTS + other[None, :], mask=(row < chunks)[:, None], other=0)
        totals = tl.sum(counts, axis=0)
        earlier = (row < chunk)[:, None] & (other == expert)[None, :]
        before = tl.sum(tl.sum(tl.where(earlier, counts, 0), axis=1), axis=0)
    else:
        totals = tl.histogram(tl.maximum(choice, 0), EXPERTS, mask=choice >= 0)
    needed = (totals + ROWS - 1) // ROWS
    total = tl.sum(tl.where(other == expert, totals, 0), axis=0)
    first = tl.sum(tl.where(other < expert, needed, 0), axis=0)
    used = (total + ROWS - 1) // ROWS
    mine = choice == expert
    rank = before + tl.cumsum(mine.to(tl.int32), axis=0) - 1
    place = first * ROWS + rank
    tl.store(sorted_pairs + place, pair, mask=mine)
    tl.store(places + pair, place, mask=mine)
    if chunk == 0:
        empty = total + tl.arange(0, ROWS)
        tl.store(sorted_pairs + first * ROWS + empty, tl.zeros([ROWS], tl.int32) + pairs, mask=empty < used * ROWS)
        step = tl.arange(0, 64)
        for start in tl.range(0, used, 64):
            tl.store(block_experts + first + start + step, tl.zeros([64], tl.int32) + expert, mask=start + step < used)
        if expert == experts - 1:
            for start in tl.range(first + used, blocks, 64):
                tl.store(block_experts + start + step, tl.full([64], -1, tl.int32), mask=start + step < blocks)


def align(topk_ids: torch.Tensor, experts: int, rows: int, multiple: int = 1) -> Alignment:
    """Sort token-expert pairs by expert, each expert's run padded to a multiple of `rows`; pairs keep their order.

    topk_ids  [T, top_k], int32 or int64; -1: this pair has no row, and its place is not written
    multiple  the number of blocks is one of this

    One launch up to `CHUNK` pairs, two beyond; reads `topk_ids` once for each expert, from the cache.
    """
    pairs = topk_ids.numel()
    blocks = triton.cdiv(most_blocks(pairs, experts, rows), multiple) * multiple
    device = topk_ids.device
    result = Alignment(
        torch.empty(blocks * rows, dtype=torch.int32, device=device),
        torch.empty(blocks, dtype=torch.int32, device=device),
        torch.empty(pairs, dtype=torch.int32, device=device),
    )
    bins = max(32, triton.next_power_of_2(experts))
    chunk = min(CHUNK, max(32, triton.next_power_of_2(pairs)))
    chunks = triton.cdiv(pairs, chunk)
    partial = topk_ids
    if chunks > 1:
        partial = torch.empty(chunks, bins, dtype=torch.int32, device=device)
        _count_kernel[(chunks,)](topk_ids, partial, pairs, bins, chunk, num_warps=4)
    _align_kernel[(experts, chunks)](
        topk_ids,
        partial,
        result.pairs,
        result.experts,
        result.places,
        pairs,
        blocks,
        chunks,
        experts,
        chunks > 1,
        rows,
        bins,
        triton.next_power_of_2(chunks),
        chunk,
        num_warps=8 if chunks == 1 and chunk > 1024 else 4,  # with few programs, each one counts
    )
    return result


@Launcher
@triton.jit
def _sum_kernel(
    parts, add, out, places, weights, topk_ids, add_stride: tl.int64, hidden: tl.constexpr, top_k: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_previous(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(top_k):
        pair = token * top_k + choice
        known = inside
        if topk_ids is not None:
            known = inside & (tl.load(topk_ids + pair) >= 0)
        if places is not None:
            place = tl.load(places + pair).to(tl.int64)
            part = tl.load(parts + place * hidden + column, mask=known, other=0.0).to(tl.float32)
            total += part * tl.load(weights + pair)
        else:
            total += tl.load(parts + pair * hidden + column, mask=known, other=0.0).to(tl.float32)
    if add is not None:
        total += tl.load(add + token * add_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * hidden + column, total.to(out.dtype.element_ty), mask=inside)


class Routed(NamedTuple):
    """Rows, and the experts that each goes through.

    x         [T, hidden], rows may have gaps
    weights   [T, top_k] float32, contiguous
    topk_ids  [T, top_k] int32 or int64, contiguous; -1 if another rank has the expert
    add       [T, hidden] that is added to the sum, or None; rows may have gaps
    of        experts of the mixture, if others have some of them, else None
    """

    x: torch.Tensor
    weights: torch.Tensor
    topk_ids: torch.Tensor
    add: torch.Tensor | None
    of: int | None

    @classmethod
    def over(
        cls,
        x: torch.Tensor,
        weights: torch.Tensor,
        topk_ids: torch.Tensor,
        add: torch.Tensor | None = None,
        of: int | None = None,
    ) -> "Routed":
        """Returns rows with contiguous weights and ids."""
        return cls(x, weights.contiguous(), topk_ids.contiguous(), add, of)


Product = Callable[[torch.Tensor, Alignment, torch.Tensor], None]
"""A product of blocks of rows with their experts' weights: `x`, the blocks, and `out [rows, outputs]`."""


def through_blocks(
    routed: Routed, blocks: Alignment, width: int, gate_up: Product, down: Product, *, padded: bool = False
) -> torch.Tensor:
    """The sum of x through the experts chosen, whose rows are sorted into blocks: [T, hidden] in the dtype of x.

    gate_up  makes `[pairs, width]` of x
    down     makes `[pairs, hidden]` of that, times the pairs' weights
    padded   the rows that they make lie as the blocks' rows, and are not yet multiplied by the weights
    """
    x, weights, topk_ids, add, of = routed
    pairs, top_k = topk_ids.numel(), topk_ids.shape[1]
    rows = blocks.pairs.shape[0] if padded else pairs
    gated = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    gate_up(x, blocks, gated)
    parts = torch.empty(rows, x.shape[1], dtype=x.dtype, device=x.device)
    down(gated, blocks, parts)
    if top_k == 1 and add is None and of is None and not padded:
        return parts
    out = torch.empty_like(parts[: pairs // top_k])
    hidden = parts.shape[1]
    block = min(1024, triton.next_power_of_2(hidden))
    _sum_kernel[(pairs // top_k, triton.cdiv(hidden, block))](
        parts,
        add,
        out,
        blocks.places if padded else None,
        weights if padded else None,
        None if of is None else topk_ids,
        0 if add is None else add.stride(0),
        hidden,
        top_k,
        block,
        num_warps=4,
    )
    return out
