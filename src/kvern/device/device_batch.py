"""A step and the batch's rows for a runner that never waits for its device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from kvern.device.input_batch import InputBatch, TableSlots, sampled_tokens, spans_of
from kvern.device.rows import NO_WINDOWS, ListedRows, WindowTables
from kvern.device.transfer import send, upload
from kvern.kernels.attention_arguments import Runs
from kvern.kernels.attention_prefix import SharedPrefix
from kvern.kernels.batch import TokenRuns, read_decodes, read_slots, read_tokens, write_runs
from kvern.request.step import GrownTable, ScheduledTokens


def runs_in(numbers: torch.Tensor) -> TokenRuns:
    """The runs that `numbers` [4 * R] int32 describe: all slots, then starts, counts and indices of first tokens."""
    slots, starts, counts, firsts = numbers.view(4, -1)
    return TokenRuns(slots, starts, firsts, counts)


class DeviceTokens(NamedTuple):
    """The T tokens of a step as the device read them from the rows: [T] int64 each."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor


class DeviceSamples(NamedTuple):
    """The S tokens that a step samples.

    logits_indices  [S] integers: indices of the tokens that they follow among the T tokens of the step
    positions       [S] int64: their positions
    slots           [S] integers: their rows
    """

    logits_indices: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor


class DeviceRows(ListedRows):
    """Rows of a batch on a device, and a last one that pads batches: its block table has `scratch_block` alone."""

    def __init__(
        self,
        slots: int,
        max_model_len: int,
        max_blocks: int,
        device: torch.device,
        scratch_block: int,
        windows: WindowTables = NO_WINDOWS,
    ) -> None:
        super().__init__(slots + 1, max_model_len, max_blocks, device, windows)
        self.scratch = slots
        self.grow([(slots, 0, [scratch_block] * max_blocks)])
        self.grow_windows(
            [GrownTable(slots, table, 0, [scratch_block] * max_blocks) for table in range(windows.tables)]
        )

    def _write(self, target: torch.Tensor, runs: Sequence[tuple[int, int, list[int]]]) -> None:  # type: ignore[override]
        lengths = [len(values) for _, _, values in runs]
        sources = accumulate(lengths, initial=4 * len(runs))
        header = [
            number
            for (slot, first, values), source in zip(runs, sources, strict=False)
            for number in (slot, first, source, len(values))
        ]
        data = upload(header + [value for _, _, values in runs for value in values], torch.int32, self.device)
        write_runs(target, data[: 4 * len(runs)].view(-1, 4), data)

    def read(self, runs: TokenRuns, total: int, longest: int, block_size: int) -> DeviceTokens:
        """The `total` tokens of `runs`, each of which has `longest` tokens at most."""
        return DeviceTokens(*read_tokens(self.tokens, self.block_table, self.turns, runs, total, longest, block_size))

    def windows(self, runs: TokenRuns, total: int, longest: int, block_size: int) -> list[TableSlots]:
        """Block tables of layers with a window, each with the slot mapping of a step; arguments as for `read`."""
        if not self.window_tables:
            return []
        mappings = read_slots(self._tables, len(self.requests), runs, total, longest, block_size)
        return list(zip(self.window_tables, mappings, strict=True))


Tiles = tuple[torch.Tensor, torch.Tensor]
"""Runs of queries: their request and their first query's index within it, both [tiles] int32."""


