"""The device view of one step: a flat run of tokens of many requests."""

from dataclasses import dataclass

import torch

from kvern.device.rows import BatchRows
from kvern.step import ScheduledTokens


@dataclass
class InputBatch:
    """T tokens of R requests, request after request. Lists are on the host, tensors on the device.

    slots, starts, counts   R row, first position and number of tokens of each request
    positions               [T] int64
    token_ids               [T] int64
    slot_mapping             [T] int64   where key and value go: block * block_size + offset
    block_table             [slots, max_blocks] int32   of all rows, indexed by slot
    sample_slots            rows that sample, in the order of the requests
    logits_indices          [S] int64   index of their last token among the T
    sample_positions        [S] int64   the position of the token that is sampled
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


def build_input_batch(rows: BatchRows, scheduled: list[ScheduledTokens], block_size: int) -> InputBatch:
    """Read the step's tokens and cache slots from the rows."""
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
    ends, total = [], 0
    for count in counts:
        total += count
        ends.append(total - 1)
    samples = [(end, item) for end, item in zip(ends, scheduled, strict=True) if item.sample]
    return InputBatch(
        slots=slots,
        starts=starts,
        counts=counts,
        positions=positions,
        token_ids=rows.tokens[row, positions].long(),
        slot_mapping=blocks * block_size + positions % block_size,
        block_table=rows.block_table,
        sample_slots=[item.slot for _, item in samples],
        logits_indices=torch.tensor([end for end, _ in samples], dtype=torch.int64, device=device),
        sample_positions=torch.tensor(
            [item.start + item.count for _, item in samples], dtype=torch.int64, device=device
        ),
    )
