"""Steps that verify drafts as CUDA graphs, from the rows' tokens to those that are kept of what is sampled.

A graph is cut for so many rows and so many tokens, which rows share as they like. What is left of the tokens is a run
of the row that pads batches. Where rows begin, the device knows, and what is sampled is compared with the drafts there:
the host reads tokens one step late, as of other steps.

    inputs   [R] int32 each: rows, first positions (-1: where the device says), numbers of tokens, indices of the first
             [tiles] int32 each, for each size of tiles: request and first query of each
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from kvern.adapters.bank import AdapterBank
from kvern.attention.base import AttentionBackend
from kvern.device.device_batch import DeviceBatch, DeviceRows, Tiles
from kvern.device.transfer import send
from kvern.drafting.device.drafter import StepReader
from kvern.kernels import logprobs
from kvern.kernels.constraints import change
from kvern.kernels.drafts import MOST_TOKENS, accept_drafts, read_drafts
from kvern.kernels.sampling import sample
from kvern.layers.step_context import NO_ADAPTERS, StepAdapters
from kvern.models.decoder import Decoder
from kvern.request.step import ScheduledTokens
from kvern.runner.cuda_graph import DecodedStep, capture
from kvern.runner.device_sampling import sample_plain
from kvern.runner.device_states import DeviceStateMemory
from kvern.sample.logprobs import DeviceLogprobs

ROWS = (1, 4, 16, 64, 256)
TOKENS = (8, 16, 32, 64, 96, 128, 160, 192, 256, 320, 384, 512)
"""With more a step takes a GPU longer than its launches take a host."""
LONGEST = 17
"""Tokens of a row, on average, at most."""


class VerifyStep(NamedTuple):
    """What a graph is cut for: rows and tokens, at most.

    `options`: some rows ask for more than a temperature; `adapted`: some may use adapters.
    """

    rows: int
    tokens: int
    options: bool
    adapted: bool

    @property
    def runs(self) -> int:
        """Of rows, one that pads the tokens, and an empty one, which pads tiles."""
        return self.rows + 2

    def tiles(self, size: int) -> int:
        """Tiles of `size` queries that the runs are cut into, at most."""
        return self.rows + 1 + self.tokens // size

    def fits(self, rows: int, tokens: int, options: bool, adapted: bool) -> bool:
        return rows <= self.rows and tokens <= self.tokens and (options, adapted) == self[2:]


def verify_steps(requests: int, most: int, longest: int, adapters: bool) -> Iterator[VerifyStep]:
    """All graphs of an engine that runs so many requests at once, the likeliest first.

    `most`: tokens of a step; `longest`: of a sequence. Of a kind the largest comes first, in whose memory the others
    find place.
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
            yield from (VerifyStep(rows, tokens, options, adapted) for rows, tokens in sizes)


def _previous(tokens: int) -> int:
    """The size below one of TOKENS."""
    return max((size for size in TOKENS if size < tokens), default=0)


@dataclass
class VerifyGraph:
    """A captured step: reads `inputs` int32, which are those `packed`, writes `outputs` and `kept`."""

    replay: Callable[[], None]
    inputs: torch.Tensor
    outputs: DecodedStep
    packed: Sequence[int] = ()


class VerifiedStep(NamedTuple):
    """What a step of R rows and T tokens leaves, all good until the next.

    sampled  [T] int64           what is sampled behind each token
    kept     [R] int64           how many of these are kept of each row
    starts   [R] int32           where rows began
    hidden   [T, hidden]         the last hidden states
    """

    sampled: torch.Tensor
    kept: torch.Tensor
    starts: torch.Tensor
    hidden: torch.Tensor


