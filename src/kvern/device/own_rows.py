"""Rows of which each rank has its own, brought together where ranks share a layer (data-parallel attention)."""

import socket
from pathlib import Path

import torch
from torch import Tensor

from kvern.device.ranks import Ranks
from kvern.device.transfer import upload

NO_ROOM = -1, -1, -1


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
        self.room: list[int] | None = None
        """What a captured step of all ranks has to have room for; None: the step is launched kernel by kernel."""
        self._counts: list[int] = []
        """Rows of each rank; empty: all have equally many."""
        self._places: Tensor | None = None
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

    def agree(self, count: int, room: tuple[int, int, bool] | None) -> int:
        """This rank's next step has so many rows: how many that of the rank with most has.

        `room`: what a captured step has to have room for that does this one, decodes and tokens of prompts, and whether
        it must be one of decodes alone; None: there can be none. If there is one that has room for whatever any of them
        has, all replay it.
        """
        told = self.ranks.numbers(count, *(room or NO_ROOM))
        self._counts, self._places = [first for first, *_ in told], None
        rooms = [tuple(wanted) for _, *wanted in told]
        decodes, tokens, is_plain = map(max, zip(*rooms, strict=True))
        self.room = None if NO_ROOM in rooms or (is_plain and tokens) else [decodes, tokens]
        return max(self._counts)

    def gather(self, x: Tensor) -> Tensor:
        """The rows of all ranks `[N, width]`, on each of them, of this one's `x [T, width]`."""
        most = max(self._counts, default=len(x))
        padded = x if len(x) == most else torch.cat((x, x.new_zeros(most - len(x), x.shape[1])))
        rows, places = self.ranks.gather(padded.contiguous()), self._places_of_rows(most)
        return rows if places is None else rows.index_select(0, places)

    def sum_scattered(self, x: Tensor, count: int) -> Tensor:
        """Of the sum of what all ranks have for the rows of all, `x [N, width]`, this rank's own `[count, width]`."""
        most = max(self._counts, default=count)
        places = self._places_of_rows(most)
        if places is not None:
            x = x.new_zeros(self.ranks.size * most, x.shape[1]).index_copy_(0, places, x)
        return self.ranks.sum_scattered(x)[:count]

    def _places_of_rows(self, most: int) -> Tensor | None:
        """Of the rows of all ranks among those that are padded, [N] int64; None: none is.

        They are sent once for a step, and not at all for one that is replayed.
        """
        if self._places is None and min(self._counts, default=most) < most:
            places = [rank * most + row for rank, count in enumerate(self._counts) for row in range(count)]
            self._places = upload(places, torch.int64, self._device)
        return self._places
