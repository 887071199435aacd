"""Steps that verify drafts as CUDA graphs, from the tokens of the rows to those that are kept of what is sampled.

A graph has room for so many rows and so many tokens, which rows share as they like. What is left of the tokens is a run
of the row that pads batches. The device knows where rows begin, and compares what is sampled with the drafts: the host
reads tokens one step late, as of other steps.

    inputs   [R] int32 each: rows, first positions (-1: where the device says), numbers of tokens, indices of the first
             [tiles] int32 each, for each size of tiles: request and first query of each
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from kvern.device import marks
from kvern.device.device_batch import DeviceSamples, DeviceTokens, Tiles, captured_batch, runs_in
from kvern.drafting.device.drafter import StepReader
from kvern.kernels import logprobs
from kvern.kernels.drafts import MOST_TOKENS, accept_drafts, read_drafts
from kvern.layers.step_context import NO_ADAPTERS, StepAdapters
from kvern.request.step import ScheduledTokens
from kvern.runner.device_sampling import sample_as_asked, sample_plain
from kvern.runner.step_graphs import (
    IN_GRAPHS,
    DeviceModel,
    GraphInputs,
    PlannedStep,
    Priority,
    StepGraph,
    StepKind,
    StepOutputs,
)

ROWS = (1, 4, 16, 64, 256)
TOKENS = (8, 16, 32, 64, 96, 128, 160, 192, 256, 320, 384, 512)
"""The sizes in tokens: a step with more takes a GPU longer than its launches take a host."""
LONGEST = 17
"""The most tokens of a row, on average."""


class VerifyShape(NamedTuple):
    """The most rows and tokens that a graph has room for.

    `options`: some rows ask for more than a temperature; `adapted`: some may use adapters.
    """

    rows: int
    tokens: int
    options: bool
    adapted: bool

    @property
    def runs(self) -> int:
        """Runs of the rows, a run that pads the tokens, and an empty one, which pads tiles."""
        return self.rows + 2

    def tiles(self, size: int) -> int:
        """Tiles of `size` queries that the runs are cut into, at most."""
        return self.rows + 1 + self.tokens // size

    def fits(self, rows: int, tokens: int, options: bool, adapted: bool) -> bool:
        """Returns whether there is room for such a step."""
        return rows <= self.rows and tokens <= self.tokens and (options, adapted) == self[2:]


def verify_shapes(requests: int, most: int, longest: int, adapters: bool) -> Iterator[VerifyShape]:
    """All graphs of an engine that runs so many requests at once, as `StepKind.shapes`.

    `most`: tokens of a step; `longest`: tokens of a sequence.
    """
    fewer = [0, *ROWS]
    sizes = [
        (rows, tokens)
        for tokens in reversed([size for size in TOKENS if size <= min(most, longest)])
        for below, rows in zip(fewer, ROWS, strict=False)
        if below < requests and tokens > below and _previous(tokens) < LONGEST * min(rows, requests)
    ]
    for adapted in (False, True) if adapters else (False,):
        for options in (False, True):
            yield from (VerifyShape(rows, tokens, options, adapted) for rows, tokens in sizes)


def _previous(tokens: int) -> int:
    """The size below one of TOKENS."""
    return max((size for size in TOKENS if size < tokens), default=0)


class VerifyKind(StepKind[VerifyShape, GraphInputs]):
    """Steps all of whose tokens are sampled from: the newest token of each row, and drafts."""

    def __init__(
        self, model: DeviceModel, most: int, reader: StepReader | None = None, *, captures: bool = True
    ) -> None:
        """`most`: tokens of a step; `reader`: reads what is kept; `captures`: else there are no graphs."""
        self._model = model
        self._rows = model.rows
        self._reader = reader
        rows = model.rows
        self._sizes = sorted({*model.attention.tile_sizes, *(() if reader is None else reader.tile_sizes)})
        adapts = model.adapters is not None and model.adapters.captures
        self._longest = rows.tokens.shape[1] - 1
        shapes = list(verify_shapes(rows.scratch, most, self._longest, adapts))
        self._most_tokens = max((shape.tokens for shape in shapes), default=0)
        self.shapes = shapes if captures else []
        self._chosen: dict[tuple[int, int, bool, bool], VerifyShape | None] = {}
        """The shapes by the indices of their sizes in `ROWS` and `TOKENS`, when `_when` graphs were captured."""
        self._when = 0
        self._reported = logprobs.empty(self._most_tokens, rows.device)
        self._kept = torch.zeros(max(ROWS) + 2, dtype=torch.int64, device=rows.device)
        self._starts = torch.zeros(max(ROWS) + 2, dtype=torch.int32, device=rows.device)

    def priority(self, shape: VerifyShape) -> Priority:
        return Priority.DRAFTS_VERIFIED

    def largest_step(self) -> list[ScheduledTokens]:
        requests = self._rows.scratch
        count = min(-(-self._most_tokens // requests), self._longest - 1)
        return [ScheduledTokens(slot, 0, count, count) for slot in range(requests)] if count else []

    def run(
        self, step: PlannedStep, captured: Mapping[VerifyShape, StepGraph[VerifyShape, GraphInputs]]
    ) -> StepOutputs | None:
        scheduled, is_plain = step.scheduled, step.size is not None and step.size.is_plain
        if not captured or step.needs & ~IN_GRAPHS or (is_plain and not step.drafting):
            return None
        tokens, count = sum(item.count for item in scheduled), len(scheduled)
        if any(item.count != item.sampled or item.count > MOST_TOKENS for item in scheduled):
            return None
        shape = self._smallest(VerifyShape(count, tokens, bool(step.needs), step.adapted), captured)
        if shape is None:
            return None
        graph = captured[shape]
        graph.inputs.write(self._packed(shape, scheduled))
        graph.replay()
        outputs = graph.outputs
        assert outputs.sampled is not None and outputs.hidden is not None
        return StepOutputs(
            sampled=outputs.sampled[:tokens],
            starts=self._starts[:count],
            kept=self._kept[:count],
            reported=self._reported,
            told=outputs.hidden[:tokens],
            is_read=self._reader is not None,
        )

    def _smallest(
        self, step: VerifyShape, captured: Mapping[VerifyShape, StepGraph[VerifyShape, GraphInputs]]
    ) -> VerifyShape | None:
        """The smallest graph that such a step fits into; None: there is none."""
        if len(captured) != self._when:
            self._when = len(captured)
            self._chosen.clear()
        sizes = bisect_left(ROWS, step.rows), bisect_left(TOKENS, step.tokens), step.options, step.adapted
        if sizes not in self._chosen:
            fitting = (shape for shape in captured if shape.fits(*step))
            self._chosen[sizes] = min(fitting, key=lambda shape: (shape.tokens, shape.rows), default=None)
        return self._chosen[sizes]

    def _packed(self, step: VerifyShape, scheduled: Sequence[ScheduledTokens]) -> list[int]:
        """The inputs for this step."""
        scratch, empty = self._rows.scratch, step.rows + 1 - len(scheduled)
        padding = step.tokens - sum(item.count for item in scheduled)
        counts = [item.count for item in scheduled] + [padding] + [0] * empty
        packed = [item.slot for item in scheduled] + [scratch] * (1 + empty)
        packed += [-1 if item.uncertain else item.start for item in scheduled] + [0] * (1 + empty)
        packed += counts
        packed += accumulate(counts[:-1], initial=0)
        for size in self._sizes:
            tiles = [(run, first) for run, count in enumerate(counts) for first in range(0, count, size)]
            tiles += [(step.runs - 1, 0)] * (step.tiles(size) - len(tiles))
            packed += [run for run, _ in tiles]
            packed += [first for _, first in tiles]
        return packed

    def inputs(self, shape: VerifyShape) -> GraphInputs:
        return GraphInputs(torch.tensor(self._packed(shape, []), dtype=torch.int32, device=self._rows.device))

    def compute(self, shape: VerifyShape, inputs: GraphInputs) -> StepOutputs:
        model = self._model
        rows = self._rows
        decoder = self._model.decoder
        numbers = inputs.numbers
        planned, tokens = runs_in(numbers[: 4 * shape.runs]), shape.tokens
        runs = planned._replace(starts=self._starts[: shape.runs])
        described, slots = read_drafts(
            rows.tokens,
            rows.block_table,
            rows.num_computed_tokens,
            rows.turns,
            planned,
            runs.starts,
            tokens,
            model.block_size,
        )
        *read, positions = described
        batch = captured_batch(
            rows,
            runs,
            DeviceTokens(*read),
            DeviceSamples(slots, positions, slots),
            self._tiles(shape, numbers[4 * shape.runs :]).__getitem__,
            decodes=0,
            windows=rows.windows(runs, tokens, tokens, model.block_size),
        )
        batch.drafted = shape.runs
        batch.few = True
        batch.uncertain = True
        of_rows = rows.adapters.index_select(0, slots) if shape.adapted else None
        adapters = NO_ADAPTERS if of_rows is None else StepAdapters(of_rows, of_rows)
        states = None if model.states is None else model.states.plan(batch)
        attend, told = model.attention.plan(batch), None if self._reader is None else self._reader.inputs
        hidden = decoder(batch.token_ids, batch.positions, attend, adapters=adapters, states=states, inputs=told)
        if shape.options:
            logits, sampled = sample_as_asked(decoder, hidden, slots, positions, rows, self._reported)
        else:
            logits, sampled = sample_plain(decoder, hidden, slots, positions, rows)
        accept_drafts(rows.tokens, rows.num_computed_tokens, runs, sampled, self._kept)
        kept = self._kept[: shape.runs]
        if model.states is not None:
            model.states.accept(kept)
        if self._reader is not None:
            marks.begin(marks.DRAFTING)
            with marks.listened(None):  # to the reader's own parts
                self._reader.read(batch, hidden, sampled, kept)
        return StepOutputs(hidden, slots, positions, logits, sampled)

    def _tiles(self, shape: VerifyShape, numbers: Tensor) -> dict[int, Tiles]:
        """The tiles of each size, which `numbers` begins with."""
        parts = torch.split(numbers, [2 * shape.tiles(size) for size in self._sizes])
        found = {}
        for size, part in zip(self._sizes, parts, strict=True):
            requests, firsts = part.view(2, -1)
            found[size] = requests, firsts
        return found
