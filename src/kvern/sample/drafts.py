"""Which drafts are accepted: those in whose places the same tokens are sampled, as far as all before them are.

    known token, draft, draft, draft  --one step-->  sampled behind each of them:  a, b, c, d
                   a      x      c                   kept: a and b, as b was sampled behind what is right

On a GPU the host does not wait for it: rows count on the device how many of their tokens are computed.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch

from kvern.device.rows import BatchRows
from kvern.device.transfer import upload
from kvern.step import ScheduledTokens


def verify(
    rows: BatchRows,
    scheduled: Sequence[ScheduledTokens],
    starts: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    sampled: torch.Tensor,
) -> torch.Tensor | None:
    """How many of the tokens that were sampled for each of R requests are kept, [R] int64; None: all.

    starts            [R] int32, where each begins
    slots, positions  [S] integers, row and position of each token that is sampled
    sampled           [S] int64, the tokens, not yet written to the rows

    The rows remember what is computed of them.
    """
    runs = [item.sampled for item in scheduled]
    longest = max(runs)
    if longest <= 1:
        rows.advance(scheduled, starts)
        return None
    places = [
        first + place if place < run - 1 else len(sampled)
        for first, run in zip(accumulate(runs, initial=0), runs, strict=False)
        for place in range(longest - 1)
    ]
    sent = upload([*runs, *places], torch.int64, rows.device)
    lengths, places_of = sent[: len(runs)], sent[len(runs) :].view(len(runs), -1)
    agree = torch.zeros(len(sampled) + 1, dtype=torch.int64, device=rows.device)
    agree[:-1] = rows.tokens[slots.long(), positions] == sampled
    kept = torch.minimum(agree[places_of].cumprod(1).sum(1) + 1, lengths)
    rows.advance(scheduled, starts, lengths - kept)
    return kept


def kept_of(
    scheduled: Sequence[ScheduledTokens], drafts: Sequence[Sequence[int]], sampled: Sequence[int]
) -> list[list[int]]:
    """For each request the tokens that are kept of what was `sampled` behind all tokens of a step, which the host has.

    drafts  of each request, those that stood behind its first token
    """
    kept, first = [], 0
    for item, guesses in zip(scheduled, drafts, strict=True):
        run = sampled[first : first + item.sampled]
        right = 0
        for draft, token in zip(guesses, run, strict=False):
            if draft != token:
                break
            right += 1
        kept.append(list(run[: right + 1]))
        first += item.sampled
    return kept
