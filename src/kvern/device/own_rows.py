"""Rows of which each rank has its own, brought together where ranks share a layer (data-parallel attention)."""

import socket
from pathlib import Path

import torch
from torch import Tensor

from kvern.device.ranks import Ranks


def rank_of_own_rows(rank: int, size: int) -> Ranks:
    """Rank `rank` of `size` that share experts alone."""
    return Ranks(own_rows=OwnRows(Ranks(rank, size)))


class OwnRows:
    """This rank's rows `[T, width]` of a step, beside those that the other `ranks` have of other requests.

    All ranks call the same methods in the same order. Rows travel padded to as many as the rank with most of them has.
    Until `agree` is called all ranks have equally many, as in measurements at start.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._most: int | None = None
        self._places: list[int] | None = None
        """Of rows among those that are padded; None: none is."""

    def connect(
        self,
        place: Path | str,
        device: torch.device,
        seconds: float,
        kernels: frozenset[str],
        *,
        ordered: bool,
        listener: socket.socket | None,
    ) -> None:
        """As `Ranks.connect`."""
        self.ranks.connect(place, device, seconds, kernels, ordered=ordered, listener=listener, on_host=True)

    def agree(self, count: int) -> int:
        """This rank's next step has so many rows: how many that of the rank with most has."""
        counts = self.ranks.numbers(count)
        self._most = most = max(counts)
        self._places = None
        if min(counts) < most:
            self._places = [rank * most + row for rank, count in enumerate(counts) for row in range(count)]
        return most

    def gather(self, x: Tensor) -> Tensor:
        """The rows of all ranks `[N, width]`, on each of them, of this one's `x [T, width]`."""
        most = len(x) if self._most is None else self._most
        padded = x if len(x) == most else torch.cat((x, x.new_zeros(most - len(x), x.shape[1])))
        rows = self.ranks.gather(padded.contiguous())
        return rows if self._places is None else rows[self._places]

    def sum_scattered(self, x: Tensor, count: int) -> Tensor:
        """Of the sum of what all ranks have for the rows of all, `x [N, width]`, this rank's own `[count, width]`."""
        if self._places is not None:
            assert self._most is not None
            padded = x.new_zeros(self.ranks.size * self._most, x.shape[1])
            padded[self._places] = x
            x = padded
        return self.ranks.sum_scattered(x)[:count]
