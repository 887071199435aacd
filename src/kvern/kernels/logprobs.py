"""Log-probabilities of chosen tokens, their ranks, and the most probable tokens, without sorting the vocabulary.

    chunk   of a part of the vocabulary: the sum of the exponentials, how many tokens are before the chosen one, and the
            `wanted` best, largest first
    row     adds up, and merges the chunks' lists

Of equally probable tokens the one with the lowest id comes first. Rows that want nothing take no time.
"""

import torch
import triton
import triton.language as tl

from kvern.kernels.digits import ordered, value_of
from kvern.kernels.launch import Launcher, wait_for_previous

CHUNK, WARPS = 4096, 4
WIDTH = 128
"""Tokens that can be listed: a power of two from `MAX_LOGPROBS` on."""


@Launcher
@triton.jit(do_not_specialize=["chunks"], do_not_specialize_on_alignment=["slots", "wanted", "chosen"])
def _chunk_kernel(
    logits: tl.tensor,
    slots: tl.tensor,
    wanted: tl.tensor,
    chosen: tl.tensor,
    largests: tl.tensor,
    sums: tl.tensor,
    befores: tl.tensor,
    bests: tl.tensor,
    vocabulary,
    chunks,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous(OVERLAP)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    count = tl.load(wanted + tl.load(slots + row).to(tl.int64)).to(tl.int32)
    if count >= 0:
        token = chunk * BLOCK + tl.arange(0, BLOCK)
        inside = token < vocabulary
        values = tl.load(logits + row * vocabulary + token, mask=inside, other=float("-inf")).to(tl.float32)
        values = tl.where(values == 0.0, 0.0, values)  # -0.0 is 0.0
        largest = tl.max(values, axis=0)
        place = row * chunks + chunk
        tl.store(largests + place, largest)
        shift = tl.where(largest == float("-inf"), 0.0, largest)
        tl.store(sums + place, tl.sum(tl.exp(values - shift), axis=0))
        own = tl.load(chosen + row).to(tl.int32)
        score = tl.load(logits + row * vocabulary + own).to(tl.float32)
        before = inside & ((values > score) | ((values == score) & (token < own)))
        tl.store(befores + place, tl.sum(before.to(tl.int32), axis=0))
        key = (ordered(values).to(tl.int64) << 31) | (0x7FFFFFFF - token)
        key = tl.where(inside, key, -1)
        for index in tl.range(0, tl.minimum(count, WIDTH)):
            best = tl.max(key, axis=0)
            tl.store(bests + place * WIDTH + index, best)
            key = tl.where(key == best, -1, key)


@Launcher
@triton.jit(do_not_specialize=["chunks"], do_not_specialize_on_alignment=["slots", "wanted", "chosen"])
def _row_kernel(
    logits: tl.tensor,
    slots: tl.tensor,
    wanted: tl.tensor,
    chosen: tl.tensor,
    largests: tl.tensor,
    sums: tl.tensor,
    befores: tl.tensor,
    bests: tl.tensor,
    own: tl.tensor,
    ranks: tl.tensor,
    best_ids: tl.tensor,
    best_values: tl.tensor,
    vocabulary,
    chunks,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(wanted + tl.load(slots + row).to(tl.int64)).to(tl.int32)
    if count >= 0:
        chunk = tl.arange(0, CHUNKS)
        place, inside = row * chunks + chunk, chunk < chunks
        each = tl.load(largests + place, mask=inside, other=float("-inf"))
        largest = tl.max(each, axis=0)
        total = tl.sum(tl.load(sums + place, mask=inside, other=0.0) * tl.exp(each - largest), axis=0)
        sum_of_all = largest + tl.log(total)
        token = tl.load(chosen + row)
        score = tl.load(logits + row * vocabulary + token).to(tl.float32)
        tl.store(own + row, score - sum_of_all)
        tl.store(ranks + row, tl.sum(tl.load(befores + place, mask=inside, other=0), axis=0) + 1)
        taken = tl.zeros([CHUNKS], tl.int32)
        for index in tl.range(0, tl.minimum(count, WIDTH)):
            heads = tl.load(bests + place * WIDTH + taken, mask=inside & (taken < count), other=-1)
            best = tl.max(heads, axis=0)
            taken += (heads == best).to(tl.int32)
            value = value_of((best >> 31).to(tl.uint32))
            tl.store(best_ids + row * WIDTH + index, (0x7FFFFFFF - (best & 0x7FFFFFFF)).to(tl.int32))
            tl.store(best_values + row * WIDTH + index, value - sum_of_all)


Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def empty(rows: int, device: torch.device) -> Found:
    """Returns empty results of `logprobs` for so many rows."""
    own = torch.empty(rows, dtype=torch.float32, device=device)
    ranks = torch.empty(rows, dtype=torch.int32, device=device)
    ids = torch.empty(rows, WIDTH, dtype=torch.int32, device=device)
    return own, ranks, ids, torch.empty(rows, WIDTH, dtype=torch.float32, device=device)


def logprobs(logits: torch.Tensor, slots: torch.Tensor, wanted: torch.Tensor, chosen: torch.Tensor, out: Found) -> None:
    """Writes the report of each row's token, for rows whose `wanted` is not negative.

    logits   [N, vocabulary], contiguous, any float dtype
    slots    [N] integers: the row of `wanted` [slots] int64, how many of the most probable tokens are listed, at most
             the vocabulary and WIDTH
    chosen   [N] int64
    out      log-probability [N] float32 and rank [N] int32, ids [N, WIDTH] int32 and log-probabilities [N, WIDTH]
             float32 of the most probable tokens; of more rows than N, perhaps
    """
    count, vocabulary = logits.shape
    chunks = triton.cdiv(vocabulary, CHUNK)
    device = logits.device
    largests = torch.empty(count, chunks, dtype=torch.float32, device=device)
    sums = torch.empty_like(largests)
    befores = torch.empty(count, chunks, dtype=torch.int32, device=device)
    bests = torch.empty(count, chunks, WIDTH, dtype=torch.int64, device=device)
    _chunk_kernel[(count, chunks)](
        logits,
        slots,
        wanted,
        chosen,
        largests,
        sums,
        befores,
        bests,
        vocabulary,
        chunks,
        WIDTH,
        CHUNK,
        num_warps=WARPS,
    )
    _row_kernel[(count,)](
        logits,
        slots,
        wanted,
        chosen,
        largests,
        sums,
        befores,
        bests,
        *out,
        vocabulary,
        chunks,
        WIDTH,
        triton.next_power_of_2(chunks),
        num_warps=1,
    )
