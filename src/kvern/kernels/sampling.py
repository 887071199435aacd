"""From logits to tokens: temperature, top_k, top_p, min_p and the draw, without sorting the vocabulary.

    scaled = logits / temperature
    top_k keeps the k largest and every tie of the last; top_p, of their probabilities in descending order, all before
    which less than top_p has come, and every tie of the last; min_p drops those below min_p times the largest
    each token left draws a time from the exponential distribution with its probability as the rate; the earliest wins

The thresholds of top_k and top_p are found by bisection over the bits of the logits, so they are exact. The winner is
the largest `scaled - log(time)`, one pass over the vocabulary; the random numbers are those of `sample.random`. Each
chunk scales its distances from its largest logit, so that logits of 1e9 do not swallow the random numbers.

Whatever the logits are, the token is one of the vocabulary: infinite ones are the largest numbers, and a row of which
nothing can be sampled, or that is no numbers, gives token 0.
"""

import torch
import triton
import triton.language as tl

from kvern.kernels.launch import overlaps, wait_for_previous

GREEDY_BELOW = tl.constexpr(1e-5)
LARGEST = tl.constexpr(3.4028234663852886e38)
CHUNK = 4096
"""Entries of the vocabulary that one program of the draw takes."""


@triton.jit
def _mix(value):
    """The finalizer of SplitMix64, on uint64."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def _uniform(seed, position, token):
    """The numbers of `kvern.sample.random.uniform`: int64 seed and position, int32 tokens."""
    golden = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    key = _mix(_mix(seed.to(tl.uint64, bitcast=True) + golden) + position.to(tl.uint64, bitcast=True) * golden)
    value = token.to(tl.uint32) * tl.full([], 0x9E3779B1, tl.uint32)
    value ^= (key & 0xFFFFFFFF).to(tl.uint32)
    value ^= value >> 16
    value *= tl.full([], 0x7FEB352D, tl.uint32)
    value ^= value >> 15
    value ^= (key >> 32).to(tl.uint32)
    value *= tl.full([], 0x846CA68B, tl.uint32)
    value ^= value >> 16
    number = ((value & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10
    return tl.minimum(number, 1.0 - 5.960464477539063e-08)


@triton.jit
def _score(distances, temperature, seed, position, token):
    """What the winner has most of: the distance from a logit if greedy, else `scaled - log(time)`."""
    if temperature < GREEDY_BELOW:
        return distances
    number = _uniform(seed, position, token)
    rest = 1.0 - number
    # -log1p(-number) (Kahan): exact also where 1 - number rounds to 1
    time = tl.where(rest == 1.0, number, -tl.log(rest) * (number / tl.where(rest == 1.0, 1.0, 1.0 - rest)))
    return distances / temperature - tl.log(time)


@triton.jit(do_not_specialize=["chunks"], do_not_specialize_on_alignment=["slots", "positions"])
def _sample_chunk_kernel(
    logits: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    temperatures: tl.tensor,
    seeds: tl.tensor,
    thresholds: tl.tensor,
    largests: tl.tensor,
    best_scores: tl.tensor,
    best_tokens: tl.tensor,
    vocabulary,
    chunks,
    FILTERED: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + row * vocabulary + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    values = tl.where(values == values, tl.minimum(values, LARGEST), float("-inf"))
    if FILTERED:
        values = tl.where(values >= tl.minimum(tl.load(thresholds + row), LARGEST), values, float("-inf"))
    largest = tl.maximum(tl.max(values, axis=0), -LARGEST)
    scores = _score(
        values - largest, tl.load(temperatures + slot), tl.load(seeds + slot), tl.load(positions + row), token
    )
    best = tl.max(scores, axis=0)
    tl.store(largests + row * chunks + chunk, largest)
    tl.store(best_scores + row * chunks + chunk, best)
    tl.store(best_tokens + row * chunks + chunk, tl.min(tl.where(scores == best, token, vocabulary), axis=0))


@triton.jit
def _sample_best_kernel(
    slots: tl.tensor,
    temperatures: tl.tensor,
    largests: tl.tensor,
    best_scores: tl.tensor,
    best_tokens: tl.tensor,
    out: tl.tensor,
    vocabulary,
    chunks,
    CHUNKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    inside = chunk < chunks
    scores = tl.load(best_scores + row * chunks + chunk, mask=inside, other=float("-inf"))
    largests_of_chunks = tl.load(largests + row * chunks + chunk, mask=inside, other=-LARGEST)
    distances = largests_of_chunks - tl.max(largests_of_chunks, axis=0)
    temperature = tl.load(temperatures + tl.load(slots + row).to(tl.int64))
    scores += tl.where(temperature < GREEDY_BELOW, distances, distances / temperature)
    tokens = tl.load(best_tokens + row * chunks + chunk, mask=inside, other=vocabulary)
    best = tl.max(scores, axis=0)
    tl.store(out + row, tl.min(tl.where(scores == best, tokens, vocabulary), axis=0).to(tl.int64))


@triton.jit
def _ordered(values):
    """Integers in the order of float32 values."""
    bits = values.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _mass(logits, row, vocabulary, key, largest, temperature, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """How many logits have at least this key, or the sum of exp(scaled - largest) over them."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        values = tl.load(logits + row * vocabulary + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
        kept = (token < vocabulary) & (_ordered(values) >= key)
        if COUNT:
            total += tl.where(kept, 1.0, 0.0)
        else:
            total += tl.where(kept, tl.exp((values - largest) / temperature), 0.0)
    return tl.sum(total, axis=0)


