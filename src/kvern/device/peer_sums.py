"""Sums over ranks through memory that their GPUs map of each other, for as few rows as that is faster for than NCCL."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvern.device.peer_memory import map_words
from kvern.kernels.norm import add_rms_norm
from kvern.kernels.peer_sum import PeerMemory, peer_sum, peer_sum_norm, slots_of, words_of

Time = Callable[[Sequence[Callable[[], object]]], float]

TIMED_ROWS = (1, 8, 16, 32, 64, 128, 256, 512)
TIMED_CALLS = 20
EPSILON = 1e-6


class PeerSums:
    """Of rows of `width` numbers of 16 bits, at most `most_rows` at a time: none before that is told."""

    def __init__(self, store: Any, rank: int, size: int, width: int, device: torch.device) -> None:
        """All ranks call this. Raises RuntimeError where memory cannot be mapped."""
        rows = slots_of(size, width)
        words, addresses = map_words(store, rank, size, device, words_of(size, rows, width))
        epochs = torch.zeros(rows, dtype=torch.int32, device=device)
        self._memory = PeerMemory(words, torch.tensor(addresses, device=device), epochs, rank, size, rows, width)
        self.most_rows = 0

    def takes(self, x: Tensor) -> bool:
        """Whether to sum `x` here."""
        fits = x.dim() == 2 and 0 < x.shape[0] <= self.most_rows and x.shape[1] == self._memory.width
        return fits and x.element_size() == 2 and x.is_contiguous()

    def sum(self, x: Tensor) -> Tensor:
        """What all ranks have of `x`, added up in their order in float32."""
        return peer_sum(x, self._memory)

    def sum_norm(self, x: Tensor, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Of the residual `hidden`, to which the sum of all ranks' `x` is added in place, the norm."""
        return peer_sum_norm(x, hidden, weight, epsilon, self._memory)

    def most_that_pay(self, through_nccl: Callable[[Tensor], Tensor], dtype: torch.dtype, time: Time) -> int:
        """Up to how many rows a sum with a norm is faster here; all ranks call this, and each has times of its own."""
        memory, most = self._memory, 0
        weight = torch.ones(memory.width, dtype=dtype, device=memory.buffers.device)
        for rows in TIMED_ROWS:
            if rows > memory.rows:
                break
            x, hidden = torch.zeros(2, rows, memory.width, dtype=dtype, device=weight.device)

            def other(x: Tensor = x, hidden: Tensor = hidden) -> Tensor:
                return add_rms_norm(hidden, through_nccl(x), weight, EPSILON)

            own = time([partial(self.sum_norm, x, hidden, weight, EPSILON)] * TIMED_CALLS)
            if own < time([other] * TIMED_CALLS):
                most = rows
        self.sum(x)  # which compiles it
        return most
