"""Steps that draft on a GPU as CUDA graphs: from rows and counts on the device to drafts in the rows.

    first   what the newest token of each row leads to. A draft model reads it, and the one before it: that was the last
            draft of the step before, which was never read, if all were accepted. A head (`head_graphs.py`) has read it
    others  the draft written by the step before; rows that have all their drafts pad

Of few rows a step is short, and to launch a graph takes a host longer, above all one that still runs: there a graph
holds a whole run of steps, the first among them, or many of the others. Of more rows each step is a graph. A host
launches as many as the longest run of drafts takes, and waits for none.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvern.device.device_batch import DeviceRows, decodes_on_device
from kvern.kernels.drafts import begin_drafts, write_drafts
from kvern.runner.device_sampling import sample_plain
from kvern.runner.step_graphs import (
    CaptureMemory,
    DeviceModel,
    GraphInputs,
    Priority,
    StepGraphs,
    StepKind,
    StepOutputs,
)

MOST_ROWS = 256
"""The most rows of one step; more are drafted for in several."""
FEW_ROWS = 8
"""The most rows of which runs of steps are captured."""
LONGEST_RUN = 8
"""The most steps of such a run; what is longer is a short one, and others of so many after it."""


def padded_rows(rows: int) -> int:
    """The rows of the steps that draft for so many: a power of two."""
    return 1 << (rows - 1).bit_length()


class DraftRun(NamedTuple):
    """So many steps in a row for so many rows, the first among them or all of them others."""

    rows: int
    steps: int
    begins: bool


def longest_run(rows: int) -> int:
    """The most steps that a graph for so many rows holds."""
    return LONGEST_RUN if rows <= FEW_ROWS else 1


def draft_runs(rows: int) -> list[DraftRun]:
    """All graphs of an engine that drafts for so many rows at once, as `StepKind.shapes`."""
    largest = padded_rows(min(rows, MOST_ROWS))
    runs = []
    for size in (1 << power for power in reversed(range(largest.bit_length()))):
        longest = longest_run(size)
        runs += [DraftRun(size, longest, begins=False)]
        runs += [DraftRun(size, steps, begins=True) for steps in reversed(range(1, longest + 1))]
    return runs


class DraftSteps(GraphInputs):
    """The steps that draft for so many rows.

    numbers  as `asked` of `begin_drafts`, then what else `first` is told of each row
    kept     what else the steps read and write: a graph has no hold on its memory
    """

    def __init__(
        self, first: Callable[[], None], following: Callable[[], None], asked: Tensor, kept: Sequence[Tensor]
    ) -> None:
        super().__init__(asked.view(-1))
        self.first = first
        self.following = following
        self._kept = kept


class DraftComputer(Protocol):
    """The protocol of what computes drafts."""

    def steps(self, size: int) -> DraftSteps:
        """The steps for so many rows, kernel by kernel; those that pad belong to the last row."""


class DraftKind(StepKind[DraftRun, DraftSteps]):
    """Runs of steps that draft."""

    def __init__(self, computer: DraftComputer, rows: int) -> None:
        """`rows`: of an engine."""
        self._computer, self._steps = computer, dict[int, DraftSteps]()
        self.shapes = draft_runs(rows)

    def priority(self, shape: DraftRun) -> Priority:
        return Priority.DRAFTS_MADE

    def inputs(self, shape: DraftRun) -> DraftSteps:
        """The inputs of all graphs of so many rows are the same."""
        steps = self._steps.get(shape.rows)
        if steps is None:
            steps = self._steps[shape.rows] = self._computer.steps(shape.rows)
        return steps

    def compute(self, shape: DraftRun, inputs: DraftSteps) -> StepOutputs:
        if shape.begins:
            inputs.first()
        for _ in range(shape.steps - shape.begins):
            inputs.following()
        return StepOutputs()


class DraftGraphs(StepGraphs[DraftRun, DraftSteps]):
    """Steps that draft, of which those that are not captured yet run kernel by kernel."""

    def __init__(self, computer: DraftComputer, rows: DeviceRows, memory: CaptureMemory) -> None:
        super().__init__(DraftKind(computer, rows.scratch), memory)

    def draft(self, slots: Sequence[int], drafts: Sequence[int], *others: Sequence[int]) -> None:
        """Write so many drafts after the newest tokens of these rows, at most MOST_ROWS, without waiting.

        `others`: what else the first step is told of each row.
        """
        size = padded_rows(len(slots))
        padding = [0] * (size - len(slots))
        whole, short = divmod(max(drafts) - 1, longest_run(size))
        run = DraftRun(size, short + 1, begins=True)
        inputs = self.kind.inputs(run)
        inputs.write([number for numbers in (slots, drafts, *others) for number in (*numbers, *padding)])
        self._replay(run, inputs)
        for _ in range(whole):
            self._replay(DraftRun(size, longest_run(size), begins=False), inputs)

    def _replay(self, run: DraftRun, inputs: DraftSteps) -> None:
        graph = self.captured.get(run)
        if graph is None:
            self.kind.compute(run, inputs)
        else:
            graph.replay()


class ModelSteps:
    """The `DraftComputer` of a draft model. Of the tokens before a row's newest, the last alone may have no keys."""

    def __init__(self, model: DeviceModel) -> None:
        self._model = model

    def steps(self, size: int) -> DraftSteps:
        device = self._model.rows.device
        asked = torch.zeros(2, size, dtype=torch.int32, device=device)
        pairs = torch.zeros(2, 2 * size, dtype=torch.int32, device=device)
        last = 2 * torch.arange(size, dtype=torch.int64, device=device) + 1
        state = torch.zeros(3, size, dtype=torch.int32, device=device)
        indices = torch.arange(2 * size, dtype=torch.int32, device=device)
        ones, zeros = torch.ones_like(indices), torch.zeros_like(indices)
        first = partial(self._first, asked, pairs, last, state, (indices, zeros, ones))
        half = indices[:size], zeros[:size], ones[:size]
        following = partial(self._step, state[:2], None, state, half)
        return DraftSteps(first, following, asked, (pairs, last, state, indices, ones, zeros))

    def _first(
        self, asked: Tensor, pairs: Tensor, last: Tensor, state: Tensor, indices: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        rows = self._model.rows
        begin_drafts(rows.num_computed_tokens, asked, pairs, state, rows.scratch)
        self._step(pairs, last, state, indices)

    def _step(self, tokens: Tensor, last: Tensor | None, state: Tensor, indices: tuple[Tensor, Tensor, Tensor]) -> None:
        """Compute `tokens` [2, N], rows and positions, and write what follows the `last` [R] of them; None: all."""
        model, rows = self._model, self._model.rows
        slots, starts = tokens
        batch = decodes_on_device(rows, slots, starts, indices, model.block_size, windowed=False)
        positions = batch.sample_positions
        hidden = model.decoder(batch.token_ids, batch.positions, model.attention.plan(batch))
        if last is not None:
            hidden, positions = hidden.index_select(0, last), positions.index_select(0, last)
        _, sampled = sample_plain(model.decoder, hidden, state[0], positions, rows)
        write_drafts(rows.tokens, state, sampled)
