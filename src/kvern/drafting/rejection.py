"""Drafts that were drawn from known probabilities, accepted more often than by chance alone.

    draft, drawn from the drafter's q  --with the chance p(draft) / q(draft), or 1-->  it is the token
                                       --else-->  the token is drawn from max(0, p - q), where the draft has none

That is speculative sampling (Leviathan et al. 2023, Chen et al. 2023): the token has the model's probabilities p, and
among all ways to have them the draft is accepted most often. Which token it is depends on the draft; it is the same
again for the same seed, position and draft. A draft that nobody drew is a q of one token: it is then accepted with its
probability, and the others are drawn in theirs if not, which is what `sampler.sample` does without being told.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from kvern.device.rows import BatchRows
from kvern.device.transfer import upload
from kvern.request.step import ScheduledTokens
from kvern.sample.random import mixed, uniform
from kvern.sample.sampler import draw, probabilities


@dataclass(frozen=True)
class DrawnDrafts:
    """Drafts of a step that were drawn from `probabilities` [D, vocabulary] float32, which sum to 1.

    `places` [D]: of the S tokens that the step samples, those in whose places they stand.
    """

    places: Sequence[int]
    probabilities: torch.Tensor


class Drawn:
    """What drafts that stand in rows were drawn from, kept by who draws them until they are verified."""

    def __init__(self) -> None:
        self._drawn: list[tuple[dict[int, int], torch.Tensor]] = []
        """By how far ahead they are: the row of each slot, and probabilities."""

    def clear(self) -> None:
        """Others are drawn."""
        self._drawn.clear()

    def forget(self, slots: Iterable[int]) -> None:
        """Other drafts stand in these rows, or none."""
        for slot in slots:
            for rows, _ in self._drawn:
                rows.pop(slot, None)

    def draw(
        self, logits: torch.Tensor, rows: BatchRows, slots: Sequence[int], positions: torch.Tensor
    ) -> torch.Tensor:
        """The next draft of each of these rows, [N] int64, as `sampler.sample` draws it; arguments as there."""
        theirs = probabilities(logits, rows, slots, positions)
        self.keep(slots, theirs)
        seeds = rows.seeds[upload(slots, torch.int64, logits.device)]
        return draw(theirs, uniform(seeds, positions, torch.arange(logits.shape[-1], device=logits.device)[None]))

    def keep(self, slots: Sequence[int], probabilities: torch.Tensor) -> None:
        """Of the next draft of each of these rows of the batch: [N, vocabulary] float32, which sum to 1."""
        self._drawn.append(({slot: row for row, slot in enumerate(slots)}, probabilities))

    def of(self, scheduled: Sequence[ScheduledTokens]) -> DrawnDrafts | None:
        """Of the drafts that a step verifies; None: of none of them."""
        firsts = accumulate((item.sampled for item in scheduled), initial=0)
        runs = [(first, item) for first, item in zip(firsts, scheduled, strict=False) if item.sampled > 1]
        places, found = [], []
        for ahead, (rows, drawn) in enumerate(self._drawn):
            here = [(first, rows[item.slot]) for first, item in runs if ahead < item.sampled - 1 and item.slot in rows]
            if here:
                places += [first + ahead for first, _ in here]
                found.append(drawn.index_select(0, upload([row for _, row in here], torch.int64, drawn.device)))
        return DrawnDrafts(places, torch.cat(found)) if found else None


def accept(
    chosen: torch.Tensor,
    logits: torch.Tensor,
    rows: BatchRows,
    slots: Sequence[int],
    positions: torch.Tensor,
    drawn: DrawnDrafts,
) -> None:
    """Replace the tokens `chosen` [S] int64 where drafts were drawn: by the draft, or by another token.

    logits     [S, vocabulary], after constraints and masks
    slots      S rows of the batch
    positions  [S] int64, of the tokens that are chosen; the rows have the drafts there
    """
    index = upload(drawn.places, torch.int64, logits.device)
    slot = upload([slots[place] for place in drawn.places], torch.int64, logits.device)
    position, theirs = positions[index], drawn.probabilities
    own = probabilities(logits[index].float(), rows, [slots[place] for place in drawn.places], position)
    drafts = rows.tokens[slot, position].long()
    chosen[index] = verdicts(own, theirs, drafts, rows.seeds[slot], position)


def verdicts(
    own: torch.Tensor, theirs: torch.Tensor, drafts: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """The tokens [D] int64: the `drafts` [D] where they are accepted, else others.

    own, theirs       [D, vocabulary] float32: probabilities of the model and of the drafter
    seeds, positions  [D] int64: what random numbers depend on, others than those by which drafts are drawn
    """
    vocabulary = own.shape[-1]
    numbers = uniform(mixed(seeds), positions, torch.arange(vocabulary + 1, device=own.device)[None])
    place = drafts[:, None]
    accepted = numbers[:, vocabulary] * theirs.gather(1, place)[:, 0] < own.gather(1, place)[:, 0]
    rest = (own - theirs).clamp_(min=0)
    rest = torch.where(rest.any(-1, keepdim=True), rest, own)  # rounding can leave nothing
    return torch.where(accepted, drafts, draw(rest, numbers[:, :vocabulary]))
