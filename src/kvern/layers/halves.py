"""Steps of many rows in two halves: ranks move rows of the one while they compute the other.

    the device's stream   .. down b   qkv a   qkv b   attention of all   output a   output b   MLP a   gate, up b ..
    copies                a to all    b sums  b to all                              a sums     b sums  a sums

A layer leaves its last product to the next one, which has rows moved meanwhile.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kvern.ranks.shared_norms import SharedNorms

HALVED_ROWS = 1024
"""Products of fewer than 512 rows take as long as reading their weights does, which halves do twice."""
HALVED_WORK = 4 * 10**11
"""Rows times a rank's weights of a layer: with less a host begins the halves' copies more slowly than products run."""
TILE_ROWS = 128
"""Products take so many rows at a time: where the first half is a multiple, halves have as many tiles as all rows."""


class UpdateInHalves:
    """An update for the next layer to add: the first half is being sent, the second half is not yet computed."""

    def __init__(self, norms: "SharedNorms", compute: Callable[[], Tensor]) -> None:
        self.norms = norms
        self._compute: Callable[[], Tensor] | None = compute

    def begin_second(self) -> None:
        """Compute it, once, and send it to the ranks that sum."""
        compute, self._compute = self._compute, None  # with what it multiplies
        assert compute is not None, "it was computed"
        self.norms.begin(1, compute())


Update = Tensor | UpdateInHalves | None
"""The rows that a layer leaves to be added to the residual."""


def least_rows(weights: int) -> int:
    """So many rows of a step are computed in halves by a layer of which a rank has so many weights."""
    return max(HALVED_ROWS, -(-HALVED_WORK // weights))


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Views of the rows of both halves of `x [T, width]`."""
    first = -(-x.shape[0] // (2 * TILE_ROWS)) * TILE_ROWS
    return x[:first], x[first:]


def is_halved(halved_rows: range, hidden: Tensor) -> bool:
    """Return whether a layer that halves these numbers of rows computes `hidden` in halves.

    A CUDA graph cannot: flags tell of turns that never come again.
    """
    return len(hidden) in halved_rows and not (hidden.is_cuda and torch.cuda.is_current_stream_capturing())


def joined(hidden: Tensor, update: Update) -> tuple[Tensor, Tensor | None]:
    """The residual and its update without halves, which are added to the residual in place."""
    if not isinstance(update, UpdateInHalves):
        return hidden, update
    update.begin_second()
    for half, rows in enumerate(halves(hidden)):
        update.norms.make_whole(half, rows)
    return hidden, None
