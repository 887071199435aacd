"""Filters of logits by top_k, top_p, min_p and typical_p, without sorting the vocabulary.

    top_k       the k largest and every tie of the last
    top_p       of their probabilities in descending order, all before which less than top_p has come, and every tie
    min_p       none below min_p times the largest
    typical_p   of what is left, those whose surprise is nearest the entropy, until typical_p of it has come, and ties

A threshold is found digit by digit, from the first bits of the logits on, so it is exact: a launch counts, or weighs,
how much of what has the digits so far has which next digit. Some programs share a row; the next launch adds up what
they found and goes on. Logits of 16 bits take half as many digits. Rows without the filter take no time.
"""

from typing import Protocol

import torch
import triton
import triton.language as tl

from kvern.kernels.digits import (
    LARGEST,
    count_digits,
    next_digit,
    ordered,
    read_scores,
    resolve,
    tokens_of,
    value_of,
    weigh_digits,
)
from kvern.kernels.launch import Launcher, wait_for_previous

GREEDY_BELOW = tl.constexpr(1e-5)
LOG2_E = tl.constexpr(1.4426950408889634)
SHARES = 16
"""Programs that share a row."""
COUNTED, WEIGHED = 2048, 1024
"""Entries of the vocabulary that a program looks at at a time: weighing takes more registers."""
SHORT = ["slots", "temperatures", "changes", "top_ks", "top_ps", "min_ps", "typical_ps", "lows", "mass_lows", "wants"]
"""Tensors with a number for each row or slot: where they begin depends on how many there are."""


class FilteredRows(Protocol):
    """A row for each slot: changes, top_k [slots] int64; temperature, top_p, min_p, typical_p [slots] float32."""

    changes: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    typical_p: torch.Tensor


@triton.jit
def _row_of(slots, temperatures, changes, row, WIDE: tl.constexpr):
    """Slot, temperature, whether its scores count, and how many last bits all numbers of the row share."""
    slot = tl.load(slots + row).to(tl.int64)
    changed = tl.load(changes + slot) != 0
    zeros = 0
    if WIDE == 16:
        zeros = tl.where(changed, 0, 16)
    if WIDE == 13:
        zeros = tl.where(changed, 0, 13)
    return slot, tl.load(temperatures + slot), changed, zeros


@triton.jit
def _span(vocabulary, SHARES: tl.constexpr, BLOCK: tl.constexpr):
    """First and last entry of the vocabulary that a program looks at."""
    size = tl.cdiv(tl.cdiv(vocabulary, SHARES), BLOCK) * BLOCK
    first = tl.program_id(1) * size
    return first, tl.minimum(first + size, vocabulary)


