"""Drafts of Medusa heads: one of each head, from the state behind which the newest token was sampled.

    state of token t, which t + 1 was sampled behind  ->  heads 0, 1, 2, ...  ->  drafts of t + 2, t + 3, t + 4, ...

They keep nothing between steps: prefixes, preemption, copies and steps without drafts do not concern them.
"""

import torch

from kvern.device.rows import BatchRows
from kvern.device.transfer import upload
from kvern.drafting.device.drafter import ComputedStep
from kvern.drafting.device.head_drafter import Choose
from kvern.drafting.models.medusa_heads import MedusaHeads
from kvern.drafting.rejection import Drawn
from kvern.request.step import SchedulerOutput


class MedusaDrafter:
    """A `Drafter`, wherever the model's steps run, that makes no more drafts than there are heads.

    `drawn`: draws, and keeps what it drew from; else `choose` does.
    """

    reads_hidden, inputs = True, None
    graphs = ()

    def __init__(self, heads: MedusaHeads, rows: BatchRows, choose: Choose, drawn: Drawn | None = None) -> None:
        self._heads = heads
        self._rows = rows
        self._choose = choose
        self.drawn = drawn

    def prepare(self, output: SchedulerOutput) -> None:
        """Nothing is kept that rows change."""

    def draft(self, step: ComputedStep) -> None:
        if self.drawn is not None:
            self.drawn.clear()
        asking = [item for item in step.scheduled if item.sampled and item.guesses]
        if not asking:
            return
        assert step.hidden is not None
        order = sorted(range(len(asking)), key=lambda place: -asking[place].guesses)
        asking = [asking[place] for place in order]
        sent = upload([*order, *(item.slot for item in asking)], torch.int64, self._rows.device).view(2, -1)
        states, slots = step.hidden[step.last_kept()[sent[0]]], sent[1]
        newest = self._rows.num_computed_tokens[slots].long()
        for head in range(asking[0].guesses):
            going = [item.slot for item in asking if item.guesses > head]
            logits = self._heads.logits(states[: len(going)], head)
            index, positions = slots[: len(going)], newest[: len(going)] + 1 + head
            if self.drawn is None:
                self._choose(logits, going, index, positions)
            else:
                chosen = self.drawn.draw(logits, self._rows, going, positions)
                self._rows.tokens[index, positions] = chosen.int()
