"""Leaves rows of logits what bit masks allow, in one pass that reads little more than it writes."""

import torch
import triton
import triton.language as tl

BLOCK = 4096


@triton.jit
def _restrict_kernel(logits: tl.tensor, rows: tl.tensor, masks: tl.tensor, vocabulary, width, BLOCK: tl.constexpr):
    mask = masks + tl.program_id(0) * width
    scores = logits + tl.load(rows + tl.program_id(0)).to(tl.int64) * vocabulary
    possible = 0
    start = 0
    while start < vocabulary and possible == 0:
        token = start + tl.arange(0, BLOCK)
        inside = token < vocabulary
        allowed = (tl.load(mask + token // 32, mask=inside, other=0) >> (token % 32)) & 1
        values = tl.load(scores + token, mask=inside, other=float("-inf")).to(tl.float32)
        possible = tl.max(tl.where(values != float("-inf"), allowed, 0), axis=0)
        start += BLOCK
    for start in tl.range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < vocabulary
        allowed = (tl.load(mask + token // 32, mask=inside, other=0) >> (token % 32)) & 1
        values = tl.load(scores + token, mask=inside, other=0.0).to(tl.float32)
        values = tl.where(possible != 0, values, 0.0)
        tl.store(scores + token, tl.where(allowed != 0, values, float("-inf")), mask=inside)


def restrict(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """Masks logits like `kvern.structured.masks.restrict`."""
    vocabulary, width = logits.shape[1], masks.shape[1]
    _restrict_kernel[(len(rows),)](logits, rows, masks, vocabulary, width, BLOCK, num_warps=16)