class VerifyGraphs:
    """Captures and replays."""

    def __init__(
        self,
        decoder: Decoder,
        attention: AttentionBackend[DeviceBatch],
        rows: DeviceRows,
        block_size: int,
        most: int,
        pool: Any,
        stream: torch.cuda.Stream,
        adapters: AdapterBank | None = None,
        states: DeviceStateMemory | None = None,
        reader: StepReader | None = None,
    ) -> None:
        """`most`: tokens of a step; `pool` and `stream`: of graphs; `reader`: reads what is kept."""
        self._decoder, self._attention, self._rows, self._block_size = decoder, attention, rows, block_size
        self._pool, self._stream, self._states = pool, stream, states
        self.reader = reader
        self._sizes = sorted({*attention.tile_sizes, *(() if reader is None else reader.tile_sizes)})
        adapts = adapters is not None and adapters.captures
        self.missing = deque(verify_steps(rows.scratch, most, rows.tokens.shape[1] - 1, adapts))
        self._graphs: dict[VerifyStep, VerifyGraph] = {}
        self._chosen: dict[tuple[int, int, bool, bool], VerifyStep | None] = {}
        """Of those captured so far, by the places of the sizes of a step among `ROWS` and `TOKENS`."""
        largest = max((step.tokens for step in self.missing), default=0)
        self._reported = logprobs.empty(largest, rows.device)
        self._kept = torch.zeros(max(ROWS) + 2, dtype=torch.int64, device=rows.device)
        self._starts = torch.zeros(max(ROWS) + 2, dtype=torch.int32, device=rows.device)

    def capture_next(self) -> None:
        """Capture the next of those that are `missing`."""
        step = self.missing.popleft()
        self._graphs[step] = self._capture(step)
        self._chosen.clear()

    def run(self, scheduled: Sequence[ScheduledTokens], options: bool, adapted: bool) -> VerifiedStep | None:
        """Start a step all of whose tokens are sampled behind. None: it is another, or there is no graph for it.

        `options`: some of the rows ask for more than a temperature; then `logprobs` has what is reported of the tokens.
        `adapted`: some of the rows use adapters.
        """
        tokens = sum(item.count for item in scheduled)
        if any(item.count != item.sampled or item.count > MOST_TOKENS for item in scheduled):
            return None
        step = self._smallest(len(scheduled), tokens, options, adapted)
        if step is None:
            return None
        graph = self._graphs[step]
        packed = self._packed(step, scheduled)
        if packed != graph.packed:
            graph.inputs.copy_(send(np.array(packed, dtype=np.int32), self._rows.device))
            graph.packed = packed
        graph.replay()
        count, outputs = len(scheduled), graph.outputs
        return VerifiedStep(outputs.sampled[:tokens], self._kept[:count], self._starts[:count], outputs.hidden[:tokens])

    def _smallest(self, rows: int, tokens: int, options: bool, adapted: bool) -> VerifyStep | None:
        """The smallest graph that such a step fits into; None: there is none."""
        sizes = bisect_left(ROWS, rows), bisect_left(TOKENS, tokens), options, adapted
        if sizes not in self._chosen:
            fitting = (step for step in self._graphs if step.fits(rows, tokens, options, adapted))
            self._chosen[sizes] = min(fitting, key=lambda step: (step.tokens, step.rows), default=None)
        return self._chosen[sizes]

    def logprobs(self, count: int, most: int) -> DeviceLogprobs:
        """Of the first `count` tokens of the last step with options, and of at most so many others beside each."""
        return DeviceLogprobs.of(self._reported, count, most)

    def _packed(self, step: VerifyStep, scheduled: Sequence[ScheduledTokens]) -> list[int]:
        """What `inputs` are for this step."""
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

    def _capture(self, step: VerifyStep) -> VerifyGraph:
        packed = np.array(self._packed(step, []), dtype=np.int32)
        inputs = torch.from_numpy(packed).to(self._rows.device)
        replay, outputs = self._record(partial(self._step, step, inputs))
        return VerifyGraph(replay, inputs, outputs)

    def _record(self, step: Callable[[], DecodedStep]) -> tuple[Callable[[], None], DecodedStep]:
        """Whatever repeats the step, and where it then leaves what."""
        graph, outputs = capture(step, self._pool, self._stream)
        return graph.replay, outputs

    def _step(self, step: VerifyStep, inputs: torch.Tensor) -> DecodedStep:
        rows, runs, tokens = self._rows, step.runs, step.tokens
        slots, planned, counts, firsts = inputs[: 4 * runs].view(4, -1)
        starts, batch_rows = self._starts[:runs], (rows.tokens, rows.block_table, rows.num_computed_tokens)
        described, token_slots = read_drafts(
            *batch_rows, slots, planned, firsts, counts, starts, tokens, self._block_size
        )
        token_ids, positions, slot_mapping, next_positions = described
        batch = DeviceBatch(
            slots=[rows.scratch] * runs,
            starts=[0] * runs,
            counts=[1] * runs,
            positions=positions,
            token_ids=token_ids,
            slot_mapping=slot_mapping,
            block_table=rows.block_table,
            sample_slots=[],
            logits_indices=token_slots,
            sample_positions=next_positions,
            decodes=0,
            drafted=runs,
            device_slots=slots,
            device_starts=starts,
            device_counts=counts,
            query_start_loc=firsts,
            device_sample_slots=token_slots,
            tiles=self._tiles(step, inputs[4 * runs :]).__getitem__,
            few=True,
            uncertain=True,
            windows=rows.windows(slots, starts, firsts, counts, tokens, tokens, self._block_size),
        )
        adapter_indices = rows.adapters.index_select(0, token_slots) if step.adapted else None
        adapters = NO_ADAPTERS if adapter_indices is None else StepAdapters(adapter_indices, adapter_indices)
        states = None if self._states is None else self._states.plan(batch)
        attend, told = self._attention.plan(batch), None if self.reader is None else self.reader.inputs
        hidden = self._decoder(token_ids, positions, attend, adapters=adapters, states=states, inputs=told)
        if step.options:
            logits = self._decoder.logits(hidden, upcast=False)
            scores = change(logits, token_slots, next_positions, rows, everything=False)
            sampled = sample(logits, scores, token_slots, next_positions, rows)
            logprobs.logprobs(logits, token_slots, rows.logprobs, sampled, self._reported)
        else:
            logits, sampled = sample_plain(self._decoder, hidden, token_slots, next_positions, rows)
        accept_drafts(rows.tokens, rows.num_computed_tokens, slots, starts, firsts, counts, sampled, self._kept)
        if self._states is not None:
            self._states.accept(self._kept[:runs])
        if self.reader is not None:
            self.reader.read(batch, hidden, sampled, self._kept[:runs])
        return DecodedStep(hidden, logits, next_positions, sampled)

    def _tiles(self, step: VerifyStep, numbers: torch.Tensor) -> dict[int, Tiles]:
        """The tiles of each size, which `numbers` begins with."""
        parts = torch.split(numbers, [2 * step.tiles(size) for size in self._sizes])
        found = {}
        for size, part in zip(self._sizes, parts, strict=True):
            requests, firsts = part.view(2, -1)
            found[size] = requests, firsts
        return found
