"""Steps of many rows in two halves: ranks add up what the one made while they compute the other.

    the device's stream   qkv a   qkv b   attention of all   output a   output b   MLP a   MLP b   qkv a   qkv b
    the group's                                                         sum a      sum b   sum a   sum b

Before a half's norm the device's stream waits for the half's sum.
"""

from torch import Tensor

from kvern.device.ranks import SumInFlight

HALVED_ROWS = 1024
"""Products of fewer than 512 rows take as long as reading their weights does, which halves do twice."""
HALVED_WORK = 2 * 10**11
"""Rows times a rank's weights of a layer: with less a host launches the halves' kernels more slowly than they run."""
TILE_ROWS = 128
"""Products take so many rows at a time: where the first half is a multiple, halves have as many tiles as all rows."""

SumsInFlight = tuple[SumInFlight, SumInFlight]
"""Of the first half and of the second."""


def least_rows(weights: int) -> int:
    """So many rows of a step are computed in halves by a layer of which a rank has so many weights."""
    return max(HALVED_ROWS, -(-HALVED_WORK // weights))


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Views of the rows of both halves of `x [T, width]`."""
    first = -(-x.shape[0] // (2 * TILE_ROWS)) * TILE_ROWS
    return x[:first], x[first:]


def joined(hidden: Tensor, update: Tensor | SumsInFlight | None) -> tuple[Tensor, Tensor | None]:
    """The residual and its update, for who knows no halves: sums in flight are added to the residual, in place."""
    if not isinstance(update, tuple):
        return hidden, update
    for half, late in zip(halves(hidden), update, strict=True):
        half.add_(late.wait())
    return hidden, None
