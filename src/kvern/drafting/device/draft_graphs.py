"""Steps that draft on a GPU as CUDA graphs: from rows and counts on the device to drafts in the rows.

    first   what the newest token of each row leads to. A draft model reads it, and the one before it: that was the last
            draft of the step before, which was never read, if all were accepted. A head (`head_graphs.py`) has read it
    others  the draft written by the step before; rows that have all their drafts pad

Of few rows a step is short, and to launch a graph takes a host longer, above all one that still runs: there a graph
holds a whole run of steps, the first among them, or many of the others. Of more rows each step is a graph. A host
launches as many as the longest run of drafts takes, and waits for none.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from kvern.attention.base import AttentionBackend
from kvern.device.device_batch import DeviceBatch, DeviceRows, decodes_on_device
from kvern.device.transfer import upload
from kvern.drafting.device.drafter import Captures
from kvern.kernels.drafts import begin_drafts, write_drafts
from kvern.models.decoder import Decoder
from kvern.runner.cuda_graph import DecodedStep, capture
from kvern.runner.device_sampling import sample_plain
from kvern.runner.prompt_graphs import PromptGraphs

MOST_ROWS = 256
"""Of one step; more are drafted for in several."""
FEW_ROWS = 8
"""Of which runs of steps are captured."""
LONGEST_RUN = 8
"""Steps of such a run; what is longer is a short one, and others of so many behind it."""


def padded_rows(rows: int) -> int:
    """The rows of the steps that draft for so many: a power of two."""
    return 1 << (rows - 1).bit_length()


class DraftRun(NamedTuple):
    """So many steps in a row for so many rows, the first among them or all of them others."""

    rows: int
    steps: int
    begins: bool


def longest_run(rows: int) -> int:
    """Steps that a graph for so many rows holds at most."""
    return LONGEST_RUN if rows <= FEW_ROWS else 1


def draft_runs(rows: int) -> list[DraftRun]:
    """All graphs of an engine that drafts for so many rows at once; the largest first, in whose memory others fit."""
    largest = padded_rows(min(rows, MOST_ROWS))
    runs = []
    for size in (1 << power for power in reversed(range(largest.bit_length()))):
        longest = longest_run(size)
        runs += [DraftRun(size, longest, begins=False)]
        runs += [DraftRun(size, steps, begins=True) for steps in reversed(range(1, longest + 1))]
    return runs


@dataclass
class DraftSteps:
    """The steps for so many rows.

    asked  [2 or more, R] int32, as for `begin_drafts`, and behind it what else `first` is told of each row
    """

    first: Callable[[], DecodedStep]
    following: Callable[[], DecodedStep]
    asked: torch.Tensor
    read: Sequence[torch.Tensor]
    """What else they read and write: a graph has no hold on its memory."""
    written: Sequence[int] = ()
    """What `asked` holds."""


class StepMaker(Protocol):
    """What a drafter computes."""

    def make(self, size: int) -> DraftSteps:
        """The steps for so many rows, through kernels one by one; those that pad belong to the last row."""
        ...


class DraftGraphs:
    """Captures and replays; steps that are not captured yet run eagerly."""

    def __init__(self, maker: StepMaker, rows: DeviceRows) -> None:
        self._maker, self._device = maker, rows.device
        self.stream: torch.cuda.Stream | None = None
        self.pool: Any = None
        if rows.device.type == "cuda":
            self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(rows.device)  # type: ignore[no-untyped-call]
        self.missing = deque(draft_runs(rows.scratch))
        self._steps: dict[int, DraftSteps] = {}
        self._graphs: dict[DraftRun, Callable[[], None]] = {}

    def capture_next(self) -> None:
        """Capture the next of those that are `missing`."""
        run = self.missing.popleft()
        self._graphs[run] = self._record(partial(_run_eagerly, self._steps_of(run.rows), run))

    def run(self, slots: Sequence[int], drafts: Sequence[int], *others: Sequence[int]) -> None:
        """Write so many drafts behind the newest tokens of these rows, at most MOST_ROWS, without waiting.

        `others`: what else is `asked` of each row.
        """
        size = padded_rows(len(slots))
        steps = self._steps_of(size)
        padding = [0] * (size - len(slots))
        written = [number for numbers in (slots, drafts, *others) for number in (*numbers, *padding)]
        if written != steps.written:
            steps.asked.copy_(upload(written, torch.int32, self._device).view(-1, size))
            steps.written = written
        whole, short = divmod(max(drafts) - 1, longest_run(size))
        self._replay(steps, DraftRun(size, short + 1, begins=True))
        for _ in range(whole):
            self._replay(steps, DraftRun(size, longest_run(size), begins=False))

    def _steps_of(self, size: int) -> DraftSteps:
        steps = self._steps.get(size)
        if steps is None:
            steps = self._steps[size] = self._maker.make(size)
        return steps

    def _replay(self, steps: DraftSteps, run: DraftRun) -> None:
        graph = self._graphs.get(run)
        if graph is None:
            _run_eagerly(steps, run)
        else:
            graph()

    def _record(self, run: Callable[[], DecodedStep]) -> Callable[[], None]:
        """Whatever repeats the steps."""
        assert self.stream is not None, "graphs are those of a GPU"
        graph, _ = capture(run, self.pool, self.stream)
        return graph.replay


def _run_eagerly(steps: DraftSteps, run: DraftRun) -> DecodedStep:
    """What the last of the steps leaves."""
    found = steps.first() if run.begins else steps.following()
    for _ in range(run.steps - 1):
        found = steps.following()
    return found


class ModelGraphs:
    """The `Captures` of a draft model: its steps that draft, and small ones that read prompts before."""

    def __init__(self, drafts: DraftGraphs, prompts: PromptGraphs) -> None:
        self.drafts, self.prompts = drafts, prompts

    @property
    def missing(self) -> deque[Any]:
        """What `Captures` does."""
        return self.drafts.missing or self.prompts.missing

    def capture_next(self) -> None:
        """What `Captures` does."""
        graphs: Captures = self.drafts if self.drafts.missing else self.prompts
        graphs.capture_next()


class ModelSteps:
    """The steps of a draft model. Of the tokens before a row's newest, the last alone may have no keys."""

    def __init__(
        self, decoder: Decoder, attention: AttentionBackend[DeviceBatch], rows: DeviceRows, block_size: int
    ) -> None:
        self._decoder, self._attention, self._rows, self._block_size = decoder, attention, rows, block_size

    def make(self, size: int) -> DraftSteps:
        """What `StepMaker` does."""
        device = self._rows.device
        asked = torch.zeros(2, size, dtype=torch.int32, device=device)
        pairs = torch.zeros(2, 2 * size, dtype=torch.int32, device=device)
        last = 2 * torch.arange(size, dtype=torch.int64, device=device) + 1
        state = torch.zeros(3, size, dtype=torch.int32, device=device)
        indices = torch.arange(2 * size, dtype=torch.int32, device=device)
        ones, zeros = torch.ones_like(indices), torch.zeros_like(indices)
        first = partial(self._first, asked, pairs, last, state, (indices, zeros, ones))
        half = indices[:size], zeros[:size], ones[:size]
        following = partial(self._step, state[0], state[1], None, state, half)
        return DraftSteps(first, following, asked, (pairs, last, state, indices, ones, zeros))

    def _first(
        self,
        asked: torch.Tensor,
        pairs: torch.Tensor,
        last: torch.Tensor,
        state: torch.Tensor,
        indices: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> DecodedStep:
        begin_drafts(self._rows.num_computed_tokens, asked, pairs, state, self._rows.scratch)
        return self._step(pairs[0], pairs[1], last, state, indices)

    def _step(
        self,
        slots: torch.Tensor,
        starts: torch.Tensor,
        last: torch.Tensor | None,
        state: torch.Tensor,
        indices: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> DecodedStep:
        """Compute tokens [N] of `slots` at `starts`, and write what follows those that are `last` [R]; None: all."""
        rows = self._rows
        batch = decodes_on_device(rows, slots, starts, indices, self._block_size, windowed=False)
        next_positions = batch.sample_positions
        hidden = self._decoder(batch.token_ids, batch.positions, self._attention.plan(batch))
        if last is not None:
            hidden, next_positions = hidden.index_select(0, last), next_positions.index_select(0, last)
        logits, sampled = sample_plain(self._decoder, hidden, state[0], next_positions, rows)
        write_drafts(rows.tokens, state, sampled)
        return DecodedStep(hidden, logits, next_positions, sampled)