@dataclass
class Queries:
    """R requests whose tokens follow each other, T of them.

    slots, starts, counts   row, first position and number of tokens of each
    block_table             [slots, max_blocks] int32, indexed by slot
    device_slots, device_starts, device_counts   [R] int32: the same
    query_start_loc                              [R] int32: the index of each one's first token among T
    """

    slots: Sequence[int]
    starts: Sequence[int]
    counts: Sequence[int]
    block_table: torch.Tensor
    device_slots: torch.Tensor
    device_starts: torch.Tensor
    query_start_loc: torch.Tensor
    device_counts: torch.Tensor
    known_tiles: Callable[[int], Tiles] | None = None
    shared: SharedPrefix | None = None
    """The common prefixes of decodes."""
    few: bool = False
    """All requests have few tokens, how many only the device knows."""
    made_tiles: dict[int, Tiles] = field(default_factory=dict)
    """The tiles by size: the same for all block tables."""
    ends: torch.Tensor | None = None
    """[T] int32, where the keys end that queries see in layers with spans; None: behind their own."""

    def over(self, block_table: torch.Tensor) -> "Queries":
        """These queries over another block table."""
        return self if block_table is self.block_table else replace(self, block_table=block_table)

    def tiles(self, size: int) -> Tiles:
        """Runs of at most `size` queries, those with the most keys first."""
        if self.known_tiles is not None:
            return self.known_tiles(size)
        if size not in self.made_tiles:
            self.made_tiles[size] = self._make_tiles(size)
        return self.made_tiles[size]

    def runs(self, size: int) -> Runs:
        """The requests in `tiles` of at most `size` queries."""
        of_requests = self.device_slots, self.device_starts, self.query_start_loc, self.device_counts
        return Runs(*of_requests, *self.tiles(size), self.ends)

    def _make_tiles(self, size: int) -> Tiles:
        tiles = [
            (start + first, request, first)
            for request, (start, count) in enumerate(zip(self.starts, self.counts, strict=True))
            for first in range(0, count, size)
        ]
        tiles.sort(reverse=True)
        both = [request for _, request, _ in tiles] + [first for _, _, first in tiles]
        requests, firsts = upload(both, torch.int32, self.block_table.device).view(2, -1)
        return requests, firsts


@dataclass
class DeviceBatch(InputBatch):
    """An InputBatch whose description is on the device too; R requests, the first `decodes` of which have one token.

    Of the next `drafted` requests all tokens but the first are drafts.

    device_slots, device_starts, device_counts, query_start_loc   [R] int32: row, first position, number of tokens, and
    index of the first token among the T
    device_sample_slots                                         [S] int64: the row of each token that is sampled
    """

    decodes: int
    device_slots: torch.Tensor
    device_starts: torch.Tensor
    device_counts: torch.Tensor
    query_start_loc: torch.Tensor
    device_sample_slots: torch.Tensor
    tiles: Callable[[int], Tiles] | None = None
    """The tiles of all requests by size, if they were made before."""
    few: bool = False
    """The requests have few tokens each, as of `Queries`."""
    shared: SharedPrefix | None = None
    """The common prefixes of decodes, if they are to be read once."""
    drafted: int = 0
    uncertain: bool = False
    """Some of `starts` are bounds: where these requests begin, only the device knows."""

    def places(self) -> torch.Tensor:
        device = self.positions.device
        request = upload([place for place, count in enumerate(self.counts) for _ in range(count)], torch.int64, device)
        return (self.device_starts - self.query_start_loc)[request] + torch.arange(len(request), device=device)

    def queries(self, first: int, last: int) -> Queries:
        """The queries of the requests from `first` to before `last`, which begin or end the batch, or both."""
        requests = slice(first, last)
        firsts = self.query_start_loc[requests]
        return Queries(
            slots=self.slots[requests],
            starts=self.starts[requests],
            counts=self.counts[requests],
            block_table=self.block_table,
            device_slots=self.device_slots[requests],
            device_starts=self.device_starts[requests],
            query_start_loc=firsts - first if first else firsts,
            device_counts=self.device_counts[requests],
            known_tiles=self.tiles,
            shared=None if first else self.shared,
            few=self.few,
            ends=None if (ends := self.ends) is None else ends[first:].int(),  # each request before is one token
        )


