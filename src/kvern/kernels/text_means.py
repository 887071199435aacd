"""The mean state of each of some texts that stand one behind the other."""

import torch
import triton
import triton.language as tl

from kvern.kernels.launch import Launcher, cdiv

ROWS, COLUMNS = 64, 64
"""The sizes of a tile."""


@Launcher
@triton.jit(do_not_specialize_on_alignment=["starts", "counts"])
def _text_means_kernel(
    states: tl.tensor,
    starts: tl.tensor,
    counts: tl.tensor,
    out: tl.tensor,
    width: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    text = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    count = tl.load(counts + text)
    rows = states + tl.load(starts + text).to(tl.int64) * width
    total = tl.zeros([COLUMNS], tl.float32)
    for first in tl.range(0, count, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < count)[:, None] & (column < width)[None, :]
        part = tl.load(rows + row.to(tl.int64)[:, None] * width + column[None, :], mask=inside, other=0.0)
        total += tl.sum(part.to(tl.float32), axis=0)
    tl.store(out + text * width + column, total / count, mask=column < width)


def text_means(states: torch.Tensor, starts: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Returns the means of `states [T, width]`, contiguous: float32 `[S, width]`.

    `starts` and `counts`, int32 `[S]`, are the index of each text's first token among the T, and the number of its
    tokens. Reads the states once.
    """
    texts, width = len(starts), states.shape[1]
    out = torch.empty(texts, width, dtype=torch.float32, device=states.device)
    _text_means_kernel[(texts, cdiv(width, COLUMNS))](states, starts, counts, out, width, ROWS, COLUMNS)
    return out
