"""From logits to tokens: temperature, filters and the draw, without sorting the vocabulary.

    scaled = logits / temperature, of those that `filters` leave
    each token left draws a time from the exponential distribution with its probability as the rate; the earliest wins

The winner is the largest `scaled - log(time)`, one pass over the vocabulary; the random numbers are those of
`sample.random`. Each chunk scales its distances from its largest logit, so that logits of 1e9 do not swallow the random
numbers.

Ranks that have a part of the vocabulary's logits each need not show each other these: what chunks have found comes
together, a few numbers for each, and all choose among that.

Whatever the logits are, the token is one of the vocabulary: infinite ones are the largest numbers, and a row of which
nothing can be sampled, or that is no numbers, gives token 0.
"""

from typing import NamedTuple, Protocol

import torch
import triton
import triton.language as tl

from kvern.kernels.digits import LARGEST, read_scores
from kvern.kernels.filters import GREEDY_BELOW, FilteredRows, bounds
from kvern.kernels.launch import Launcher, has_ptx, wait_for_previous

CHUNK = 4096
"""Entries of the vocabulary that one program of the draw takes."""
NO_TOKEN = tl.constexpr(2**31 - 1)
LOG2 = tl.constexpr("lg2.approx.ftz.f32 $0, $1;")


class Gathering(Protocol):
    """Ranks, of which each has a part of the vocabulary."""

    size: int

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """`x [N, width]` of all ranks, one behind the other, on each of them: `[size * N, width]`."""
        ...


