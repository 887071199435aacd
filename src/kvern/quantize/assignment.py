"""The precision of each unit of a model: the best assignment under a budget of bits, or of loss.

This is a multiple-choice knapsack: each unit has one choice, and sizes and losses add up. All assignments that are best
for some budget are found at once, by adding one unit after another and dropping those that another beats in both size
and loss (Nemhauser and Ullmann, 1969). That is exact; beyond `MOST_POINTS` assignments only the best of each of that
many equal steps of size is kept, which costs less than one step.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvern.errors import ConfigError

MOST_POINTS = 1 << 14


class Choice(NamedTuple):
    """One precision of a unit: its `size` in bits, and the loss that it causes alone."""

    size: int
    loss: float


class Frontier(NamedTuple):
    """Assignments of which none is both smaller and better than another, from the smallest on.

    `sizes [N]` int64 in bits, `losses [N]` float64 falling; `taken` and `before` tell, for each unit, the choice of
    each assignment so far, and which one it was before the unit.
    """

    sizes: NDArray[np.int64]
    losses: NDArray[np.float64]
    taken: tuple[NDArray[np.int64], ...]
    before: tuple[NDArray[np.int64], ...]

    def choices(self, point: int) -> list[int]:
        """The index of each unit's choice in the assignment of index `point`."""
        chosen = []
        for taken, before in zip(reversed(self.taken), reversed(self.before), strict=True):
            chosen.append(int(taken[point]))
            point = int(before[point])
        return chosen[::-1]

    def within_size(self, bits: float) -> int:
        """The assignment of least loss with at most `bits` bits. Raises ConfigError."""
        point = int(np.searchsorted(self.sizes, bits, side="right")) - 1
        if point < 0:
            raise ConfigError(f"a budget of {bits:.0f} bits is below the {int(self.sizes[0])} of the smallest choices")
        return point

    def within_loss(self, loss: float) -> int:
        """The smallest assignment of at most this loss, or that of least loss if none is."""
        return min(int(np.searchsorted(-self.losses, -loss, side="left")), len(self.losses) - 1)


def frontier(units: Sequence[Sequence[Choice]]) -> Frontier:
    """All best assignments of units that have these choices."""
    sizes, losses = np.zeros(1, np.int64), np.zeros(1)
    taken, before = [], []
    for choices in units:
        all_sizes = np.add.outer([choice.size for choice in choices], sizes).ravel()
        all_losses = np.add.outer([max(choice.loss, 0.0) for choice in choices], losses).ravel()
        kept = _undominated(all_sizes, all_losses)
        taken.append(kept // len(sizes))
        before.append(kept % len(sizes))
        sizes, losses = all_sizes[kept], all_losses[kept]
    return Frontier(sizes, losses, tuple(taken), tuple(before))


def _undominated(sizes: NDArray[np.int64], losses: NDArray[np.float64]) -> NDArray[np.int64]:
    """Indices of assignments that no other beats, ordered by size; of too many, the best of each step."""
    order = np.lexsort((losses, sizes))
    best = np.minimum.accumulate(losses[order])
    kept: NDArray[np.int64] = order[np.concatenate(([True], best[1:] < best[:-1]))]
    if len(kept) > MOST_POINTS:
        span = int(sizes[kept[-1]] - sizes[kept[0]])
        steps = (sizes[kept] - sizes[kept[0]]) * MOST_POINTS // (span + 1)
        last = np.concatenate((steps[1:] != steps[:-1], [True]))
        last[0] = True  # the smallest assignment is always possible
        kept = kept[last]
    return kept
