"""Sums and exchanges of rows through memory that GPUs of ranks map of each other, where NCCL is slower."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from kvern.kernels.norm import add_rms_norm
from kvern.kernels.peer_exchange import peer_gather, peer_sum_scattered
from kvern.kernels.peer_sum import coded_peer_sum_norm, peer_sum, peer_sum_norm
from kvern.kernels.peer_words import PeerMemory, addresses_of, memory_of, rows_kept
from kvern.kernels.quantize_rows import Coding, RowCodes
from kvern.ranks.peer_memory import map_words

Time = Callable[[Sequence[Callable[[], object]]], float]
Way = Literal["nccl", "whole", "parts"]
"""Through NCCL, or in either way of `peer_sum.py`."""
WAYS: tuple[Way, ...] = get_args(Way)

TIMED_ROWS = (1, 8, 16, 32, 64, 128, 256, 512)
TIMED_CALLS = 20
EPSILON = 1e-6


def mapped(
    store: Any, rank: int, size: int, lost: Tensor, row_words: int, device: torch.device, programs: int
) -> PeerMemory:
    """Memory of all ranks for rows of `row_words` words, as of `row_words_of`; they call this together.

    `lost`: the host's word, as of `addresses_of`. `programs`: no more than the processors of any. Raises RuntimeError
    where memory cannot be mapped.
    """
    rows = rows_kept(size, row_words)
    memories = map_words(store, "sums", rank, size, device, memory_of(size, rows, row_words))
    buffers = torch.tensor(addresses_of(memories, lost), device=device)
    epochs = torch.zeros(rows, dtype=torch.int32, device=device)
    return PeerMemory(memories[rank], buffers, epochs, rank, size, rows, row_words, programs)


class PeerSums:
    """Sums of rows of `width` numbers of a dtype; `ways` has the way for up to as many rows as each of TIMED_ROWS."""

    ways: Sequence[Way] = ()

    def __init__(self, memory: PeerMemory, width: int, dtype: torch.dtype) -> None:
        self._memory = memory
        self._width = width
        self._dtype = dtype

    def _way(self, x: Tensor) -> Way:
        place = bisect_left(TIMED_ROWS, x.shape[0])
        return self.ways[place] if place < len(self.ways) else "nccl"

    def takes(self, x: Tensor) -> bool:
        """Returns whether to sum `x` here."""
        fits = x.dim() == 2 and x.shape[0] > 0 and x.shape[1] == self._width
        return fits and x.dtype == self._dtype and x.is_contiguous() and self._way(x) != "nccl"

    def sum(self, x: Tensor) -> Tensor:
        """The sum of the `x` of all ranks, in their order, in float32."""
        return peer_sum(x, self._memory, parts=self._way(x) == "parts")

    def sum_norm(self, x: Tensor, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """The norm of the residual `hidden`, to which the sum of the `x` of all ranks is added in place."""
        return peer_sum_norm(x, hidden, weight, epsilon, self._memory, parts=self._way(x) == "parts")

    def sum_codes(self, x: Tensor, hidden: Tensor, weight: Tensor, epsilon: float, coding: Coding) -> RowCodes:
        """The codes that `coding` makes of the result of `sum_norm`."""
        if coding.group > self._width or not coding.block(self._width):
            return coding(self.sum_norm(x, hidden, weight, epsilon))
        return coded_peer_sum_norm(x, hidden, weight, epsilon, self._memory, coding, parts=self._way(x) == "parts")

    def fastest(self, through_nccl: Callable[[Tensor], Tensor], time: Time) -> list[Way]:
        """The way to sum each number of TIMED_ROWS with a norm; all ranks call this, and each has times of its own."""
        made = partial(torch.zeros, dtype=self._dtype, device=self._memory.buffers.device)
        weight, found = made(self._width), list[Way]()
        for rows in TIMED_ROWS:
            x, hidden = made(2, rows, self._width)

            def other(x: Tensor = x, hidden: Tensor = hidden) -> Tensor:
                return add_rms_norm(hidden, through_nccl(x), weight, EPSILON)

            given = x, hidden, weight, EPSILON
            calls: dict[Way, Callable[[], object]] = {"nccl": other}
            if rows <= self._memory.rows:
                calls["whole"] = partial(peer_sum_norm, *given, self._memory)
                if self._memory.size > 2:  # of two, one sends as much in two steps as in one
                    calls["parts"] = partial(peer_sum_norm, *given, self._memory, parts=True)
            seconds = {way: time([call] * TIMED_CALLS) for way, call in calls.items()}
            found.append(min(seconds, key=seconds.__getitem__))
        return found

    def compile_sums(self) -> None:
        """Compile those without a norm, before a step has to wait for it; all ranks call this."""
        x = torch.zeros(1, self._width, dtype=self._dtype, device=self._memory.buffers.device)
        for way in ("whole", "parts"):  # in the same order on all
            if way in self.ways:
                peer_sum(x, self._memory, parts=way == "parts")


class PeerExchange:
    """Rows of `width` numbers of a dtype that ranks have of their own: brought together, and sums of theirs.

    For at most `rows` of each rank.
    """

    rows = 0

    def __init__(self, memory: PeerMemory, width: int, dtype: torch.dtype) -> None:
        self._memory = memory
        self._width = width
        self._dtype = dtype

    def takes(self, x: Tensor, rows: int) -> bool:
        """Returns whether to bring `x` to others here, of `rows` a rank."""
        fits = x.dim() == 2 and 0 < rows <= self.rows and x.shape[1] == self._width
        return fits and x.dtype == self._dtype and x.is_contiguous()

    def gather(self, x: Tensor) -> Tensor:
        """`x [N, width]` of all ranks, one behind the other: `[size * N, width]`."""
        return peer_gather(x, self._memory)

    def sum_scattered(self, x: Tensor) -> Tensor:
        """The rows of this rank of the sum of the `x [size * N, width]` of all ranks, in their order, in float32."""
        return peer_sum_scattered(x, self._memory)

    def fastest(self, through_nccl: Callable[[Tensor], object], time: Time) -> int:
        """For how many rows of a rank, of TIMED_ROWS, both together are faster than `through_nccl`, as up to there.

        All ranks call this, and each has times of its own.
        """
        best, faster = 0, True
        for rows in TIMED_ROWS:
            if rows > self._memory.rows:
                break
            x = torch.zeros(rows, self._width, dtype=self._dtype, device=self._memory.buffers.device)
            here = time([lambda x=x: self.sum_scattered(self.gather(x))] * TIMED_CALLS)  # type: ignore[misc]
            faster = here < time([partial(through_nccl, x)] * TIMED_CALLS) and faster
            best = rows if faster else best
        return best
