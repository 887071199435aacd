"""Drafts of a head: it reads what each step computed, then goes on from its own states.

    step:   tokens 3 4 5 with the model's states, and 6, which was sampled behind them
    read:   4 5 6, each with the state before it  ->  states, of which the last one's logits draft 7
    then:   7 with that state                     ->  a state, whose logits draft 8, and so on

Its cache has a place for each of the model's, in the same blocks: shared prefixes, copies and preemption hold for both.
What it reads of tokens that are rejected is written again by the next step. The key in a place depends on the token
behind as well: where requests that share a block go on in different ways, the last key there is that of the first,
which costs some drafts at most. Keys of tokens that decodes computed while nobody asked for drafts are what lies there.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

from kvern.device.input_batch import InputBatch
from kvern.device.rows import BatchRows
from kvern.device.transfer import upload
from kvern.drafting.device.captured_head import CapturedHead
from kvern.drafting.device.drafter import Captures, ComputedStep, StepReader
from kvern.drafting.models.head import DraftHead
from kvern.drafting.models.medusa_heads import MedusaHeads
from kvern.drafting.rejection import Drawn
from kvern.request.step import ScheduledTokens, SchedulerOutput
from kvern.runner.cached_model import CachedModel

if TYPE_CHECKING:
    from kvern.drafting.device.head_graphs import HeadGraphs


Batch = TypeVar("Batch", bound=InputBatch)
BuildBatch = Callable[[Sequence[ScheduledTokens], Tensor], Batch]
"""The batch of a step whose requests begin at some starts, [R] int32 on the device, which the host may not know."""
Choose = Callable[[Tensor, Sequence[int], Tensor, Tensor], None]
"""Draws of logits [N, vocabulary] the tokens that rows, by host and device, go on with at positions [N]."""


class HeadDrafter(Generic[Batch]):
    """A `Drafter`, whose batch lives where the model's does."""

    reads_hidden = True

    def __init__(
        self,
        model: CachedModel[DraftHead, Batch, Any, Any],
        build_batch: BuildBatch[Batch],
        choose: Choose,
        in_graphs: "HeadGraphs | None" = None,
        captured: CapturedHead | None = None,
        drawn: Drawn | None = None,
    ) -> None:
        """`in_graphs`: what reads and drafts in graphs. `captured`: small steps on a CPU.

        `drawn`: draws, and keeps what it drew from, outside of graphs and captured steps; else `choose` does.
        """
        self._head = model.decoder
        self._attention = model.attention
        self._rows = model.rows
        self._build_batch, self._choose = build_batch, choose
        self.inputs = model.decoder.layer_inputs()
        self._captured = captured
        self.drawn = drawn
        self.in_graphs = in_graphs

    @property
    def graphs(self) -> Sequence[Captures]:
        return () if self.in_graphs is None else (self.in_graphs,)

    @property
    def caches(self) -> Sequence[Tensor]:
        return self._attention.caches

    @property
    def reader(self) -> StepReader | None:
        return None if self.in_graphs is None else self.in_graphs.reader

    def prepare(self, output: SchedulerOutput) -> None:
        self._attention.copy_blocks(output.copies)

    def draft(self, step: ComputedStep) -> None:
        if self.drawn is not None:
            self.drawn.clear()
        asking = [(place, item) for place, item in enumerate(step.scheduled) if item.sampled and item.guesses]
        states = None if step.read else self._read(step)
        if self.in_graphs is not None:
            self.in_graphs.go_on(asking, states)
        elif asking:
            assert states is not None, "graphs alone read before"
            self._go_on([item for _, item in asking], states)

    def _go_on(self, asking: Sequence[ScheduledTokens], states: Tensor) -> None:
        """Draft behind `states` [N, hidden], one for each entry."""
        order = sorted(range(len(asking)), key=lambda place: -asking[place].guesses)
        asking = [asking[place] for place in order]
        sent = upload([*order, *(item.slot for item in asking)], torch.int64, self._rows.device).view(2, -1)
        states, slots = states[sent[0]], sent[1]
        newest = self._rows.num_computed_tokens[slots]
        bounds = [item.start + item.count for item in asking]
        if not self._attention.reads_device_starts:
            bounds = newest.tolist()
        for ahead in range(asking[0].guesses):
            going = sum(item.guesses > ahead for item in asking)
            if ahead:
                steps = [
                    ScheduledTokens(item.slot, bound + ahead - 1, 1, 1)
                    for item, bound in zip(asking[:going], bounds, strict=False)
                ]
                states = self._forward(steps, newest[:going] + ahead - 1, states[:going], told=False)
            self._draw([item.slot for item in asking[:going]], slots[:going], newest[:going].long() + ahead + 1, states)

    def _draw(self, slots: Sequence[int], index: Tensor, positions: Tensor, states: Tensor) -> None:
        """Let rows, by host and device, go on at `positions` [N] int64 with what `states` [N, hidden] lead to."""
        if self.drawn is not None:
            chosen = self.drawn.draw(self._head.logits(states), self._rows, slots, positions)
            self._rows.tokens[index, positions] = chosen.int()
        elif self._captured is None or not self._captured.draw(index, positions, states):
            self._choose(self._head.logits(states), slots, index, positions)

    def _read(self, step: ComputedStep) -> Tensor:
        """Read a step's tokens: the states `[N, hidden]` behind the last that is kept of each that asks for drafts."""
        assert step.hidden is not None
        return self._forward(step.scheduled, step.starts, step.hidden, told=True)[step.last_kept()]

    def _forward(self, scheduled: Sequence[ScheduledTokens], starts: Tensor, states: Tensor, *, told: bool) -> Tensor:
        """The states `[T, hidden]` after `states` [T] and the next tokens; `told`: `states` are those of the model."""
        captured = None if self._captured is None else self._captured.forward(scheduled, states, told=told)
        if captured is not None:
            return captured
        device, tokens = self._rows.device, self._rows.tokens
        batch = self._build_batch(scheduled, starts)
        rows = upload([item.slot for item in scheduled for _ in range(item.count)], torch.int64, device)
        following = tokens[rows, (batch.places() + 1).clamp(max=tokens.shape[1] - 1)].long()
        if told:
            states = self._head.enter(states)
        return self._head.forward(following, states, batch.positions, self._attention.plan(batch))


class MedusaDrafter:
    """A `Drafter`, wherever the model's steps run, that makes no more drafts than there are heads.

    `drawn`: draws, and keeps what it drew from; else `choose` does.
    """

    reads_hidden, inputs = True, None
    graphs = ()
    caches = ()

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
