"""Penalties, biases and bans of a step's rows: from the model's logits to scores, which the draw reads.

    clear     rows with penalties: zeros, in the memory that the scores will take
    count     how often the row has each token in its output, and whether in its prompt: one addition for each token
    change    a chunk of the vocabulary each: counts -> penalized logits, biased, without what is banned

Rows are described on the device alone (`changes`, and a list of numbers for each that has one), so a CUDA graph serves
any mixture, and rows that ask for nothing cost nothing. Counts are made anew in each step, from the row's tokens as far
as they are known: nothing is to be undone when drafts are rejected. That reads 4 bytes where attention reads a token's
keys and values of all layers.
"""

from typing import Protocol

import torch
import triton
import triton.language as tl

from kvern.kernels.launch import Launcher, wait_for_previous

PENALTIES = tl.constexpr(1)
LISTS = tl.constexpr(2)
"""Bits of `changes`."""
HEADER = 6
"""Numbers that a list begins with: see `change`."""
CHUNK = 4096
"""Entries of the vocabulary that one program changes."""
READERS = 16
"""Programs that count the tokens of a row."""
IN_PROMPT = tl.constexpr(1 << 30)


class ConstrainedRows(Protocol):
    """The batch on the device, a row for each slot; `BatchRows` says more.

    tokens [slots, positions] int32; changes, prompt_lengths, lists [slots] int64; repetition, presence, frequency
    [slots] float32
    """

    tokens: torch.Tensor
    changes: torch.Tensor
    prompt_lengths: torch.Tensor
    lists: torch.Tensor
    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor


