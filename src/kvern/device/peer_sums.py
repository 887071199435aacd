"""Sums over ranks through memory that their GPUs map of each other, for as few rows as that is faster for than NCCL."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvern.device.peer_memory import map_words
from kvern.kernels.norm import add_rms_norm
from kvern.kernels.peer_sum import PeerMemory, peer_sum, peer_sum_norm, row_words_of, slots_of, words_of

Time = Callable[[Sequence[Callable[[], object]]], float]

TIMED_ROWS = (1, 8, 16, 32, 64, 128, 256, 512)
TIMED_CALLS = 20
EPSILON = 1e-6


class PeerSums:
    """Of rows of `width` numbers of a dtype, at most `most_rows` at a time: none before that is told."""

    def __init__(self, store: Any, rank: int, size: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        """All ranks call this. Raises RuntimeError where memory cannot be mapped."""
        row_words = row_words_of(width, dtype)
        rows = slots_of(size, row_words)
        words, addresses = map_words(store, rank, size, device, words_of(size, rows, row_words))
        epochs = torch.zeros(rows, dtype=torch.int32, device=device)
        self._memory = PeerMemory(words, torch.tensor(addresses, device=device), epochs, rank, size, rows, row_words)
        self._width, self._dtype, self._device = width, dtype, device
        self.most_rows = 0

    def takes(self, x: Tensor) -> bool:
        """Whether to sum `x` here."""
        fits = x.dim() == 2 and 0 < x.shape[0] <= self.most_rows and x.shape[1] == self._width
        return fits and x.dtype == self._dtype and x.is_contiguous()

    def sum(self, x: Tensor) -> Tensor:
        """What all ranks have of `x`, added up in their order in float32."""
        return peer_sum(x, self._memory)

    def sum_norm(self, x: Tensor, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Of the residual `hidden`, to which the sum of all ranks' `x` is added in place, the norm."""
        return peer_sum_norm(x, hidden, weight, epsilon, self._memory)

    def most_that_pay(self, through_nccl: Callable[[Tensor], Tensor], time: Time) -> int:
        """Up to how many rows a sum with a norm is faster here; all ranks call this, and each has times of its own."""
        made = partial(torch.zeros, dtype=self._dtype, device=self._device)
        weight, most = made(self._width), 0
        for rows in TIMED_ROWS:
            if rows > self._memory.rows:
                break
            x, hidden = made(2, rows, self._width)

            def other(x: Tensor = x, hidden: Tensor = hidden) -> Tensor:
                return add_rms_norm(hidden, through_nccl(x), weight, EPSILON)

            own = time([partial(self.sum_norm, x, hidden, weight, EPSILON)] * TIMED_CALLS)
            if own < time([other] * TIMED_CALLS):
                most = rows
        self.sum(x)  # which compiles it
        return most