@Launcher
@triton.jit(do_not_specialize=["rows", "step", "shift"], do_not_specialize_on_alignment=SHORT)
def _count_digits_kernel(
    logits: tl.tensor,
    scores: tl.tensor,
    slots: tl.tensor,
    temperatures: tl.tensor,
    changes: tl.tensor,
    top_ks: tl.tensor,
    lows: tl.tensor,
    wants: tl.tensor,
    read: tl.tensor,
    written: tl.tensor,
    vocabulary,
    rows,
    step,
    shift,
    ZEROS: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Four bits of the top_k-th largest."""
    wait_for_previous(OVERLAP)
    row, share = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot, temperature, changed, zeros = _row_of(slots, temperatures, changes, row, ZEROS)
    top_k = tl.load(top_ks + slot)
    if (top_k > 0) & (top_k < vocabulary) & (temperature >= GREEDY_BELOW):
        low = tl.full([], 0, tl.uint32)
        wanted = top_k.to(tl.float32)
        if step > 0:
            low, wanted = resolve(lows, wants, read, row, rows, step, shift, zeros, 0.0, SHARES)
        if share == 0:
            tl.store(lows + (step % 2) * rows + row, low)
            tl.store(wants + (step % 2) * rows + row, wanted)
        if shift + 4 > zeros:
            first, last = _span(vocabulary, SHARES, BLOCK)
            found = count_digits(logits, scores, changed, row, vocabulary, first, last, low, shift, BLOCK)
            tl.store(written + (row * SHARES + share) * 16 + tl.arange(0, 16), found)


@Launcher
@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=SHORT)
def _largest_kernel(
    logits: tl.tensor,
    scores: tl.tensor,
    slots: tl.tensor,
    temperatures: tl.tensor,
    changes: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    min_ps: tl.tensor,
    typical_ps: tl.tensor,
    lows: tl.tensor,
    wants: tl.tensor,
    read: tl.tensor,
    largests: tl.tensor,
    vocabulary,
    rows,
    ZEROS: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The largest of each share, and the smallest key that top_k leaves."""
    wait_for_previous(OVERLAP)
    row, share = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot, temperature, changed, zeros = _row_of(slots, temperatures, changes, row, ZEROS)
    top_k = tl.load(top_ks + slot)
    counted = (top_k > 0) & (top_k < vocabulary)
    others = (tl.load(top_ps + slot) < 1.0) | (tl.load(min_ps + slot) > 0.0) | (tl.load(typical_ps + slot) < 1.0)
    if (counted | others) & (temperature >= GREEDY_BELOW):
        if share == 0:
            low = tl.full([], 0, tl.uint32)
            if counted:
                low, _ = resolve(lows, wants, read, row, rows, 8, -4, zeros, 0.0, SHARES)
            tl.store(lows + 2 * rows + row, low)
        first, last = _span(vocabulary, SHARES, BLOCK)
        largest = tl.full([4, BLOCK // 4], float("-inf"), tl.float32)
        for start in tl.range(first, last, BLOCK):
            token = tokens_of(start, BLOCK)
            largest = tl.maximum(largest, read_scores(logits, scores, changed, row, token, vocabulary))
        tl.store(largests + row * SHARES + share, tl.max(tl.max(largest, axis=0), axis=0))


@Launcher
@triton.jit(do_not_specialize=["rows", "step", "shift"], do_not_specialize_on_alignment=SHORT)
def _weigh_digits_kernel(
    logits: tl.tensor,
    scores: tl.tensor,
    slots: tl.tensor,
    temperatures: tl.tensor,
    changes: tl.tensor,
    top_ps: tl.tensor,
    lows: tl.tensor,
    mass_lows: tl.tensor,
    wants: tl.tensor,
    largests: tl.tensor,
    read: tl.tensor,
    written: tl.tensor,
    vocabulary,
    rows,
    step,
    shift,
    ZEROS: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Four bits of the last that top_p leaves."""
    wait_for_previous(OVERLAP)
    row, share = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot, temperature, changed, zeros = _row_of(slots, temperatures, changes, row, ZEROS)
    top_p = tl.load(top_ps + slot)
    if (top_p < 1.0) & (temperature >= GREEDY_BELOW):
        digits = tl.full([], 0, tl.uint32)
        wanted = tl.full([], 0, tl.float32)
        if step > 0:
            digits, wanted = resolve(mass_lows, wants, read, row, rows, step, shift, zeros, top_p, SHARES)
        if share == 0:
            tl.store(mass_lows + (step % 2) * rows + row, digits)
            tl.store(wants + (step % 2) * rows + row, wanted)
        if shift + 4 > zeros:
            largest = tl.maximum(tl.max(tl.load(largests + row * SHARES + tl.arange(0, SHARES)), axis=0), -LARGEST)
            low, scale = tl.load(lows + 2 * rows + row), LOG2_E / temperature
            first, last = _span(vocabulary, SHARES, BLOCK)
            found = weigh_digits(
                logits,
                scores,
                changed,
                row,
                vocabulary,
                first,
                last,
                low,
                digits,
                shift,
                largest,
                scale,
                0.0,
                False,
                BLOCK,
            )
            tl.store(written + (row * SHARES + share) * 16 + tl.arange(0, 16), found)


@triton.jit
def _typical(logits, scores, changed, row, vocabulary, low, largest, temperature, typical_p, BLOCK: tl.constexpr):
    """Center and radius, as distances from the largest, of the logits that typical_p leaves."""
    scale = LOG2_E / temperature
    total = tl.zeros([BLOCK], tl.float32)
    product = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        values = read_scores(logits, scores, changed, row, token, vocabulary)
        distance = values - largest
        mass = tl.where((ordered(values) >= low) & (token < vocabulary), tl.exp2(distance * scale), 0.0)
        total += mass
        product += tl.where(mass > 0, mass * distance, 0.0)
    mass = tl.sum(total, axis=0)
    center = tl.sum(product, axis=0) / mass  # surprise - entropy is (center - distance) / temperature
    wanted = typical_p * mass
    key = tl.full([], 0, tl.uint32)
    shift = 28
    while shift >= 0:
        found = weigh_digits(
            logits,
            scores,
            changed,
            row,
            vocabulary,
            0,
            vocabulary,
            low,
            key,
            shift,
            largest,
            scale,
            center,
            True,
            BLOCK,
        )
        digit, wanted = next_digit(found, wanted)
        key |= digit << shift
        shift -= 4
    return center, value_of(key ^ 0xFFFFFFFF)


@Launcher
@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=SHORT)
def _bounds_kernel(
    logits: tl.tensor,
    scores: tl.tensor,
    slots: tl.tensor,
    temperatures: tl.tensor,
    changes: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    min_ps: tl.tensor,
    typical_ps: tl.tensor,
    lows: tl.tensor,
    mass_lows: tl.tensor,
    wants: tl.tensor,
    largests: tl.tensor,
    read: tl.tensor,
    bounds: tl.tensor,
    vocabulary,
    rows,
    ZEROS: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    slot, temperature, changed, zeros = _row_of(slots, temperatures, changes, row, ZEROS)
    top_p = tl.load(top_ps + slot)
    min_p = tl.load(min_ps + slot)
    typical_p = tl.load(typical_ps + slot)
    threshold = float("-inf")
    largest = 0.0
    center = 0.0
    radius = float("inf")
    top_k = tl.load(top_ks + slot)
    filtered = ((top_k > 0) & (top_k < vocabulary)) | (top_p < 1.0) | (min_p > 0.0) | (typical_p < 1.0)
    if filtered & (temperature >= GREEDY_BELOW):
        largest = tl.max(tl.load(largests + row * SHARES + tl.arange(0, SHARES)), axis=0)
        low = tl.load(lows + 2 * rows + row)
        if top_p < 1.0:
            mass_low, _ = resolve(mass_lows, wants, read, row, rows, 8, -4, zeros, top_p, SHARES)
            low = tl.maximum(low, mass_low)
        low = tl.maximum(tl.minimum(low, ordered(largest)), ordered(tl.full([], float("-inf"), tl.float32)))
        threshold = value_of(low)
        largest = tl.maximum(largest, -LARGEST)
        if min_p > 0.0:
            threshold = tl.maximum(threshold, largest + temperature * tl.log(min_p))
        if typical_p < 1.0:
            center, radius = _typical(
                logits,
                scores,
                changed,
                row,
                vocabulary,
                ordered(threshold),
                largest,
                temperature,
                typical_p,
                BLOCK,
            )
    tl.store(bounds + row * 4, threshold)
    tl.store(bounds + row * 4 + 1, largest)
    tl.store(bounds + row * 4 + 2, center)
    tl.store(bounds + row * 4 + 3, radius)


def bounds(logits: torch.Tensor, scores: torch.Tensor, slots: torch.Tensor, rows: FilteredRows) -> torch.Tensor:
    """Returns the bounds of each row, [N, 4] float32.

    They are threshold, largest, center and radius: a logit stays if `logit >= threshold` and
    `abs(largest - logit - center) <= radius`.

    logits, scores   [N, vocabulary], contiguous; rows that change their logits are filtered by their scores, float32
    slots            [N] integers: their rows
    """
    count, vocabulary = logits.shape
    device = logits.device
    # a 16-bit number has 16 zeros behind it as a float32 (float16: 13)
    zeros = {torch.bfloat16: 16, torch.float16: 13}.get(logits.dtype, 0)
    shares = min(SHARES, triton.next_power_of_2(triton.cdiv(vocabulary, COUNTED)))
    lows, mass_lows = torch.empty(2, 3, count, dtype=torch.uint32, device=device)
    wants = torch.empty(2, count, dtype=torch.float32, device=device)
    largests = torch.empty(count, shares, dtype=torch.float32, device=device)
    found = torch.empty(2, count, shares, 16, dtype=torch.float32, device=device)
    kept = torch.empty(count, 4, dtype=torch.float32, device=device)
    which = logits, scores, slots, rows.temperature, rows.changes
    counting = zeros, shares, COUNTED
    grid = count, shares
    shifts = list(enumerate(range(28, -1, -4)))
    for step, shift in shifts:
        read, written = found[(step + 1) % 2], found[step % 2]
        _count_digits_kernel[grid](
            *which, rows.top_k, lows, wants, read, written, vocabulary, count, step, shift, *counting, num_warps=8
        )
    filters = rows.top_k, rows.top_p, rows.min_p, rows.typical_p
    _largest_kernel[grid](*which, *filters, lows, wants, found[1], largests, vocabulary, count, *counting, num_warps=8)
    for step, shift in shifts:
        read, written = found[(step + 1) % 2], found[step % 2]
        _weigh_digits_kernel[grid](
            *which,
            rows.top_p,
            lows,
            mass_lows,
            wants,
            largests,
            read,
            written,
            vocabulary,
            count,
            step,
            shift,
            zeros,
            shares,
            WEIGHED,
            num_warps=4,
        )
    _bounds_kernel[(count,)](
        *which,
        *filters,
        lows,
        mass_lows,
        wants,
        largests,
        found[1],
        kept,
        vocabulary,
        count,
        zeros,
        shares,
        4096,
        num_warps=16,
    )
    return kept
