"""Which logits top_k, top_p, min_p and typical_p leave, without sorting the vocabulary.

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

from kvern.kernels.launch import overlaps, wait_for_previous

GREEDY_BELOW = tl.constexpr(1e-5)
LARGEST = tl.constexpr(3.4028234663852886e38)
MOST_SHARES = 16
"""Programs that share a row."""
BLOCK = 2048
FIRST_COUNT, FIRST_MASS = 24, 28
"""Bits behind the first digit of 8, which count, and of 4, which weigh."""


class FilteredRows(Protocol):
    """A row for each slot: changes, top_k [slots] int64; temperature, top_p, min_p, typical_p [slots] float32."""

    changes: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    typical_p: torch.Tensor


@triton.jit
def read_scores(logits, scores, changed, row, token, vocabulary):
    """Numbers that can be ordered, float32: the row's scores if it is `changed`, else its logits."""
    place = row * vocabulary + token
    if changed:
        values = tl.load(scores + place, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    else:
        values = tl.load(logits + place, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    return tl.where(values == values, tl.minimum(values, LARGEST), float("-inf"))


@triton.jit
def ordered(values):
    """uint32 in the order of float32 values."""
    bits = values.to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _value(key):
    """The float32 of a key of `ordered`."""
    return tl.where((key >> 31) != 0, key & 0x7FFFFFFF, key ^ 0xFFFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _unordered_zero(values):
    """-0.0 is 0.0."""
    return tl.where(values == 0.0, 0.0, values)


@triton.jit
def _added(partials, row, SHARES: tl.constexpr, DIGITS: tl.constexpr):
    """What the programs of a row found, [DIGITS]."""
    share, digit = tl.arange(0, SHARES), tl.arange(0, DIGITS)
    return tl.sum(tl.load(partials + (row * SHARES + share[:, None]) * DIGITS + digit[None, :]), axis=0)


@triton.jit
def _next_digit(found, wanted, DIGITS: tl.constexpr):
    """The largest digit with which, and above which, there is as much as wanted; and what is still wanted of it."""
    digit = tl.arange(0, DIGITS)
    best = tl.max(tl.where(tl.cumsum(found, 0, reverse=True) >= wanted, digit, 0), axis=0)
    above = tl.sum(tl.where(digit > best, found, 0), axis=0)
    return best.to(tl.uint32), wanted - above


@triton.jit
def _row_of(logits, slots, temperatures, changes, row, WIDE: tl.constexpr):
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


@triton.jit
def _resolve_count(keys, wants, partials, row, rows, step, shift, zeros, uses, SHARES: tl.constexpr):
    """The smallest key that top_k leaves, as far as it is known before launch `step`, and how many more are wanted."""
    before = ((step + 1) % 2) * rows + row
    low, wanted = tl.load(keys + before), tl.load(wants + before)
    if uses & (shift + 16 > zeros):
        digit, wanted = _next_digit(_added(partials, row, SHARES, 256).to(tl.float32), wanted, 256)
        low |= digit << (shift + 8)
    return low, wanted


@triton.jit(do_not_specialize=["rows", "step", "shift"], do_not_specialize_on_alignment=["slots"])
def _count_digits_kernel(
    logits: tl.tensor,
    scores: tl.tensor,
    slots: tl.tensor,
    temperatures: tl.tensor,
    changes: tl.tensor,
    top_ks: tl.tensor,
    lows: tl.tensor,
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
    """One digit of 8 bits of the top_k-th largest."""
    if OVERLAP:
        wait_for_previous()
    row, share = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot, temperature, changed, zeros = _row_of(logits, slots, temperatures, changes, row, ZEROS)
    top_k = tl.load(top_ks + slot)
    uses = (top_k > 0) & (top_k < vocabulary) & (temperature >= GREEDY_BELOW)
    low = tl.full([], 0, tl.uint32)
    wanted = top_k.to(tl.float32)
    if step > 0:
        low, wanted = _resolve_count(lows, wants, read, row, rows, step, shift, zeros, uses, SHARES)
    if share == 0:
        tl.store(lows + (step % 2) * rows + row, low)
        tl.store(wants + (step % 2) * rows + row, wanted)
    first, last = _span(vocabulary, SHARES, BLOCK)
    counting = uses & (shift + 8 > zeros)
    if (temperature >= GREEDY_BELOW) & ((step == 0) | counting):
        largest = tl.full([BLOCK], float("-inf"), tl.float32)
        counts = tl.zeros([256], tl.int32)
        for start in tl.range(first, last, BLOCK):
            token = start + tl.arange(0, BLOCK)
            values = read_scores(logits, scores, changed, row, token, vocabulary)
            largest = tl.maximum(largest, values)
            if counting:
                key = ordered(values)
                same = ((key >> shift) >> 8) == ((low >> shift) >> 8)
                counts += tl.histogram(((key >> shift) & 255).to(tl.int32), 256, mask=same & (token < last))
        if step == 0:
            tl.store(largests + row * SHARES + share, tl.max(largest, axis=0))
        if counting:
            tl.store(written + (row * SHARES + share) * 256 + tl.arange(0, 256), counts)


@triton.jit
def _masses(
    logits,
    scores,
    changed,
    row,
    vocabulary,
    first,
    last,
    low,
    mass_low,
    shift,
    largest,
    temperature,
    center,
    TYPICAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of what has key `low` or more, and the digits of `mass_low` before these four: the mass with each digit, [16]."""
    masses = tl.zeros([16, BLOCK], tl.float32)
    for start in tl.range(first, last, BLOCK):
        token = start + tl.arange(0, BLOCK)
        values = read_scores(logits, scores, changed, row, token, vocabulary)
        key = ordered(values)
        mass = tl.where((key >= low) & (token < last), tl.exp((values - largest) / temperature), 0.0)
        if TYPICAL:
            key = ordered(tl.abs((values - largest) - center)) ^ 0xFFFFFFFF
        digit = ((key >> shift) & 15).to(tl.int32)
        digit = tl.where(((key >> shift) >> 4) == ((mass_low >> shift) >> 4), digit, 16)
        masses += tl.where(digit[None, :] == tl.arange(0, 16)[:, None], mass[None, :], 0.0)
    return tl.sum(masses, axis=1)


@triton.jit
def _resolve_mass(keys, wants, partials, row, rows, step, shift, zeros, uses, top_p, SHARES: tl.constexpr):
    """The smallest key that top_p leaves, as far as it is known before launch `step`, and what mass is wanted of it."""
    before = ((step + 1) % 2) * rows + row
    low, wanted = tl.load(keys + before), tl.load(wants + before)
    if uses & (shift + 8 > zeros):
        found = _added(partials, row, SHARES, 16)
        wanted = tl.where(shift == 24, top_p * tl.sum(found, axis=0), wanted)
        digit, wanted = _next_digit(found, wanted, 16)
        low |= digit << (shift + 4)
    return low, wanted


@triton.jit(do_not_specialize=["rows", "step", "shift"], do_not_specialize_on_alignment=["slots"])
def _weigh_digits_kernel(
    logits: tl.tensor,
    scores: tl.tensor,
    slots: tl.tensor,
    temperatures: tl.tensor,
    changes: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    lows: tl.tensor,
    wants: tl.tensor,
    mass_lows: tl.tensor,
    mass_wants: tl.tensor,
    largests: tl.tensor,
    counts: tl.tensor,
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
    """One digit of 4 bits of the last that top_p leaves; before the first, the last of top_k is resolved."""
    if OVERLAP:
        wait_for_previous()
    row, share = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot, temperature, changed, zeros = _row_of(logits, slots, temperatures, changes, row, ZEROS)
    top_k, top_p = tl.load(top_ks + slot), tl.load(top_ps + slot)
    mass_low = tl.full([], 0, tl.uint32)
    wanted = tl.full([], 0, tl.float32)
    if shift == 28:
        counted = (top_k > 0) & (top_k < vocabulary) & (temperature >= GREEDY_BELOW)
        low, _ = _resolve_count(lows, wants, counts, row, rows, step, -8, zeros, counted, SHARES)
        if share == 0:
            tl.store(lows + 2 * rows + row, low)
    else:
        low = tl.load(lows + 2 * rows + row)
    uses = (top_p < 1.0) & (temperature >= GREEDY_BELOW)
    if shift < 28:
        mass_low, wanted = _resolve_mass(
            mass_lows, mass_wants, read, row, rows, step, shift, zeros, uses, top_p, SHARES
        )
    if share == 0:
        tl.store(mass_lows + (step % 2) * rows + row, mass_low)
        tl.store(mass_wants + (step % 2) * rows + row, wanted)
    if uses & (shift + 4 > zeros):
        largest = tl.maximum(tl.max(tl.load(largests + row * SHARES + tl.arange(0, SHARES)), axis=0), -LARGEST)
        first, last = _span(vocabulary, SHARES, BLOCK)
        masses = _masses(
            logits,
            scores,
            changed,
            row,
            vocabulary,
            first,
            last,
            low,
            mass_low,
            shift,
            largest,
            temperature,
            0.0,
            False,
            BLOCK,
        )
        tl.store(written + (row * SHARES + share) * 16 + tl.arange(0, 16), masses)


@triton.jit
def _typical(logits, scores, changed, row, vocabulary, low, largest, temperature, typical_p, BLOCK: tl.constexpr):
    """Center and radius, as distances from the largest, of the logits that typical_p leaves."""
    total = tl.zeros([BLOCK], tl.float32)
    product = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        values = read_scores(logits, scores, changed, row, token, vocabulary)
        scaled = (values - largest) / temperature
        mass = tl.where((ordered(values) >= low) & (token < vocabulary), tl.exp(scaled), 0.0)
        total += mass
        product += tl.where(mass > 0, mass * scaled, 0.0)
    mass = tl.sum(total, axis=0)
    center = temperature * (tl.sum(product, axis=0) / mass)  # surprise - entropy = (this mean - scaled)
    wanted = typical_p * mass
    key = tl.full([], 0, tl.uint32)
    shift = 28
    while shift >= 0:
        masses = _masses(
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
            temperature,
            center,
            True,
            BLOCK,
        )
        digit, wanted = _next_digit(masses, wanted, 16)
        key |= digit << shift
        shift -= 4
    return center, _value(key ^ 0xFFFFFFFF)


@triton.jit(do_not_specialize=["rows", "step"], do_not_specialize_on_alignment=["slots"])
def _bounds_kernel(
    logits: tl.tensor,
    scores: tl.tensor,
    slots: tl.tensor,
    temperatures: tl.tensor,
    changes: tl.tensor,
    top_ps: tl.tensor,
    min_ps: tl.tensor,
    typical_ps: tl.tensor,
    lows: tl.tensor,
    mass_lows: tl.tensor,
    mass_wants: tl.tensor,
    largests: tl.tensor,
    read: tl.tensor,
    bounds: tl.tensor,
    vocabulary,
    rows,
    step,
    ZEROS: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    slot, temperature, changed, zeros = _row_of(logits, slots, temperatures, changes, row, ZEROS)
    top_p, min_p, typical_p = tl.load(top_ps + slot), tl.load(min_ps + slot), tl.load(typical_ps + slot)
    threshold, largest, center, radius = float("-inf"), 0.0, 0.0, float("inf")
    if temperature >= GREEDY_BELOW:
        largest = tl.max(tl.load(largests + row * SHARES + tl.arange(0, SHARES)), axis=0)
        low, _ = _resolve_mass(mass_lows, mass_wants, read, row, rows, step, -4, zeros, top_p < 1.0, top_p, SHARES)
        low = tl.maximum(low, tl.load(lows + 2 * rows + row))
        low = tl.maximum(tl.minimum(low, ordered(largest)), ordered(tl.full([], float("-inf"), tl.float32)))
        threshold = _value(low)
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
    """What the filters leave of each row, [N, 4] float32: logits from the first number on, whose distance from the

    second, less the third, is the fourth at most.

    logits, scores   [N, vocabulary], contiguous: the latter, float32, count in rows that change their logits
    slots            [N] integers: their rows
    """
    count, vocabulary = logits.shape
    device, overlap = logits.device, overlaps(logits.device)
    # a 16-bit number has 16 zeros behind it as a float32 (float16: 13)
    zeros = {torch.bfloat16: 16, torch.float16: 13}.get(logits.dtype, 0)
    shares = min(MOST_SHARES, triton.next_power_of_2(triton.cdiv(vocabulary, BLOCK)))
    lows, mass_lows = torch.empty(2, 3, count, dtype=torch.uint32, device=device)
    wants, mass_wants = torch.empty(2, 2, count, dtype=torch.float32, device=device)
    largests = torch.empty(count, shares, dtype=torch.float32, device=device)
    counts = torch.empty(2, count, shares, 256, dtype=torch.int32, device=device)
    masses = torch.empty(2, count, shares, 16, dtype=torch.float32, device=device)
    found = torch.empty(count, 4, dtype=torch.float32, device=device)
    for step, shift in enumerate(range(FIRST_COUNT, -1, -8)):
        _count_digits_kernel[(count, shares)](
            logits,
            scores,
            slots,
            rows.temperature,
            rows.changes,
            rows.top_k,
            lows,
            wants,
            largests,
            counts[(step + 1) % 2],
            counts[step % 2],
            vocabulary,
            count,
            step,
            shift,
            zeros,
            shares,
            BLOCK,
            overlap,
            num_warps=4,
            launch_pdl=overlap,
        )
    for step, shift in enumerate(range(FIRST_MASS, -1, -4)):
        _weigh_digits_kernel[(count, shares)](
            logits,
            scores,
            slots,
            rows.temperature,
            rows.changes,
            rows.top_k,
            rows.top_p,
            lows,
            wants,
            mass_lows,
            mass_wants,
            largests,
            counts[1],
            masses[(step + 1) % 2],
            masses[step % 2],
            vocabulary,
            count,
            step,
            shift,
            zeros,
            shares,
            BLOCK,
            overlap,
            num_warps=8,
            launch_pdl=overlap,
        )
    _bounds_kernel[(count,)](
        logits,
        scores,
        slots,
        rows.temperature,
        rows.changes,
        rows.top_p,
        rows.min_p,
        rows.typical_p,
        lows,
        mass_lows,
        mass_wants,
        largests,
        masses[1],
        found,
        vocabulary,
        count,
        8,
        zeros,
        shares,
        BLOCK,
        overlap,
        num_warps=16,
        launch_pdl=overlap,
    )
    return found
