"""Numbers of a row of logits, digit by digit: how many have which four bits next, and how much mass."""

import triton
import triton.language as tl

LARGEST = tl.constexpr(3.4028234663852886e38)


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
def value_of(key):
    """The float32 of a key of `ordered`."""
    return tl.where((key >> 31) != 0, key & 0x7FFFFFFF, key ^ 0xFFFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def next_digit(found, wanted):
    """The largest digit with which, and above which, there is as much as wanted; and what is still wanted of it."""
    digit = tl.arange(0, 16)
    best = tl.max(tl.where(tl.cumsum(found, 0, reverse=True) >= wanted, digit, 0), axis=0)
    above = tl.sum(tl.where(digit > best, found, 0.0), axis=0)
    return best.to(tl.uint32), wanted - above


@triton.jit
def tokens_of(start, BLOCK: tl.constexpr):
    """BLOCK token ids, [4, BLOCK // 4]: those of a column follow each other, and one thread has them."""
    return start + tl.arange(0, 4)[:, None] + 4 * tl.arange(0, BLOCK // 4)[None, :]


@triton.jit
def digits_of(key, digits, shift):
    """The four bits before the last `shift` of keys that begin like `digits`; 16 for others."""
    digit = ((key >> shift) & 15).to(tl.int32)
    return tl.where(((key >> shift) >> 4) == ((digits >> shift) >> 4), digit, 16)


@triton.jit
def count_digits(logits, scores, changed, row, vocabulary, first, last, digits, shift, BLOCK: tl.constexpr):
    """Counts the next digit of logits that begin with `digits`: [16] float32."""
    nibbles = tl.full([], 0x0F0F0F0F0F0F0F0F, tl.int64)
    even = tl.zeros([BLOCK // 4], tl.int64)  # eight numbers of eight bits each
    odd = tl.zeros([BLOCK // 4], tl.int64)
    for start in tl.range(first, last, BLOCK):
        token = tokens_of(start, BLOCK)
        values = read_scores(logits, scores, changed, row, token, vocabulary)
        digit = digits_of(ordered(values), digits, shift)
        counted = (token < last) & (digit < 16)
        one = tl.where(counted, tl.full([], 1, tl.int64) << (4 * (digit & 15)).to(tl.int64), 0)
        found = tl.sum(one, axis=0)
        even += found & nibbles
        odd += (found >> 4) & nibbles
    digit = tl.arange(0, 16)[:, None]
    both = tl.where(digit % 2 == 0, even[None, :], odd[None, :])
    return tl.sum(((both >> (8 * (digit // 2)).to(tl.int64)) & 255).to(tl.int32), axis=1).to(tl.float32)


@triton.jit
def weigh_digits(
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
    center,
    TYPICAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums the mass by next digit of logits with key `low` or more that begin with `digits`: [16]."""
    masses = tl.zeros([16, BLOCK // 4], tl.float32)
    for start in tl.range(first, last, BLOCK):
        token = tokens_of(start, BLOCK)
        values = read_scores(logits, scores, changed, row, token, vocabulary)
        key = ordered(values)
        kept = (key >= low) & (token < last)
        if TYPICAL:
            key = ordered(tl.abs((values - largest) - center)) ^ 0xFFFFFFFF
        digit = tl.where(kept, digits_of(key, digits, shift), 16)
        if tl.min(tl.min(digit, axis=0), axis=0) < 16:  # few are left after some digits
            mass = tl.exp2((values - largest) * scale)
            each = tl.where(digit[None, :, :] == tl.arange(0, 16)[:, None, None], mass[None, :, :], 0.0)
            masses += tl.sum(each, axis=1)
    return tl.sum(masses, axis=1)


@triton.jit
def resolve(keys, wants, partials, row, rows, step, shift, zeros, share_of, SHARES: tl.constexpr):
    """The first digits that are known before launch `step`, and how much is wanted of what begins like them.

    share_of   the first digit's launch was to find this share of all; 0: it was told how much
    """
    before = ((step + 1) % 2) * rows + row
    digits, wanted = tl.load(keys + before), tl.load(wants + before)
    if shift + 8 > zeros:
        place = (row * SHARES + tl.arange(0, SHARES)[:, None]) * 16 + tl.arange(0, 16)[None, :]
        found = tl.sum(tl.load(partials + place), axis=0)
        if (shift == 24) & (share_of > 0):
            wanted = share_of * tl.sum(found, axis=0)
        digit, wanted = next_digit(found, wanted)
        digits |= digit << (shift + 4)
    return digits, wanted
