"""Which drafts are accepted: those in whose places the same tokens are sampled, as far as all before them are.

    known token, draft, draft, draft  --one step-->  sampled behind each of them:  a, b, c, d
                   a      x      c                   kept: a and b, as b was sampled behind what is right

On a GPU the host does not wait for it: rows count on the device how many of their tokens are computed.
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
    """What the host reads of drafts that were written to A rows, once the device's work so far is done.

    counts  of each of these slots, in order
    tokens  [A, most] int32, on the host
    """

    counts: dict[int, int]
    tokens: torch.Tensor

    def by_slot(self) -> dict[int, list[int]]:
        """As in ModelRunnerOutput."""
        rows = zip(self.counts.items(), self.tokens.tolist(), strict=True)
        return {slot: row[:count] for (slot, count), row in rows}


def guessed_drafts(rows: BatchRows, scheduled: Sequence[ScheduledTokens]) -> GuessedDrafts | None:
    """What rows go on with behind their newest tokens, as far as a step asks for drafts; None: it asks for none."""
    counts = {item.slot: item.guesses for item in scheduled if item.sampled and item.guesses}
    if not counts:
        return None
    most = max(counts.values())
    sent = upload([*counts, *range(1, most + 1)], torch.int64, rows.device)
    slots, ahead = sent[: len(counts), None], sent[len(counts) :]
    places = (rows.num_computed_tokens[slots] + ahead).clamp(max=rows.tokens.shape[1] - 1)
    return GuessedDrafts(counts, fetch(rows.tokens[slots, places]))


def read_drafts(rows: BatchRows, scheduled: Sequence[ScheduledTokens]) -> Callable[[], list[int]]:
    """The drafts in the places of the tokens that a step samples, [S], as rows have them now; a call waits for them.

    Where no draft stands, any number.
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
    """How many of the tokens that were sampled for each of R requests are kept, [R] int64; None: all.

    starts            [R] int32, where each begins
    slots, positions  [S] integers, row and position of each token that is sampled
    sampled           [S] int64, the tokens, not yet written to the rows
    unknown           those of the S in whose places drafts are not accepted, whatever was sampled

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
    if unknown:
        agree[upload(unknown, torch.int64, rows.device)] = 0
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
