"""Drafts of a head: it reads what each step computed, then goes on from its own states.

    step:   tokens 3 4 5 with the model's states, and 6, which was sampled behind them
    read:   4 5 6, each with the state before it  ->  states, of which the last one's logits draft 7
    then:   7 with that state                     ->  a state, whose logits draft 8, and so on

Its cache has a place for each of the model's, in the same blocks: shared prefixes, copies and preemption hold for both.
What it reads of tokens that are rejected is written again by the next step. The key in a place depends on the token
behind as well: where requests that share a block go on in different ways, the last key there is that of the first,
which costs some drafts at most. Keys of tokens that were computed while nobody asked for drafts are what lies there.
"""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from kvern.attention.base import AttentionBackend
from kvern.device.input_batch import InputBatch
from kvern.device.rows import BatchRows
from kvern.device.transfer import upload
from kvern.models.decoder import LayerInputs
from kvern.models.draft_head import DraftHead
from kvern.step import ScheduledTokens, SchedulerOutput
from kvern.worker.drafter import ComputedStep

Batch = TypeVar("Batch", bound=InputBatch)
BuildBatch = Callable[[Sequence[ScheduledTokens], Tensor], Batch]
"""The batch of a step whose requests begin at some starts, [R] int32 on the device, which the host may not know."""
Choose = Callable[[Tensor, Sequence[int], Tensor, Tensor], Tensor]
"""Draws of logits [N, vocabulary] the tokens [N] int64 that rows, by host and device, go on with at positions [N]."""


class HeadDrafter(Generic[Batch]):
    """A `Drafter`, whose batch lives where the model's does."""

    reads_hidden = True
    graphs = None

    def __init__(
        self,
        head: DraftHead,
        attention: AttentionBackend[Batch],
        rows: BatchRows,
        build_batch: BuildBatch[Batch],
        choose: Choose,
    ) -> None:
        self._head, self._attention, self._rows = head, attention, rows
        self._build_batch, self._choose = build_batch, choose
        eagle3 = head.head.eagle3
        self.inputs = None if eagle3 is None else LayerInputs(eagle3.entries, head.build)

    def prepare(self, output: SchedulerOutput) -> None:
        """What `Drafter` does."""
        self._attention.copy_blocks(output.copies)

    def draft(self, step: ComputedStep) -> None:
        """What `Drafter` does."""
        states, asking = self._read(step), [item for item in step.scheduled if item.sampled and item.guesses]
        if not asking:
            return
        order = sorted(range(len(asking)), key=lambda place: -asking[place].guesses)
        asking = [asking[place] for place in order]
        sent = upload([*order, *(item.slot for item in asking)], torch.int64, self._rows.device).view(2, -1)
        states, slots = states[sent[0]], sent[1]
        newest = self._rows.num_computed_tokens[slots]
        bounds = [item.start + item.count for item in asking]
        if not self._attention.reads_device_starts:
            bounds = newest.tolist()
        drafts = self._draw(states, asking, slots, newest)
        for ahead in range(1, asking[0].guesses):
            going = sum(item.guesses > ahead for item in asking)
            steps = [
                ScheduledTokens(item.slot, bound + ahead - 1, 1, 1)
                for item, bound in zip(asking[:going], bounds, strict=False)
            ]
            batch = self._build_batch(steps, newest[:going] + ahead - 1)
            attend = self._attention.plan(batch)
            states = self._head.forward(drafts[:going], states[:going], batch.positions, attend)
            drafts = self._draw(states, asking[:going], slots[:going], newest[:going] + ahead)

    def _read(self, step: ComputedStep) -> Tensor:
        """Read a step's tokens: the states `[N, hidden]` behind the last that is kept of each that asks for drafts."""
        assert step.hidden is not None
        device, scheduled, tokens = self._rows.device, step.scheduled, self._rows.tokens
        batch = self._build_batch(scheduled, step.starts)
        rows = upload([item.slot for item in scheduled for _ in range(item.count)], torch.int64, device)
        following = tokens[rows, (batch.positions + 1).clamp(max=tokens.shape[1] - 1)].long()
        attend = self._attention.plan(batch)
        return self._head.forward(following, self._head.enter(step.hidden), batch.positions, attend)[step.last_kept()]

    def _draw(self, states: Tensor, asking: Sequence[ScheduledTokens], slots: Tensor, newest: Tensor) -> Tensor:
        """Draw what follows some states, behind the positions `newest` [N], and let the rows go on with it."""
        return self._choose(self._head.logits(states), [item.slot for item in asking], slots, newest.long() + 1)