@Launcher
@triton.jit(do_not_specialize_on_alignment=["slots", "changes"])
def _clear_kernel(
    counts: tl.tensor, slots: tl.tensor, changes: tl.tensor, vocabulary, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    if (tl.load(changes + tl.load(slots + row).to(tl.int64)) & PENALTIES) != 0:
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        tl.store(counts + row * vocabulary + token, tl.zeros([BLOCK], tl.int32), mask=token < vocabulary)


@Launcher
@triton.jit(do_not_specialize_on_alignment=["slots", "positions", "changes", "prompt_lengths", "repetitions"])
def _count_kernel(
    counts: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    changes: tl.tensor,
    prompt_lengths: tl.tensor,
    repetitions: tl.tensor,
    tokens: tl.tensor,
    vocabulary,
    token_stride: tl.int64,
    READERS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if (tl.load(changes + slot) & PENALTIES) != 0:
        position = tl.load(positions + row).to(tl.int32)
        prompt_length = tl.load(prompt_lengths + slot).to(tl.int32)
        first = tl.where(tl.load(repetitions + slot) == 1.0, prompt_length, 0)
        for start in tl.range(first + tl.program_id(1) * BLOCK, position, READERS * BLOCK):
            place = start + tl.arange(0, BLOCK)
            token = tl.load(tokens + slot * token_stride + place, mask=place < position, other=0)
            target = counts + row * vocabulary + token
            generated = place >= prompt_length
            tl.atomic_add(target, 1, mask=(place < position) & generated, sem="relaxed")
            tl.atomic_or(target, IN_PROMPT, mask=(place < position) & ~generated, sem="relaxed")


@triton.jit
def _ban(scores, ids, count, first, last, BLOCK: tl.constexpr):
    """-inf for those of `ids` [count] that lie in a chunk."""
    for start in tl.range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        token = tl.load(ids + place, mask=place < count, other=-1)
        banned = tl.full([BLOCK], float("-inf"), tl.float32)
        tl.store(scores + token, banned, mask=(token >= first) & (token < last))


@triton.jit
def _ban_words(scores, words, ids, count, longest, text, generated, first, last, BLOCK: tl.constexpr):
    """-inf for the last tokens, in a chunk, of those words whose others the `generated` tokens before `text` end with.

    words, ids   for each word the index of its first token among the ids, and its length
    """
    for start in tl.range(0, count, BLOCK):
        word = start + tl.arange(0, BLOCK)
        begin = tl.load(words + 2 * word, mask=word < count, other=0)
        before = tl.load(words + 2 * word + 1, mask=word < count, other=1) - 1
        token = tl.load(ids + begin + before, mask=word < count, other=-1)
        ended = (token >= first) & (token < last) & (before <= generated)
        for place in tl.range(0, longest - 1):
            compared = ended & (place < before)
            found = tl.load(text - before + place, mask=compared, other=0)
            ended = ended & ((place >= before) | (found == tl.load(ids + begin + place, mask=compared, other=-1)))
        tl.store(scores + token, tl.full([BLOCK], float("-inf"), tl.float32), mask=ended)


@Launcher
@triton.jit(
    do_not_specialize_on_alignment=[
        "slots",
        "positions",
        "changes",
        "prompt_lengths",
        "addresses",
        "repetitions",
        "presences",
        "frequencies",
    ]
)
def _change_kernel(
    logits: tl.tensor,
    scores: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    changes: tl.tensor,
    prompt_lengths: tl.tensor,
    addresses: tl.tensor,
    repetitions: tl.tensor,
    presences: tl.tensor,
    frequencies: tl.tensor,
    tokens: tl.tensor,
    vocabulary,
    token_stride: tl.int64,
    EVERYTHING: tl.constexpr,
    HEADER: tl.constexpr,
    BLOCK: tl.constexpr,
    SMALL: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    change = tl.load(changes + slot)
    first = tl.program_id(1) * BLOCK
    last = tl.minimum(first + BLOCK, vocabulary)
    token = first + tl.arange(0, BLOCK)
    target = scores + row * vocabulary
    if EVERYTHING or change != 0:
        values = tl.load(logits + row * vocabulary + token, mask=token < last, other=0.0).to(tl.float32)
        if (change & PENALTIES) != 0:
            counts = (target + token).to(tl.pointer_type(tl.int32), bitcast=True)
            count = tl.load(counts, mask=token < last, other=0)
            repetition = tl.load(repetitions + slot)
            repeated = tl.where(values > 0, values / repetition, values * repetition)
            values = tl.where(count != 0, repeated, values)
            count = count & (IN_PROMPT - 1)
            presence = tl.where(count > 0, tl.load(presences + slot), 0.0)
            values -= tl.load(frequencies + slot) * count.to(tl.float32) + presence
        if (change & LISTS) != 0:
            numbers = tl.load(addresses + slot).to(tl.pointer_type(tl.int32))
            allowed = tl.load(numbers)
            if allowed > 0:
                biases = 2 * tl.load(numbers + 1)
                word = tl.load(numbers + HEADER + biases + token // 32, mask=token // 32 < allowed, other=0)
                values = tl.where(((word >> (token % 32)) & 1) != 0, values, float("-inf"))
        tl.store(target + token, values, mask=token < last)
        if (change & LISTS) != 0:
            numbers = tl.load(addresses + slot).to(tl.pointer_type(tl.int32))
            allowed = tl.load(numbers)
            biases = tl.load(numbers + 1)
            ends = tl.load(numbers + 2)
            words, longest = tl.load(numbers + 4), tl.load(numbers + 5)
            position = tl.load(positions + row)
            tl.debug_barrier()  # what other threads stored is read
            for start in tl.range(0, biases, SMALL):
                place = start + tl.arange(0, SMALL)
                biased = tl.load(numbers + HEADER + place, mask=place < biases, other=-1)
                bias = tl.load(numbers + HEADER + biases + place, mask=place < biases, other=0)
                inside = (biased >= first) & (biased < last)
                score = tl.load(target + biased, mask=inside, other=0.0)
                tl.store(target + biased, score + bias.to(tl.float32, bitcast=True), mask=inside)
            tl.debug_barrier()
            numbers += HEADER + 2 * biases + allowed
            header = tl.load(addresses + slot).to(tl.pointer_type(tl.int32))
            if position < tl.load(header + 3):
                _ban(target, numbers, ends, first, last, SMALL)
            numbers += ends
            text = tokens + slot * token_stride + position
            generated = position - tl.load(prompt_lengths + slot)
            _ban_words(target, numbers, numbers + 2 * words, words, longest, text, generated, first, last, SMALL)


def change(
    logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, rows: ConstrainedRows, *, everything: bool
) -> torch.Tensor:
    """Scores [N, vocabulary] float32: what the rows' requests make of the logits.

    logits      [N, vocabulary], contiguous, any float dtype
    slots       [N] integers: the rows that they belong to
    positions   [N] int64: of the tokens that will be chosen
    everything  whether rows that change nothing are written too

    The list of a row, int32: `allowed`, number of words of the mask of allowed tokens (0: all are); number of biases;
    number of tokens that end an answer; the first position where these may stand; number of bad words; length of the
    longest. Then the biases' tokens and values, the mask, the tokens that end it, for each bad word its first index
    among their tokens and its length, and their tokens.
    """
    count, vocabulary = logits.shape
    chunks = triton.cdiv(vocabulary, CHUNK)
    scores = torch.empty(count, vocabulary, dtype=torch.float32, device=logits.device)
    counts = scores.view(torch.int32)
    _clear_kernel[(count, chunks)](counts, slots, rows.changes, vocabulary, CHUNK, num_warps=4)
    _count_kernel[(count, READERS)](
        counts,
        slots,
        positions,
        rows.changes,
        rows.prompt_lengths,
        rows.repetition,
        rows.tokens,
        vocabulary,
        rows.tokens.stride(0),
        READERS,
        256,
        num_warps=2,
    )
    _change_kernel[(count, chunks)](
        logits,
        scores,
        slots,
        positions,
        rows.changes,
        rows.prompt_lengths,
        rows.lists,
        rows.repetition,
        rows.presence,
        rows.frequency,
        rows.tokens,
        vocabulary,
        rows.tokens.stride(0),
        everything,
        HEADER,
        CHUNK,
        128,
        num_warps=4,
    )
    return scores
