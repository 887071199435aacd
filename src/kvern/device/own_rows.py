"""Rows of which each rank has its own, brought together where ranks share a layer (data-parallel attention)."""

import socket
from pathlib import Path

import torch
from torch import Tensor

from kvern.device.ranks import Ranks
from kvern.device.transfer import upload


def rank_of_own_rows(rank: int, size: int) -> Ranks:
    """Rank `rank` of `size` that share experts alone."""
    return Ranks(own_rows=OwnRows(Ranks(rank, size)))


class OwnRows:
    """This rank's rows `[T, width]` of a step, beside those that the other `ranks` have of other requests.

    All ranks call the same methods in the same order. Rows travel padded to as many as the rank with most of them has.
    Until `agree` is called all ranks have equally many, as in measurements at start and in captured steps.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.most_decodes = 0
        """Rows of the rank with most, of a step of decodes alone on all ranks; 0: it is another."""
        self._most: int | None = None
        self._places: Tensor | None = None
        """Of rows among those that are padded, [N] int64; None: none is."""
        self._device = torch.device("cpu")

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
        self._device = device
        self.ranks.connect(place, device, seconds, kernels, ordered=ordered, listener=listener, on_host=True)

    def agree(self, count: int, *, decodes: bool) -> int:
        """This rank's next step has so many rows: how many that of the rank with most has.

        `decodes`: each of them is a request's one, so that the step may be captured; it is if all ranks say so.
        """
        told = self.ranks.numbers(2 * count + decodes)
        counts = [number // 2 for number in told]
        self._most = most = max(counts)
        self.most_decodes = most if all(number % 2 for number in told) else 0
        self._places = None
        if min(counts) < most:
            places = [rank * most + row for rank, count in enumerate(counts) for row in range(count)]
            self._places = upload(places, torch.int64, self._device)
        return most

    def gather(self, x: Tensor) -> Tensor:
        """The rows of all ranks `[N, width]`, on each of them, of this one's `x [T, width]`."""
        most = len(x) if self._most is None else self._most
        padded = x if len(x) == most else torch.cat((x, x.new_zeros(most - len(x), x.shape[1])))
        rows = self.ranks.gather(padded.contiguous())
        return rows if self._places is None else rows.index_select(0, self._places)

    def sum_scattered(self, x: Tensor, count: int) -> Tensor:
        """Of the sum of what all ranks have for the rows of all, `x [N, width]`, this rank's own `[count, width]`."""
        if self._places is not None:
            assert self._most is not None
            x = x.new_zeros(self.ranks.size * self._most, x.shape[1]).index_copy_(0, self._places, x)
        return self.ranks.sum_scattered(x)[:count]
