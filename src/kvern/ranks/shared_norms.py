"""Norms of many rows that ranks share: each sums, adds and normalises some, and the device's copy engines move them.

    x of this rank -> rows to the ranks whose they are -> [sum, residual, norm of own rows] -> to all

A step's rows come in two halves, so that products of one run while rows of the other are moved; copies need no
processor of the device. Of the residual a rank has its own rows alone, until `make_whole`.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvern.kernels.shared_norm import await_flags, shared_norm

TURNS = 1024
"""The number of turns that flags tell apart: no rank is two turns ahead of another."""
MOST_RANKS = 64
"""For so many there are flags, behind which rows are aligned."""


class Half(NamedTuple):
    """A rank's memory for a half of a step's rows, as one of them sees it, flat.

    sent     [rows * width] and more, from all ranks; normals [rows * width], of all ranks
    flags    [2, MOST_RANKS] int32: whose rows are in `sent`, and in `normals`
    """

    sent: Tensor
    normals: Tensor
    flags: Tensor


def memory_of(size: int, rows: int, width: int, dtype: torch.dtype) -> int:
    """Returns how many int64 a rank's memory has, for halves of up to `rows` rows."""
    return 2 * _words_of_half(size, rows, width, dtype)


def _words_of_half(size: int, rows: int, width: int, dtype: torch.dtype) -> int:
    numbers = _padded(size, rows) * width * dtype.itemsize // 8
    return 2 * numbers + MOST_RANKS  # of which two flags are a word


def _padded(size: int, rows: int) -> int:
    return -(-rows // size) * size


class SharedNorms:
    """Shared norms of halves of up to `rows` rows of `width`, in `memories` of all ranks, which are -1 at first.

    All ranks call the same methods in the same order; on a GPU none of them waits. A step that ends halfway ends the
    ranks.
    """

    def __init__(
        self, memories: Sequence[Tensor], lost: Tensor, rank: int, rows: int, width: int, dtype: torch.dtype
    ) -> None:
        """`lost`: the word by which the host tells that a rank is gone; see `peer_words.addresses_of`."""
        self.rows = rows
        self.width = width
        self.dtype = dtype
        self._rank = rank
        self._size = len(memories)
        self._lost = lost
        self._halves = [[self._half(memory, half) for memory in memories] for half in range(2)]
        device = memories[rank].device
        self._turns = torch.arange(TURNS, dtype=torch.int32, device=device)
        self._turn = [0, 0]
        self._x: list[Tensor | None] = [None, None]
        on_gpu = device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._sent: list[Any] = [torch.cuda.Event() for _ in range(2 * on_gpu)]  # type: ignore[no-untyped-call]

    def _half(self, memory: Tensor, half: int) -> Half:
        words = _words_of_half(self._size, self.rows, self.width, self.dtype)
        numbers = (words - MOST_RANKS) // 2
        of_half = memory[half * words :][:words]
        sent, normals = (of_half[place * numbers :][:numbers].view(self.dtype) for place in range(2))
        return Half(sent, normals, of_half[2 * numbers :].view(torch.int32).view(2, MOST_RANKS))

    def begin(self, half: int, x: Tensor) -> None:
        """Send what this rank has of the sum of a half, `x [T, width]`, which is kept until it is added."""
        x = x.contiguous()
        self._x[half], self._turn[half] = x, (self._turn[half] + 1) % TURNS
        with self._copying():
            for other in self._others:
                rows = self._own(x.shape[0], other)
                sent = self._of_rows(self._halves[half][other].sent, self._most(x.shape[0]) * self._size)
                sent[self._rank * self._most(x.shape[0]) :][: len(rows)].copy_(x[rows.start : rows.stop])
                self._flag(half, other, 0)
            if self._sent:
                self._sent[half].record(self._stream)

    def norm(self, half: int, hidden: Tensor, weight: Tensor, epsilon: float) -> None:
        """Add to this rank's rows of `hidden [T, width]`, in place, what all have sent, and send their norm to all."""
        self._share(half, hidden, weight, epsilon)

    def normal(self, half: int, count: int) -> Tensor:
        """The norm of all `count` rows, until the next turn of this half."""
        own = self._halves[half][self._rank]
        await_flags(own.flags[1, : self._size], self._turn[half], self._lost, self._rank)
        return self._of_rows(own.normals, count)

    def make_whole(self, half: int, hidden: Tensor) -> None:
        """Add what all have sent to `hidden [T, width]`, of which all rows are here afterwards."""
        self._share(half, hidden)
        hidden.copy_(self.normal(half, hidden.shape[0]))

    def _share(self, half: int, hidden: Tensor, weight: Tensor | None = None, epsilon: float = 0.0) -> None:
        x, self._x[half] = self._x[half], None
        assert x is not None, "nothing was begun"
        own, rows = self._halves[half][self._rank], self._own(x.shape[0], self._rank)
        if self._sent:
            torch.cuda.current_stream(x.device).wait_event(self._sent[half])  # before the memory of x is another's
        normals = self._of_rows(own.normals, x.shape[0])
        most = self._most(x.shape[0])
        sent = self._of_rows(own.sent, most * self._size).view(self._size, most, -1)
        if rows:
            given = x, sent, hidden, normals, rows, own.flags[0], self._turn[half], self._lost, self._rank
            shared_norm(*given, weight, epsilon)
        else:  # or it would tell others of its next turn before they know of this one
            await_flags(own.flags[0, : self._size], self._turn[half], self._lost, self._rank)
        with self._copying():
            for other in self._others:
                theirs = self._of_rows(self._halves[half][other].normals, x.shape[0])
                theirs[rows.start : rows.stop].copy_(normals[rows.start : rows.stop])
                self._flag(half, other, 1)

    @property
    def _others(self) -> Sequence[int]:
        """The other ranks in an order in which no two ranks send to the same one."""
        return [(self._rank + step) % self._size for step in range(1, self._size)]

    def _most(self, count: int) -> int:
        """Rows of a rank, of so many; the last may have fewer."""
        return -(-count // self._size)

    def _own(self, count: int, rank: int) -> range:
        most = self._most(count)
        return range(min(rank * most, count), min((rank + 1) * most, count))

    def _of_rows(self, memory: Tensor, count: int) -> Tensor:
        return memory[: count * self.width].view(count, self.width)

    def _flag(self, half: int, other: int, kind: int) -> None:
        """Tell another rank that rows of this turn have come: behind them, as copies follow each other."""
        turn = self._turn[half]
        self._halves[half][other].flags[kind, self._rank : self._rank + 1].copy_(self._turns[turn : turn + 1])

    def _copying(self) -> Any:
        """Copies begun within follow those before, and what the device's stream has been given."""
        if self._stream is None:
            return contextlib.nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._turns.device))
        return torch.cuda.stream(self._stream)
