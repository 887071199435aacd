"""The device view of one step: a flat run of tokens of many requests."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvern.device.rows import BatchRows
from kvern.step import ScheduledTokens

LAST = (0,)
"""The token that one is sampled behind, counted from the last: a range for each row takes longer than all else."""


@dataclass
class InputBatch:
    """T tokens of R requests, request after request. Lists are on the host, tensors on the device.

    slots, starts, counts   R row, first position and number of tokens of each request
    positions               [T] int64
    token_ids               [T] int64
    slot_mapping             [T] int64   where key and value go: block * block_size + offset
    block_table             [slots, max_blocks] int32   of all rows, indexed by slot
    sample_slots            [S] the row of each token that is sampled, in the order of the requests
    logits_indices          [S] int64   index, among the T, of the token that it follows
    sample_positions        [S] int64   its position
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


@dataclass(frozen=True)
class SampledTokens:
    """Of the S tokens that a step samples: rows, positions, and indices of the tokens that they follow among its T."""

    slots: list[int]
    positions: list[int]
    indices: list[int]


def sampled_tokens(scheduled: Sequence[ScheduledTokens]) -> SampledTokens:
    """What a step samples."""
    slots, positions, indices, total = [], [], [], 0
    for item in scheduled:
        total += item.count
        end = item.start + item.count
        for behind in range(item.sampled - 1, -1, -1) if item.sampled != 1 else LAST:
            slots.append(item.slot)
            positions.append(end - behind)
            indices.append(total - 1 - behind)
    return SampledTokens(slots, positions, indices)


def build_input_batch(rows: BatchRows, scheduled: Sequence[ScheduledTokens], block_size: int) -> InputBatch:
    """Read the step's tokens and slot mapping from the rows."""
    device = rows.device
    slots = [item.slot for item in scheduled]
    starts = [item.start for item in scheduled]
    counts = [item.count for item in scheduled]
    if max(counts) == 1:
        positions = torch.tensor(starts, device=device)
        row = torch.tensor(slots, device=device)
    else:
        positions = torch.cat([torch.arange(item.start, item.start + item.count) for item in scheduled]).to(device)
        row = torch.repeat_interleave(torch.tensor(slots), torch.tensor(counts)).to(device)
    blocks = rows.block_table[row, positions // block_size].long()
    sampled = sampled_tokens(scheduled)
    return InputBatch(
        slots=slots,
        starts=starts,
        counts=counts,
        positions=positions,
        token_ids=rows.tokens[row, positions].long(),
        slot_mapping=blocks * block_size + positions % block_size,
        block_table=rows.block_table,
        sample_slots=sampled.slots,
        logits_indices=torch.tensor(sampled.indices, dtype=torch.int64, device=device),
        sample_positions=torch.tensor(sampled.positions, dtype=torch.int64, device=device),
    )
