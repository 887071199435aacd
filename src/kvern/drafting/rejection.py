"""Speculative sampling: acceptance of drafts that were sampled from known probabilities.

    draft, sampled from the drafter's q  --with probability min(1, p(draft) / q(draft))-->  it is the token
                                         --otherwise-->  the token is sampled from max(0, p - q)

The token then follows the model's probabilities p, and the draft is accepted as often as that allows (Leviathan et al.
2023, Chen et al. 2023). The token depends on the draft; it is the same for the same seed, position and draft. Drafts
without probabilities, such as n-grams, need none of this: `sampler.sample` already accepts them with probability p.
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
    """Drafts of a step that were sampled from `probabilities` [D, vocabulary] float32, which sum to 1.

    `places` [D]: indices of these drafts among the S tokens that the step samples.
    """

    places: Sequence[int]
    probabilities: torch.Tensor

    def accept(
        self,
        chosen: torch.Tensor,
        logits: torch.Tensor,
        rows: BatchRows,
        slots: Sequence[int],
        positions: torch.Tensor,
    ) -> None:
        """Replaces tokens of `chosen` [S] int64 at these drafts: by the draft, or by another token.

        logits     [S, vocabulary], after constraints and masks
        slots      S rows of the batch
        positions  [S] int64 positions of the chosen tokens, at which the rows hold the drafts
        """
        drafted = [slots[place] for place in self.places]
        index, slot = upload([*self.places, *drafted], torch.int64, logits.device).view(2, -1)
        position = positions[index]
        own = probabilities(logits[index].float(), rows, drafted, position)
        drafts = rows.tokens[slot, position].long()
        chosen[index] = verdicts(own, self.probabilities, drafts, rows.seeds[slot], position)


class Drawn:
    """The probabilities from which the current drafts of all rows were sampled, kept until the drafts are verified."""

    def __init__(self) -> None:
        self._drawn: list[tuple[dict[int, int], torch.Tensor]] = []
        """One entry for each draft position: the row of each slot, and the probabilities."""

    def clear(self) -> None:
        """Forgets all drafts, before new ones are sampled."""
        self._drawn.clear()

    def forget(self, slots: Iterable[int]) -> None:
        """Forgets the drafts of these slots."""
        for slot in slots:
            for rows, _ in self._drawn:
                rows.pop(slot, None)

    def draw(
        self, logits: torch.Tensor, rows: BatchRows, slots: Sequence[int], positions: torch.Tensor
    ) -> torch.Tensor:
        """Samples the next draft of each row, [N] int64, with the arguments of `sampler.sample`."""
        theirs = probabilities(logits, rows, slots, positions)
        self.keep(slots, theirs)
        seeds = rows.seeds[upload(slots, torch.int64, logits.device)]
        return draw(theirs, uniform(seeds, positions, torch.arange(logits.shape[-1], device=logits.device)[None]))

    def keep(self, slots: Sequence[int], probabilities: torch.Tensor) -> None:
        """Keeps the probabilities [N, vocabulary] float32, which sum to 1, of the next draft of each slot."""
        self._drawn.append(({slot: row for row, slot in enumerate(slots)}, probabilities))

    def of(self, scheduled: Sequence[ScheduledTokens]) -> DrawnDrafts | None:
        """The drafts that a step verifies; None if none was sampled here."""
        firsts = accumulate((item.sampled for item in scheduled), initial=0)
        runs = [(first, item) for first, item in zip(firsts, scheduled, strict=False) if item.sampled > 1]
        places, found = [], []
        for ahead, (rows, drawn) in enumerate(self._drawn):
            here = [(first, rows[item.slot]) for first, item in runs if ahead < item.sampled - 1 and item.slot in rows]
            if here:
                places += [first + ahead for first, _ in here]
                found.append(drawn.index_select(0, upload([row for _, row in here], torch.int64, drawn.device)))
        return DrawnDrafts(places, torch.cat(found)) if found else None


def verdicts(
    own: torch.Tensor, theirs: torch.Tensor, drafts: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """The tokens [D] int64: each of `drafts` [D] if it is accepted, else another token.

    own, theirs       [D, vocabulary] float32 probabilities of the model and of the drafter
    seeds, positions  [D] int64, from which random numbers are derived that the drafter did not use
    """
    vocabulary = own.shape[-1]
    numbers = uniform(mixed(seeds), positions, torch.arange(vocabulary + 1, device=own.device)[None])
    place = drafts[:, None]
    accepted = numbers[:, vocabulary] * theirs.gather(1, place)[:, 0] < own.gather(1, place)[:, 0]
    rest = (own - theirs).clamp_(min=0)
    rest = torch.where(rest.any(-1, keepdim=True), rest, own)  # rounding can leave nothing
    return torch.where(accepted, drafts, draw(rest, numbers[:, :vocabulary]))