class VocabularyPart(NamedTuple):
    """The part of the vocabulary whose logits are here: `tokens` from the token `first` on; further columns are
    padding."""

    first: int
    tokens: int
    ranks: Gathering


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
def _log(x):
    """Returns the logarithm of normal numbers to 22 bits: Triton's own takes twelve times as many instructions."""
    if has_ptx():
        exponent = tl.inline_asm_elementwise(LOG2, "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        exponent = tl.log2(x)
    return exponent * 0.6931471805599453


@triton.jit
def _score(distances, temperature, seed, position, token):
    """Returns the score that the winner has most of: the distance from a logit if greedy, else `scaled - log(time)`."""
    if temperature < GREEDY_BELOW:
        return distances
    number = _uniform(seed, position, token)
    # -log1p(-number): to seven digits of what is small, which the winners have
    series = number * (1.0 + number * (0.5 + number * (0.33333334 + number * 0.25)))
    time = tl.where(number < 0.03125, series, -_log(1.0 - number))
    return distances * (1.0 / temperature) - _log(time)


@Launcher
@triton.jit(
    do_not_specialize=["first", "vocabulary", "columns", "chunks"],
    do_not_specialize_on_alignment=["slots", "positions", "changes", "temperatures", "seeds"],
)
def _sample_chunk_kernel(
    logits: tl.tensor,
    scores: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    changes: tl.tensor,
    temperatures: tl.tensor,
    seeds: tl.tensor,
    bounds: tl.tensor,
    found: tl.tensor,
    found_tokens: tl.tensor,
    first,
    vocabulary,
    columns,
    chunks,
    OPTIONS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    if OPTIONS:
        values = read_scores(logits, scores, tl.load(changes + slot) != 0, row, token, vocabulary)
        values = tl.where(values >= tl.load(bounds + row * 4), values, float("-inf"))
        distances = tl.abs((values - tl.load(bounds + row * 4 + 1)) - tl.load(bounds + row * 4 + 2))
        values = tl.where(distances <= tl.load(bounds + row * 4 + 3), values, float("-inf"))
    else:
        padding = row * (columns - vocabulary)  # of the rows before
        values = read_scores(logits + padding, scores, False, row, token, vocabulary)
    largest = tl.maximum(tl.max(values, axis=0), -LARGEST)
    token += first
    drawn = _score(
        values - largest, tl.load(temperatures + slot), tl.load(seeds + slot), tl.load(positions + row), token
    )
    best = tl.max(drawn, axis=0)
    place = row * 3 * chunks + chunk
    tl.store(found + place, largest)
    tl.store(found + place + chunks, best)
    tl.store(found_tokens + place + 2 * chunks, tl.min(tl.where(drawn == best, token, NO_TOKEN), axis=0))


@Launcher
@triton.jit(do_not_specialize=["parts", "chunks"], do_not_specialize_on_alignment=["slots", "temperatures"])
def _sample_best_kernel(
    slots: tl.tensor,
    temperatures: tl.tensor,
    found: tl.tensor,
    found_tokens: tl.tensor,
    out: tl.tensor,
    parts,
    chunks,
    CHUNKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    inside = chunk < parts * chunks
    place = (chunk // chunks * tl.num_programs(0) + row) * 3 * chunks + chunk % chunks
    largests = tl.load(found + place, mask=inside, other=-LARGEST)
    scores = tl.load(found + place + chunks, mask=inside, other=float("-inf"))
    distances = largests - tl.max(largests, axis=0)
    temperature = tl.load(temperatures + tl.load(slots + row).to(tl.int64))
    scores += tl.where(temperature < GREEDY_BELOW, distances, distances / temperature)
    tokens = tl.load(found_tokens + place + 2 * chunks, mask=inside, other=NO_TOKEN)
    best = tl.max(scores, axis=0)
    tl.store(out + row, tl.min(tl.where(scores == best, tokens, NO_TOKEN), axis=0).to(tl.int64))


class SampledRows(FilteredRows, Protocol):
    """A row for each slot: seeds [slots] int64 as well."""

    seeds: torch.Tensor


def sample(
    logits: torch.Tensor,
    scores: torch.Tensor | None,
    slots: torch.Tensor,
    positions: torch.Tensor,
    rows: SampledRows,
    part: VocabularyPart | None = None,
) -> torch.Tensor:
    """Choose one token for each row; a row's token does not depend on the other rows.

    logits     [N, vocabulary], contiguous, any float dtype; with a `part` of the vocabulary [N, its columns]
    scores     [N, vocabulary] float32, which count instead in rows that change their logits; None: no row does, and
               none has a filter, as with a `part`
    slots      [N] integers: their rows
    positions  [N] int64: the position of the token that is chosen
    returns    [N] int64
    """
    if part is None:
        return choose(find(logits, scores, slots, positions, rows), 1, slots, rows)
    assert scores is None, "filters look at the whole vocabulary"
    found = find(logits, None, slots, positions, rows, part.first, part.tokens)
    return choose(part.ranks.gather(found), part.ranks.size, slots, rows)


def find(
    logits: torch.Tensor,
    scores: torch.Tensor | None,
    slots: torch.Tensor,
    positions: torch.Tensor,
    rows: SampledRows,
    first: int = 0,
    known: int | None = None,
) -> torch.Tensor:
    """Samples like `sample`, but returns `[N, 3 * chunks]` int32: each chunk's largest logit, its best score, and its
    token.

    `first`: the token of the first column; `known`: how many columns are tokens, the others pad; None: all.
    """
    count, columns = logits.shape
    chunks = triton.cdiv(columns, CHUNK)
    found = torch.empty(count, 3 * chunks, dtype=torch.int32, device=logits.device)
    floats = found.view(torch.float32)
    _sample_chunk_kernel[(count, chunks)](
        logits,
        logits if scores is None else scores,
        slots,
        positions,
        rows.changes,
        rows.temperature,
        rows.seeds,
        floats if scores is None else bounds(logits, scores, slots, rows),
        floats,
        found,
        first,
        columns if known is None else known,
        columns,
        chunks,
        scores is not None,
        CHUNK,
        num_warps=4,
    )
    return found


def choose(found: torch.Tensor, parts: int, slots: torch.Tensor, rows: SampledRows) -> torch.Tensor:
    """The tokens [N] int64 that win among what `find` found of so many parts, `[parts * N, 3 * chunks]`."""
    count, chunks = len(slots), found.shape[1] // 3
    out = torch.empty(count, dtype=torch.int64, device=found.device)
    _sample_best_kernel[(count,)](
        slots,
        rows.temperature,
        found.view(torch.float32),
        found,
        out,
        parts,
        chunks,
        triton.next_power_of_2(parts * chunks),
        num_warps=1,
    )
    return out
