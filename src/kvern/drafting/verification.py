"""Verification of drafts: a draft is accepted if it equals the token sampled at its position and so do all before it.

    known token, draft, draft, draft  --one step-->  sampled after each of them:  a, b, c, d
                   a      x      c                   kept: a and b, because b was sampled after correct tokens

On a GPU the host does not wait for the result: rows count their computed tokens on the device.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from kvern.device.input_batch import sampled_tokens
from kvern.device.rows import BatchRows
from kvern.device.transfer import fetch, reader, upload
from kvern.request.step import ScheduledTokens


class GuessedDrafts(NamedTuple):
    """New drafts of A rows, copied to the host when the device has finished its work so far.

    counts  number of drafts for each slot, in order
    tokens  [A, most] int32, on the host
    """

    counts: dict[int, int]
    tokens: torch.Tensor

    def by_slot(self) -> dict[int, list[int]]:
        """The drafts of each slot, as in `ModelRunnerOutput`."""
        rows = zip(self.counts.items(), self.tokens.tolist(), strict=True)
        return {slot: row[:count] for (slot, count), row in rows}


def guessed_drafts(rows: BatchRows, scheduled: Sequence[ScheduledTokens]) -> GuessedDrafts | None:
    """The drafts that follow the newest tokens of the rows, if the step asks for any; else None."""
    counts = {item.slot: item.guesses for item in scheduled if item.sampled and item.guesses}
    if not counts:
        return None
    most = max(counts.values())
    sent = upload([*counts, *range(1, most + 1)], torch.int64, rows.device)
    slots, ahead = sent[: len(counts), None], sent[len(counts) :]
    places = (rows.num_computed_tokens[slots] + ahead).clamp(max=rows.tokens.shape[1] - 1)
    return GuessedDrafts(counts, fetch(rows.tokens[slots, places]))


def read_drafts(rows: BatchRows, scheduled: Sequence[ScheduledTokens]) -> Callable[[], list[int]]:
    """A function that waits for and returns [S] drafts: those at the positions that a step samples.

    The number is arbitrary where a position has no draft.
    """
    runs = [
        (place, item.count - behind) for place, item in enumerate(scheduled) for behind in range(item.sampled)[::-1]
    ]
    sent = [*sampled_tokens(scheduled).slots, *(place for place, _ in runs), *(offset for _, offset in runs)]
    slots, requests, offsets = upload(sent, torch.int64, rows.device).view(3, -1)
    return reader(rows.tokens[slots, rows.starts(scheduled)[requests] + offsets])


def verify(
    rows: BatchRows,
    scheduled: Sequence[ScheduledTokens],
    starts: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    sampled: torch.Tensor,
    unknown: Sequence[int] = (),
) -> torch.Tensor | None:
    """The number of sampled tokens that are kept for each of R requests, [R] int64; None: all are kept.

    starts            [R] int32, first position of each request
    slots, positions  [S] integers, row and position of each sampled token
    sampled           [S] int64, the sampled tokens, not yet written to the rows
    unknown           indices into the S tokens at which drafts are always rejected

    This also advances the number of computed tokens of each row.
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
    if unknown:
        agree[upload(unknown, torch.int64, rows.device)] = 0
    kept = torch.minimum(agree[places_of].cumprod(1).sum(1) + 1, lengths)
    rows.advance(scheduled, starts, lengths - kept)
    return kept


def kept_of(
    scheduled: Sequence[ScheduledTokens], drafts: Sequence[Sequence[int]], sampled: Sequence[int]
) -> list[list[int]]:
    """The kept tokens of each request, for results that are on the host.

    drafts   of each request, those after its first scheduled token
    sampled  tokens sampled after each token of the step
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
