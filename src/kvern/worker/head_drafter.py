"""Drafts of a head: it reads what each step computed, then goes on from its own states.

    step:   tokens 3 4 5 with the model's states, and 6, which was sampled behind them
    read:   4 5 6, each with the state before it  ->  a state, whose logits draft 7
    then:   7 with that state                     ->  a state, whose logits draft 8, and so on

Its cache has a place for each of the model's, in the same blocks: shared prefixes, copies and preemption hold for both. The key in a place depends on the token behind as well: where requests that share a block go on in
different ways, the last key there is that of the first, which costs some drafts at most. Keys of tokens that were
computed while nobody asked for drafts are whatever lies there.
"""

from collections.abc import Sequence

import torch

from kvern.attention.base import AttentionBackend
from kvern.device.input_batch import InputBatch, build_input_batch
from kvern.device.rows import BatchRows
from kvern.models.decoder import LayerInputs
from kvern.models.draft_head import DraftHead
from kvern.step import ScheduledTokens, SchedulerOutput
from kvern.worker.drafter import ComputedStep
from kvern.worker.needs import Needs
from kvern.worker.sampling import Sampling


class HeadDrafter:
    """A `Drafter` for steps through PyTorch, or kernels of a CPU."""

    reads_hidden = True

    def __init__(
        self,
        head: DraftHead,
        attention: AttentionBackend[InputBatch],
        rows: BatchRows,
        block_size: int,
        sampling: Sampling,
    ) -> None:
        self._head, self._attention, self._rows = head, attention, rows
        self._block_size, self._sampling = block_size, sampling
        eagle3 = head.head.eagle3
        self.inputs = None if eagle3 is None else LayerInputs(eagle3.entries, head.build)

    def prepare(self, output: SchedulerOutput) -> None:
        self._attention.copy_blocks(output.copies)

    def draft(self, step: ComputedStep) -> None:
        states = self._read(step)
        asking = [item for item in step.scheduled if item.sampled and item.guesses]
        order = sorted(range(len(asking)), key=lambda place: -asking[place].guesses)
        asked, states = [asking[place] for place in order], states[torch.tensor(order, dtype=torch.int64)]
        slots = [item.slot for item in asked]
        index = torch.tensor(slots, device=self._rows.device)
        newest = self._rows.num_computed_tokens[index].long()
        for place in range(asked[0].guesses if asked else 0):
            going = sum(item.guesses > place for item in asked)
            slots, index, newest, states = slots[:going], index[:going], newest[:going], states[:going]
            if place:
                states = self._go_on(slots, newest + place - 1, states)
            drafts = self._sampling.sample(
                self._head.logits(states).contiguous(), slots, index, newest + place + 1, Needs(0)
            )
            self._sampling.write(index, newest + place + 1, drafts)

    def _read(self, step: ComputedStep) -> torch.Tensor:
        """Read what is kept of a step's tokens: the states `[N, hidden]` behind those that drafts are asked behind."""
        assert step.hidden is not None
        rejected = [0] * len(step.scheduled)
        if step.kept is not None:
            rejected = [item.sampled - kept for item, kept in zip(step.scheduled, step.kept.tolist(), strict=True)]
        starts, first = step.starts.tolist(), 0
        items: list[ScheduledTokens] = []
        places: list[int] = []
        for item, start, lost in zip(step.scheduled, starts, rejected, strict=True):
            asks = item.sampled and item.guesses
            items.append(ScheduledTokens(item.slot, start, item.count - lost, 1 if asks else 0))
            places += range(first, first + item.count - lost)
            first += item.count
        batch = self._batch(items)
        hidden = step.hidden if len(places) == first else step.hidden[torch.tensor(places, device=step.hidden.device)]
        wanted = batch.logits_indices if batch.sample_slots else torch.zeros(1, dtype=torch.int64, device=hidden.device)
        return self._states(batch, self._head.enter(hidden), wanted)

    def _go_on(self, slots: Sequence[int], positions: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """From states `[N, hidden]` behind the tokens of `positions` [N] to those one token further."""
        starts = positions.tolist()
        batch = self._batch([ScheduledTokens(slot, start, 1, 1) for slot, start in zip(slots, starts, strict=True)])
        return self._states(batch, states)

    def _states(self, batch: InputBatch, states: torch.Tensor, wanted: torch.Tensor | None = None) -> torch.Tensor:
        attend = self._attention.plan(batch)
        return self._head.forward(batch.token_ids, states, batch.positions, attend, wanted)

    def _batch(self, scheduled: Sequence[ScheduledTokens]) -> InputBatch:
        """As the model's, with the token behind each token in its place."""
        batch = build_input_batch(self._rows, scheduled, self._block_size)
        rows = torch.tensor([item.slot for item in scheduled for _ in range(item.count)], device=batch.positions.device)
        batch.token_ids = self._rows.tokens[rows, batch.positions + 1].long()
        return batch
