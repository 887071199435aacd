"""A draft head on a GPU: it reads steps within the graphs that verify drafts, and drafts in graphs of its own.

verify   ... -> what is kept of each row -> the head's states behind the last of these tokens
first    these states -> drafts
others   the drafts, and the states that they came from -> states -> drafts
"""

from collections.abc import Sequence, Set
from functools import partial

import torch
from torch import Tensor

from kvern.device.device_batch import DeviceBatch, DeviceRows, decodes_on_device
from kvern.drafting.device.draft_graphs import MOST_ROWS, DraftGraphs, DraftSteps
from kvern.drafting.models.head import DraftHead
from kvern.kernels.drafts import begin_drafts, write_drafts
from kvern.kernels.sampling import sample
from kvern.request.step import ScheduledTokens
from kvern.runner.cached_model import CachedModel
from kvern.runner.device_states import DeviceStateMemory
from kvern.runner.step_graphs import CaptureMemory

DeviceHead = CachedModel[DraftHead, DeviceBatch, DeviceRows, DeviceStateMemory]

PADDING = 2
"""Runs that pad in a graph that verifies drafts."""


class HeadSteps:
    """The `StepReader` and `DraftComputer` of a head; its graphs are also told which of the `states` each row has.

    states  [N, hidden]: what the head made of the newest token of each row of the step that was read last
    """

    def __init__(self, model: DeviceHead) -> None:
        head, rows = model.decoder, model.rows
        self._head = head
        self._attention = model.attention
        self._rows = rows
        self._block_size = model.block_size
        self.inputs = head.layer_inputs()
        shape = MOST_ROWS + PADDING, head.spec.hidden_size
        self.states = torch.zeros(shape, dtype=head.build.dtype, device=rows.device)

    @property
    def tile_sizes(self) -> Set[int]:
        return self._attention.tile_sizes

    def read(self, batch: DeviceBatch, hidden: Tensor, sampled: Tensor, kept: Tensor) -> None:
        told = hidden if self.inputs is None else self.inputs.rows()
        attend = self._attention.plan(batch)
        states = self._head.forward(sampled, self._head.enter(told), batch.positions, attend)
        last = (batch.query_start_loc + kept - 1).clamp(0, len(states) - 1)  # of what pads nothing is known
        torch.index_select(states, 0, last, out=self.states[: len(last)])

    def steps(self, size: int) -> DraftSteps:
        device = self._rows.device
        asked = torch.zeros(3, size, dtype=torch.int32, device=device)
        pairs = torch.zeros(2, 2 * size, dtype=torch.int32, device=device)
        state = torch.zeros(3, size, dtype=torch.int32, device=device)
        indices = torch.arange(size, dtype=torch.int32, device=device)
        indices = torch.stack((indices, torch.zeros_like(indices), torch.ones_like(indices)))
        drafts = torch.zeros(size, dtype=torch.int64, device=device)
        states = torch.zeros_like(self.states[:size])
        first = partial(self._first, asked, pairs, state, states, drafts)
        following = partial(self._following, indices, state, states, drafts)
        return DraftSteps(first, following, asked, (pairs, state, indices, states, drafts))

    def _first(self, asked: Tensor, pairs: Tensor, state: Tensor, states: Tensor, drafts: Tensor) -> None:
        begin_drafts(self._rows.num_computed_tokens, asked, pairs, state, self._rows.scratch)
        torch.index_select(self.states, 0, asked[2], out=states)
        self._draw(states, state[1].long() + 1, state, drafts)

    def _following(self, indices: Tensor, state: Tensor, states: Tensor, drafts: Tensor) -> None:
        """The key of a draft belongs to the position before it, as that of any token that a head reads."""
        slots, starts = state[0], (state[1] - 1).clamp(min=0)
        batch = decodes_on_device(self._rows, slots, starts, indices, self._block_size, windowed=False)
        attend = self._attention.plan(batch)
        states.copy_(self._head.forward(drafts, states, batch.positions, attend))
        self._draw(states, batch.sample_positions + 1, state, drafts)

    def _draw(self, states: Tensor, positions: Tensor, state: Tensor, drafts: Tensor) -> None:
        """Draw what `states` [R, hidden] lead to at `positions` [R] int64, and let rows and `drafts` go on with it."""
        logits = self._head.logits(states)
        sampled = sample(logits, None, state[0], positions, self._rows)
        drafts.copy_(sampled)
        write_drafts(self._rows.tokens, state, sampled)


class HeadGraphs(DraftGraphs):
    """The graphs of a head that drafts; its `reader` reads steps within the graphs that verify drafts."""

    def __init__(self, model: DeviceHead, memory: CaptureMemory) -> None:
        self.reader = HeadSteps(model)
        super().__init__(self.reader, model.rows, memory)

    def go_on(self, asking: Sequence[tuple[int, ScheduledTokens]], states: Tensor | None) -> None:
        """Draft for entries of a step, given with their places there.

        states  [N, hidden], one for each entry; None: those of the step are read already
        """
        for first in range(0, len(asking), MOST_ROWS):
            part = asking[first : first + MOST_ROWS]
            places = [place for place, _ in part]
            if states is not None:
                places = [*range(len(part))]
                self.reader.states[: len(part)] = states[first : first + MOST_ROWS]
            self.draft([item.slot for _, item in part], [item.guesses for _, item in part], places)
