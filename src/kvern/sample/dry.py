"""DRY ("don't repeat yourself"): a penalty for tokens that would continue a repetition; it grows with its length.

    The cat sat on the mat. And again the cat sat on the | mat
        -----------------                 --------------   the next token of a repetition of 5 tokens

The end of the text is compared with the text before every earlier position, for all rows at once. Two runs of tokens
are equal if their hashes are, and a binary search over hashes finds the length of each repetition. A step takes
O(n log n) for n tokens and keeps no state between steps.

A breaker ends a repetition: only tokens after the last breaker count. Breakers of several tokens are found by hashes
too, at one comparison per token, whatever their length. DRY was proposed by p-e-w in 2024 for text-generation-webui;
names and meanings are those of llama.cpp.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from kvern.device.rows import BatchRows
from kvern.device.transfer import upload
from kvern.request.request import Breakers
from kvern.request.sampling_params import SamplingParams
from kvern.sample.random import mixed

MOST_PENALTY = 1e9
"""Limit of a penalty: it stays finite, and a penalized token is still better than a banned one."""
MOST_POWER = 1e30
"""Limit of a power of the base: finite after the largest multiplier, and above zero after the smallest."""
MOST_PLACES = 1 << 20
"""Limit of rows times tokens in one computation, at about 100 bytes each."""
FACTOR = 0x27BB2EE687B0B0FD
"""An odd number whose powers are the weights of tokens in a hash (a 64-bit multiplier of L'Ecuyer 1999)."""
INVERSE = (pow(FACTOR, -1, 1 << 64) + (1 << 63)) % (1 << 64) - (1 << 63)
"""The inverse of FACTOR modulo 2^64, as a signed number."""


def penalize_repetitions(
    logits: torch.Tensor,
    rows: BatchRows,
    members: Sequence[int],
    slots: Sequence[int],
    positions: Sequence[int],
    exact: torch.Tensor | None,
) -> None:
    """Applies the penalties of the rows `members` to `logits` [N, vocabulary] in place.

    slots, positions   rows of the batch and positions to be sampled, for all N
    exact              [N] int64 positions on the device, if those on the host are only upper bounds
    """
    groups: dict[Breakers | None, list[tuple[int, int]]] = {}
    for row in members:
        request, position = rows.request(slots[row]), positions[row]
        last = request.params.dry_penalty_last_n
        groups.setdefault(request.spec.breakers, []).append((min(position, last) if last > 0 else position, row))
    for breakers, group in groups.items():
        for width, part in _parts(sorted(group)):
            sent = [*part, *(slots[row] for row in part), *(positions[row] for row in part)]
            index, slot, ends = upload(sent, torch.int64, logits.device).view(3, -1)
            ends = ends if exact is None else exact[index]
            params = [rows.request(slots[row]).params for row in part]
            recent = _recent(rows.tokens, slot, ends, width, [item.dry_penalty_last_n for item in params])
            runs = Runs.of(recent)
            lengths = _lengths(recent, runs, _since_break(recent, runs, breakers))
            logits[index] -= _penalties(recent, lengths, params, logits)


def _parts(group: Sequence[tuple[int, int]]) -> Iterator[tuple[int, list[int]]]:
    """Rows that are looked at together, and the most tokens of each; `group` has both for each row, ascending."""
    part: list[int] = []
    widest = 1
    for width, row in group:
        if part and (len(part) + 1) * width > MOST_PLACES:
            yield widest, part
            part = []
        part.append(row)
        widest = max(width, 1)
    yield widest, part


def _recent(
    tokens: torch.Tensor, slots: torch.Tensor, ends: torch.Tensor, width: int, last: Sequence[int]
) -> torch.Tensor:
    """The last tokens of N rows, the newest first, [N, width] int64; -1 where a row has no more."""
    back = torch.arange(width, device=tokens.device)[None]
    most = upload([width if count < 0 else min(count, width) for count in last], torch.int64, tokens.device)
    inside = back < torch.minimum(ends, most)[:, None]
    return tokens[slots[:, None], (ends[:, None] - 1 - back).clamp_(min=0)].long().masked_fill_(~inside, -1)


class Runs(NamedTuple):
    """Hashes of the tokens before each position of N rows, [N, width + 1], and powers of FACTOR, [width + 1]."""

    hashes: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def of(cls, tokens: torch.Tensor) -> "Runs":
        """Computes them for tokens [N, width]."""
        count, width = tokens.shape
        weights = _powers(FACTOR, width + 1, tokens.device)
        hashes = torch.zeros(count, width + 1, dtype=torch.int64, device=tokens.device)
        hashes[:, 1:] = (mixed(tokens) * weights[:-1]).cumsum(1)
        return cls(hashes, weights)


def _powers(base: int, count: int, device: torch.device) -> torch.Tensor:
    """The first powers of an odd number, modulo 2^64."""
    powers = torch.full((count,), base, dtype=torch.int64, device=device)
    powers[:1].fill_(1)  # a number written to one place would wait for a GPU
    return powers.cumprod(0)


def _since_break(recent: torch.Tensor, runs: Runs, breakers: Breakers | None) -> torch.Tensor:
    """The number of tokens after the last breaker of each row, [N, 1]."""
    breaks = recent < 0
    if breakers is not None:
        breaks |= _table(breakers.tokens, recent.device)[recent.clamp(min=0)]
        shifts = _powers(INVERSE, recent.shape[1] + 1, recent.device)
        for length, wanted in _sequence_hashes(breakers.sequences, recent.device):
            if length <= recent.shape[1]:
                places = recent.shape[1] - length + 1
                found = (runs.hashes[:, length:] - runs.hashes[:, :places]) * shifts[:places]
                for one in wanted.unbind():
                    breaks[:, :places] |= found == one
    return (breaks.cumsum(1) == 0).sum(1, keepdim=True)


@functools.lru_cache(16)
def _sequence_hashes(sequences: Sequence[tuple[int, ...]], device: torch.device) -> list[tuple[int, torch.Tensor]]:
    """Hashes of sequences, grouped by length, comparable with runs that begin at position 0."""
    by_length: dict[int, list[tuple[int, ...]]] = {}
    for sequence in sequences:
        by_length.setdefault(len(sequence), []).append(sequence[::-1])
    found = []
    for length, same in by_length.items():
        tokens = upload([token for sequence in same for token in sequence], torch.int64, device).view(-1, length)
        found.append((length, Runs.of(tokens).hashes[:, -1]))
    return found


@functools.lru_cache(16)
def _table(tokens: bytes, device: torch.device) -> torch.Tensor:
    """True for each token of the vocabulary that is a breaker, [vocabulary] bool."""
    bits = np.unpackbits(np.frombuffer(tokens, dtype=np.uint8), bitorder="little")
    return upload(bits.tolist(), torch.bool, device)


def _lengths(recent: torch.Tensor, runs: Runs, most: torch.Tensor) -> torch.Tensor:
    """The length of the repetition of the row's first tokens at each position, [N, width], at most `most` [N, 1]."""
    (hashes, weights), width = runs, recent.shape[1]
    place = torch.arange(width, device=recent.device)[None]
    most = torch.minimum(most, (recent >= 0).sum(1, keepdim=True) - place).clamp_(min=0)
    lengths = torch.zeros_like(recent)
    longest = width if recent.is_cuda else int(most[:, 1:].max()) if width > 1 else 0  # a GPU is not waited for
    for bit in reversed(range(longest.bit_length())):
        longer = lengths + (1 << bit)
        end, other_end = (place + longer).clamp_(max=width), longer.clamp(max=width)
        same = hashes.gather(1, end) - hashes[:, :-1] == hashes.gather(1, other_end) * weights[:-1]
        lengths = torch.where(same & (longer <= most), longer, lengths)
    return lengths


def _penalties(
    recent: torch.Tensor, lengths: torch.Tensor, params: Sequence[SamplingParams], logits: torch.Tensor
) -> torch.Tensor:
    """The penalty of each token, [N, vocabulary]."""
    numbers = [number for item in params for number in (item.dry_multiplier, item.dry_base, item.dry_allowed_length)]
    multiplier, base, allowed = upload(numbers, torch.float32, logits.device).view(-1, 3, 1).unbind(1)
    beyond = lengths[:, 1:] - allowed
    powers = (base ** beyond.clamp(min=0)).clamp_(max=MOST_POWER)
    penalties = (multiplier * powers).clamp_(max=MOST_PENALTY).masked_fill_(beyond < 0, 0.0)
    followers = recent[:, :-1].clamp(min=0)  # rows are reversed: the next token is before its position
    result = torch.zeros(len(params), logits.shape[-1], device=logits.device)
    return result.scatter_reduce_(1, followers, penalties, "amax").to(logits.dtype)
