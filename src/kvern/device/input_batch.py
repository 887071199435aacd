"""The device view of one step: a flat run of tokens of many requests."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from kvern.device.rows import BatchRows
from kvern.request.spans import Spans
from kvern.request.step import ScheduledTokens

IntegerArray = NDArray[np.int64]

TableSlots = tuple[torch.Tensor, torch.Tensor]
"""A block table [slots, max_blocks] int32, and where it says that keys and values of a step go, [T] int64."""

LAST = (0,)
"""The token that one is sampled behind, counted from the last: a range for each row takes longer than all else."""


@dataclass
class InputBatch:
    """T tokens of R requests, request after request. Lists are on the host, tensors on the device.

    slots, starts, counts   R row, first position and number of tokens of each request
    positions               [T] int64   by which rotary embeddings turn: `places` in the texts, but behind images
    token_ids               [T] int64
    slot_mapping             [T] int64   where key and value go: block * block_size + offset
    block_table             [slots, max_blocks] int32   of all rows, indexed by slot
    sample_slots            [S] the row of each token that is sampled, in the order of the requests
    logits_indices          [S] int64   index, among the T, of the token that it follows
    sample_positions        [S] int64   its position
    windows                 for each block table of layers with a window, that and its slot mapping
    spans                   R times the spans among the tokens, see `PromptInput.spans`; empty: no request has any
    """

    slots: list[int]
    starts: list[int]
    counts: list[int]
    positions: torch.Tensor
    token_ids: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    sample_slots: list[int]
    logits_indices: torch.Tensor
    sample_positions: torch.Tensor
    windows: Sequence[TableSlots] = field(default=(), kw_only=True)
    spans: Sequence[Spans] = field(default=(), kw_only=True)

    @property
    def ends(self) -> torch.Tensor | None:
        """The end of the keys that each token sees in layers with spans, [T] int64; None: after the token itself."""
        if not self.spans:
            return None
        found = self.positions + 1
        token = 0
        for start, count, spans in zip(self.starts, self.counts, self.spans, strict=True):
            for first, end in spans:
                found[token + first - start : token + end - start] = end
            token += count
        return found

    def places(self) -> torch.Tensor:
        """The position of each token in its text, [T] int64."""
        found = _places(self.starts, self.counts)
        return torch.from_numpy(found).to(self.positions.device)


@dataclass(frozen=True)
class SampledTokens:
    """The S tokens that a step samples: rows, positions, and indices of the tokens that they follow in the step."""

    slots: list[int]
    positions: list[int]
    indices: list[int]


def sampled_tokens(scheduled: Sequence[ScheduledTokens]) -> SampledTokens:
    """The tokens that a step samples."""
    slots = []
    positions = []
    indices = []
    total = 0
    for item in scheduled:
        total += item.count
        end = item.start + item.count
        for behind in range(item.sampled - 1, -1, -1) if item.sampled != 1 else LAST:
            slots.append(item.slot)
            positions.append(end - behind)
            indices.append(total - 1 - behind)
    return SampledTokens(slots, positions, indices)


def spans_of(scheduled: Sequence[ScheduledTokens]) -> Sequence[Spans]:
    """`InputBatch.spans` of a step."""
    return [item.spans for item in scheduled] if any(item.spans for item in scheduled) else ()


def build_input_batch(rows: BatchRows, scheduled: Sequence[ScheduledTokens], block_size: int) -> InputBatch:
    """Read the step's tokens and slot mapping from the rows."""
    slots = [item.slot for item in scheduled]
    starts = [item.start for item in scheduled]
    counts = [item.count for item in scheduled]
    if max(counts) == 1:
        row, places = np.array(slots), np.array(starts)
    else:
        row, places = np.repeat(slots, counts), _places(starts, counts)
    columns, offsets = np.divmod(places, block_size)
    sampled = sampled_tokens(scheduled)
    device = rows.device
    within = torch.from_numpy(offsets).to(device)

    def slot_mapping(table: torch.Tensor) -> torch.Tensor:
        return torch.add(within, _entries(table, row, columns), alpha=block_size)

    return InputBatch(
        slots=slots,
        starts=starts,
        counts=counts,
        positions=_turned(rows, row, torch.from_numpy(places).to(device)),
        token_ids=_entries(rows.tokens, row, places),
        slot_mapping=slot_mapping(rows.block_table),
        block_table=rows.block_table,
        sample_slots=sampled.slots,
        logits_indices=torch.from_numpy(np.array(sampled.indices, np.int64)).to(device),
        sample_positions=torch.from_numpy(np.array(sampled.positions, np.int64)).to(device),
        windows=[(table, slot_mapping(table)) for table in rows.window_tables],
        spans=spans_of(scheduled),
    )


def _places(starts: Sequence[int], counts: Sequence[int]) -> IntegerArray:
    """The positions of the tokens of requests, one request after the other."""
    firsts = np.cumsum([0, *counts[:-1]])
    found: IntegerArray = np.arange(sum(counts)) + np.repeat(np.array(starts) - firsts, counts)
    return found


def _turned(rows: BatchRows, row: IntegerArray, places: torch.Tensor) -> torch.Tensor:
    """The positions of tokens at `places` [T] of their rows, by which rotary embeddings turn."""
    requests = (rows.requests[slot] for slot in dict.fromkeys(row.tolist()))
    if all(request is None or not request.spec.prompt.turn[1] for request in requests):
        return places
    first, shift = (part[torch.from_numpy(row).to(rows.device)] for part in rows.turns)
    return places + torch.where(places >= first, shift, 0)


def _entries(table: torch.Tensor, rows: IntegerArray, columns: IntegerArray) -> torch.Tensor:
    """Entries of `table [slots, columns]` int32, as int64 [T]; on a CPU numpy needs a third of PyTorch's time."""
    if table.device.type == "cpu":
        return torch.from_numpy(table.numpy()[rows, columns].astype(np.int64))
    return table[torch.from_numpy(rows).to(table.device), torch.from_numpy(columns).to(table.device)].long()
