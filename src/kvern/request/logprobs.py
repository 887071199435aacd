"""Log-probabilities of tokens: packed from the step to the answer, and tables for those who read them there.

A row for each token, of 2 * (1 + most) + 1 numbers of 4 bytes:

    ids                int32    the token, then the `most` most probable ones, best first
    log-probabilities  float32  of these
    rank               int32    of the token

No object is made of an entry before somebody reads it.
"""

import functools
import struct
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar, overload

import msgspec

T = TypeVar("T", covariant=True)


class Logprob(msgspec.Struct, frozen=True, gc=False):
    """The log-probability (natural logarithm) of one token and its rank among all (1: the most probable)."""

    logprob: float
    rank: int
    token: str | None = None

    @property
    def decoded_token(self) -> str | None:
        """`token`, under the name that vLLM has for it."""
        return self.token


TokenLogprobs = dict[int, Logprob]
"""Tables by token id: the token at the position and, after it, the most probable ones."""


def row_bytes(most: int) -> int:
    """Returns the size of a row with the `most` most probable tokens."""
    return 4 * (2 * (1 + most) + 1)


class Row(msgspec.Struct, frozen=True, gc=False):
    """One row: ids and their log-probabilities, the token's first, and the token's rank."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    rank: int

    def by_id(self) -> dict[int, float]:
        """Returns the log-probabilities in order; the token is there once if it is among the most probable ones."""
        found = dict(zip(self.token_ids, self.logprobs, strict=True))
        found[self.token_ids[0]] = self.logprobs[0]
        return found

    def table(self, texts: Mapping[int, str]) -> TokenLogprobs:
        """Returns the row as a table with texts."""
        found: TokenLogprobs = {}
        for place, (token, logprob) in enumerate(zip(self.token_ids, self.logprobs, strict=True)):
            if token not in found:
                found[token] = Logprob(logprob, place or self.rank, texts[token])
        return found


class LogprobRows(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Packed rows of some tokens of one request."""

    most: int
    data: bytes

    def __len__(self) -> int:
        return len(self.data) // row_bytes(self.most)

    def __getitem__(self, rows: slice) -> "LogprobRows":
        first, end, _ = rows.indices(len(self))
        size = row_bytes(self.most)
        return LogprobRows(self.most, self.data[first * size : end * size])

    def rows(self) -> Iterator[Row]:
        """Returns the rows."""
        return _rows(self.data, 1 + self.most)

    def own(self) -> Sequence[float]:
        """Returns the log-probabilities of the tokens themselves."""
        numbers = memoryview(self.data).cast("f")
        return numbers[1 + self.most :: 2 * self.most + 3].tolist()


@functools.cache
def _layout(width: int) -> struct.Struct:
    return struct.Struct(f"={width}i{width}fi")


def _rows(data: bytes | bytearray, width: int) -> Iterator[Row]:
    return (Row(values[:width], values[width:-1], values[-1]) for values in _layout(width).iter_unpack(data))


def packed(token_ids: Sequence[int], logprobs: Sequence[float], rank: int) -> LogprobRows:
    """Returns the row of one token."""
    width = len(token_ids)
    return LogprobRows(width - 1, struct.pack(f"={width}i{width}fi", *token_ids, *logprobs, rank))


def joined(parts: Sequence[LogprobRows]) -> LogprobRows | None:
    """Returns rows of one size behind each other; None: there are no parts."""
    return LogprobRows(parts[0].most, b"".join([part.data for part in parts])) if parts else None


class Tables(Sequence[T]):
    """Tables that are made when they are read. Copies are plain lists."""

    @abstractmethod
    def _tables(self, first: int, end: int) -> Iterator[T]:
        """Makes some of them."""

    @overload
    def __getitem__(self, place: int) -> T: ...
    @overload
    def __getitem__(self, place: slice) -> list[T]: ...
    def __getitem__(self, place: int | slice) -> T | list[T]:
        if isinstance(place, slice):
            first, end, step = place.indices(len(self))
            return list(self._tables(first, end)) if step == 1 else list(self)[place]
        number = range(len(self))[place]
        return next(self._tables(number, number + 1))

    def __iter__(self) -> Iterator[T]:
        return self._tables(0, len(self))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)

    __hash__ = None  # type: ignore[assignment]


class LogprobTables(Tables[TokenLogprobs]):
    """The tables of tokens, which may grow."""

    def __init__(self, texts: Mapping[int, str]) -> None:
        """`texts`: of all tokens."""
        self.texts = texts
        self.most = 0
        """The number of most probable tokens in each table."""
        self._data = bytearray()

    def extend(self, rows: LogprobRows) -> None:
        """Adds rows; all have one size."""
        self.most = rows.most
        self._data += rows.data

    def rows(self, first: int = 0, end: int | None = None) -> Iterator[Row]:
        """Returns the rows from number `first` to before number `end`."""
        size = row_bytes(self.most)
        return _rows(self._data[first * size : None if end is None else end * size], 1 + self.most)

    def __len__(self) -> int:
        return len(self._data) // row_bytes(self.most)

    def _tables(self, first: int, end: int) -> Iterator[TokenLogprobs]:
        return (row.table(self.texts) for row in self.rows(first, end))


class PromptTables(Tables[TokenLogprobs | None]):
    """The tables of a prompt's tokens: None for the first ones, `told` for the others."""

    def __init__(self, missing: int, told: LogprobTables) -> None:
        self.missing = missing
        self.told = told

    def __len__(self) -> int:
        return self.missing + len(self.told)

    def _tables(self, first: int, end: int) -> Iterator[TokenLogprobs | None]:
        nothing = [None] * (min(end, self.missing) - first)
        return chain(nothing, self.told._tables(max(first - self.missing, 0), max(end - self.missing, 0)))