def captured_batch(
    rows: DeviceRows,
    runs: TokenRuns,
    tokens: DeviceTokens,
    samples: DeviceSamples,
    tiles: Callable[[int], Tiles],
    *,
    decodes: int,
    windows: Sequence[TableSlots],
) -> DeviceBatch:
    """A step of which only the device knows the rows, as CUDA graphs have it; on the host each run is of the last row.

    `tiles` is `DeviceBatch.tiles`; the first `decodes` of the runs have one token each.
    """
    count = len(runs.slots)
    return DeviceBatch(
        slots=[rows.scratch] * count,
        starts=[0] * count,
        counts=[1] * count,
        positions=tokens.positions,
        token_ids=tokens.token_ids,
        slot_mapping=tokens.slot_mapping,
        block_table=rows.block_table,
        sample_slots=[],
        logits_indices=samples.logits_indices,
        sample_positions=samples.positions,
        decodes=decodes,
        device_slots=runs.slots,
        device_starts=runs.starts,
        device_counts=runs.counts,
        query_start_loc=runs.firsts,
        device_sample_slots=samples.slots,
        tiles=tiles,
        windows=windows,
    )


def decodes_on_device(
    rows: DeviceRows,
    slots: torch.Tensor,
    starts: torch.Tensor,
    indices: torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    block_size: int,
    *,
    windowed: bool = True,
) -> DeviceBatch:
    """A step of one token for each of `slots` [R] at `starts` [R], int32, of which the host knows nothing.

    `indices`: indices of the requests, zeros and ones, [R] int32 each. `windowed`: with block tables of windows.
    """
    requests, zeros, ones = indices
    size = slots.shape[0]
    *read, next_positions = read_decodes(rows.tokens, rows.block_table, rows.turns, slots, starts, block_size)
    runs = TokenRuns(slots, starts, requests, ones)
    return captured_batch(
        rows,
        runs,
        DeviceTokens(*read),
        DeviceSamples(requests, next_positions, slots),
        lambda _: (requests, zeros),
        decodes=size,
        windows=rows.windows(runs, size, 1, block_size) if windowed else [],
    )


def build_device_batch(
    rows: DeviceRows, scheduled: Sequence[ScheduledTokens], block_size: int, exact: torch.Tensor | None = None
) -> DeviceBatch:
    """Send the description of the step in one piece; its tokens and slot mapping are read on the device.

    exact  [R] int32: where the requests begin, if what is scheduled are bounds
    """
    slots = [item.slot for item in scheduled]
    starts = [item.start for item in scheduled]
    counts = [item.count for item in scheduled]
    firsts = list(accumulate(counts[:-1], initial=0))
    sampled = sampled_tokens(scheduled)
    numbers = np.array(slots + starts + counts + firsts, dtype=np.int32)
    sampling = np.array(sampled.indices + sampled.positions + sampled.slots, dtype=np.int64)
    packed = np.concatenate((sampling.view(np.int32), numbers))
    sent = send(packed, rows.device)
    samples = DeviceSamples(*sent[: 6 * len(sampled.slots)].view(torch.int64).view(3, -1))
    runs = runs_in(sent[6 * len(sampled.slots) :])
    uncertain = exact is not None or any(item.uncertain for item in scheduled)
    if uncertain:
        planned, runs = runs.starts, runs._replace(starts=rows.starts(scheduled) if exact is None else exact)
        request = [place for place, item in enumerate(scheduled) for _ in range(item.sampled)]
        moved = (runs.starts - planned)[upload(request, torch.int64, rows.device)]
        samples = samples._replace(positions=samples.positions + moved)
    total, longest = sum(counts), max(counts)
    tokens = rows.read(runs, total, longest, block_size)
    decodes = next((index for index, count in enumerate(counts) if count > 1), len(counts))
    return DeviceBatch(
        slots=slots,
        starts=starts,
        counts=counts,
        positions=tokens.positions,
        token_ids=tokens.token_ids,
        slot_mapping=tokens.slot_mapping,
        block_table=rows.block_table,
        sample_slots=sampled.slots,
        logits_indices=samples.logits_indices,
        sample_positions=samples.positions,
        decodes=decodes,
        device_slots=runs.slots,
        device_starts=runs.starts,
        device_counts=runs.counts,
        query_start_loc=runs.firsts,
        device_sample_slots=samples.slots,
        drafted=sum(item.sampled > 1 for item in scheduled[decodes:]),
        uncertain=uncertain,
        windows=rows.windows(runs, total, longest, block_size),
        spans=spans_of(scheduled),
    )