@triton.jit
def _bisect(
    logits, row, vocabulary, low, high, wanted, largest, temperature, STEP, COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    """The largest key of a multiple of STEP at which the mass is at least `wanted`; at `low` it is."""
    while low < high:
        middle = low + ((high - low) // STEP + 1) // 2 * STEP
        if _mass(logits, row, vocabulary, middle, largest, temperature, COUNT, BLOCK) >= wanted:
            low = middle
        else:
            high = middle - STEP
    return low


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _sample_threshold_kernel(
    logits: tl.tensor,
    slots: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    min_ps: tl.tensor,
    thresholds: tl.tensor,
    vocabulary,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    temperature = tl.load(temperatures + slot)
    top_k = tl.load(top_ks + slot)
    top_p = tl.load(top_ps + slot)
    min_p = tl.load(min_ps + slot)
    threshold = float("-inf")
    if temperature >= GREEDY_BELOW:
        largests = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in tl.range(0, vocabulary, BLOCK):
            token = start + tl.arange(0, BLOCK)
            values = tl.load(logits + row * vocabulary + token, mask=token < vocabulary, other=float("-inf"))
            largests = tl.maximum(largests, values.to(tl.float32))
        largest = tl.max(largests, axis=0)
        high = _ordered(largest) & -STEP
        lowest = _ordered(tl.full([], float("-inf"), tl.float32))
        low = lowest & -STEP
        if (top_k > 0) & (top_k < vocabulary):
            low = _bisect(
                logits, row, vocabulary, low, high, top_k.to(tl.float32), largest, temperature, STEP, True, BLOCK
            )
        if top_p < 1.0:
            wanted = top_p * _mass(logits, row, vocabulary, low, largest, temperature, False, BLOCK)
            low = _bisect(logits, row, vocabulary, low, high, wanted, largest, temperature, STEP, False, BLOCK)
        bits = tl.maximum(low, lowest).to(tl.int32)
        threshold = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        if min_p > 0.0:
            threshold = tl.maximum(threshold, largest + temperature * tl.log(min_p))
    tl.store(thresholds + row, threshold)


def _thresholds(
    logits: torch.Tensor,
    slots: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """The smallest logit of each row that the filters leave, [N] float32."""
    rows, vocabulary = logits.shape
    overlap = overlaps(logits.device)
    thresholds = torch.empty(rows, dtype=torch.float32, device=logits.device)
    # a 16-bit number has 16 zeros behind it as a float32 (float16: 13)
    step = {torch.bfloat16: 1 << 16, torch.float16: 1 << 13}.get(logits.dtype, 1)
    _sample_threshold_kernel[(rows,)](
        logits,
        slots,
        temperature,
        top_k,
        top_p,
        min_p,
        thresholds,
        vocabulary,
        step,
        min(8192, triton.next_power_of_2(vocabulary)),
        overlap,
        num_warps=16,
        launch_pdl=overlap,
    )
    return thresholds


def sample(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    *,
    filtered: bool,
) -> torch.Tensor:
    """Choose one token for each row; a row's token does not depend on the other rows.

    logits     [N, vocabulary], contiguous, any float dtype
    slots      [N] integers: the row of temperature, top_p, min_p float32, top_k (0: all) and seeds int64, each [slots]
    positions  [N] int64: the position of the token that is chosen
    filtered   whether any row uses top_k, top_p or min_p
    returns    [N] int64

    Reads the logits once; with filters up to 17 times for each of top_k and top_p if they are 16-bit numbers (33 times
    float32), mostly from the L2 cache.
    """
    rows, vocabulary = logits.shape
    chunks = triton.cdiv(vocabulary, CHUNK)
    overlap = overlaps(logits.device)
    thresholds = largests = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
    scores = torch.empty_like(largests)
    tokens = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if filtered:
        thresholds = _thresholds(logits, slots, temperature, top_k, top_p, min_p)
    _sample_chunk_kernel[(rows, chunks)](
        logits,
        slots,
        positions,
        temperature,
        seeds,
        thresholds,
        largests,
        scores,
        tokens,
        vocabulary,
        chunks,
        filtered,
        CHUNK,
        overlap,
        num_warps=4,
        launch_pdl=overlap,
    )
    _sample_best_kernel[(rows,)](
        slots,
        temperature,
        largests,
        scores,
        tokens,
        out,
        vocabulary,
        chunks,
        triton.next_power_of_2(chunks),
        overlap,
        num_warps=1,
        launch_pdl=overlap,
    )
    return out
