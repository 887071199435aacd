"""Capture of kernel calls: they are repeated in one call, without Python between them, like CUDA graphs on a GPU.

During the capture functions compute as usual and their kernel calls are recorded. Their allocations move to memory that
all programs share, since only one runs at a time; a tensor's memory is reused after its last call.
"""

import ctypes
import logging
import struct
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kvern.cpu.library import CODE, INTEGER, NUMBER, POINTER, captured, function, replayed

logger = logging.getLogger("kvern")

ALIGNMENT = 64
"""Bytes of a cache line."""
ALLOCATES = {torch.empty, torch.empty_like, Tensor.new_empty}
DESCRIBES = {"__get__", "__len__", "data_ptr", "dim", "element_size", "is_contiguous", "numel", "size", "stride"}
"""Functions that describe a tensor without reading its numbers."""
VIEWS = {"__get__", "__getitem__"}
"""Functions with such names that do not change their arguments."""
STRUCTURES = (ctypes.Structure, ctypes.Array)

_replay = function("kvern_replay", POINTER, INTEGER)
_replay_repeated = function("kvern_replay_repeated", POINTER, INTEGER, INTEGER, POINTER, INTEGER)
_replay_timed = function("kvern_replay_timed", POINTER, INTEGER, POINTER, INTEGER, POINTER)


class Uncapturable(Exception):
    """Raised if PyTorch computes something during a capture; the message names the function."""


class Memory:
    """The working memory that programs share; it grows with the largest program."""

    def __init__(self) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8)

    def reserve(self, size: int) -> None:
        """Provides at least `size` bytes; the memory may move."""
        if size > len(self.bytes):
            self.bytes = torch.empty(size, dtype=torch.uint8)


class _Allocations(TorchFunctionMode):
    """Records allocations and refuses computation by PyTorch.

    Dispatch modes, which also see calls from C++, would catch more, but the first one imports a compiler, which takes
    seconds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in ALLOCATES:
            self.made.append(result)
            return result
        name = func.__name__
        changes = "out" in (kwargs or {}) or (name.endswith("_") and name not in VIEWS)
        given = {_storage(item) for item in args if isinstance(item, Tensor)} - {None}
        for item in result if isinstance(result, list | tuple) else [result]:
            is_allowed = _storage(item) in given and not changes if isinstance(item, Tensor) else name in DESCRIBES
            if not is_allowed:
                raise Uncapturable(f"PyTorch computes {name}")
        return result


def _storage(tensor: Tensor) -> int | None:
    """The address of the memory that a tensor views; None: a library's own format, as oneDNN's weights are."""
    return None if tensor.layout != torch.strided else tensor.untyped_storage().data_ptr()


@dataclass
class Buffer:
    """An allocation: its bytes, the calls between which it is used, and its offset in the working memory."""

    address: int
    size: int
    first: int
    last: int = -1
    offset: int = -1


class _Timed(NamedTuple):
    """The marks of some stages: their codes, and [2, N] places and times, each of which has an address."""

    codes: list[int]
    memory: "np.ndarray[tuple[int, int], np.dtype[np.int64]]"
    addresses: tuple[int, int]


class Program:
    """The captured calls of several stages, each of which can be replayed alone.

    Each stage takes the results of the one before. Raises Uncapturable if a stage lets PyTorch compute. The calls may
    read `kept` and tensors of other owners, who must not move them.
    """

    def __init__(self, memory: Memory, kept: Any, *stages: Callable[..., tuple[Tensor, ...]]) -> None:
        self._memory, ends = memory, [0]
        results: list[tuple[Tensor, ...]] = []
        with captured() as (calls, self._marks), _Allocations() as allocations:
            for stage in stages:
                results.append(stage(*(results[-1] if results else ())))
                ends.append(len(calls))
        self._kept = kept, [item for call in calls for item in call.given if isinstance(item, STRUCTURES)]
        made = sorted(allocations.made, key=Tensor.data_ptr)
        buffers = [Buffer(item.data_ptr(), item.nbytes, len(calls)) for item in made if item.nbytes]
        numbers: list[int] = []
        addresses: list[tuple[int, Buffer, int]] = []  # place among the numbers, and what of which buffer is there
        starts = []
        for index, call in enumerate(calls):
            starts.append(len(numbers))
            numbers += replayed(call.name), len(call.takes)
            for take, value in zip(call.takes, call.given, strict=True):
                bits = _bits(take, value)
                buffer = _owner(buffers, bits) if take is POINTER else None
                if buffer is not None:
                    buffer.first, buffer.last = min(buffer.first, index), index
                    addresses.append((len(numbers), buffer, bits - buffer.address))
                numbers.append(bits)
        described = [[_Result(buffers, item) for item in items] for items in results]
        for result in chain(*described):
            result.buffer.last = len(calls)
        memory.reserve(place([buffer for buffer in buffers if buffer.last >= 0]))
        self._numbers, self._described = np.array(numbers, dtype=np.uint64), described
        self._places = [place for place, _, _ in addresses]
        self._offsets = np.array([buffer.offset + begin for _, buffer, begin in addresses], dtype=np.uint64)
        self._ends, self._calls = ends, [self._numbers.ctypes.data + 8 * start for start in starts]
        self._results: list[tuple[Tensor, ...]] = []
        self._timed: dict[tuple[int, int], _Timed] = {}
        self._move(memory.bytes)
        for view, found in zip(chain(*self._results), chain(*results), strict=True):
            view.copy_(found)

    def run(self, first: int, last: int) -> tuple[Tensor, ...]:
        """Make the calls of stages, up to the last: its results, which are valid until another program runs."""
        if self._memory.bytes is not self._within:
            self._move(self._memory.bytes)
        _replay(self._calls[self._ends[first]], self._ends[last + 1] - self._ends[first])
        return self._results[last]

    def repeat(self, times: int, starts: Tensor) -> None:
        """Make all calls so many times; after each, `starts` [R] int64, which they may read, are one higher."""
        if self._memory.bytes is not self._within:
            self._move(self._memory.bytes)
        _replay_repeated(self._calls[0], self._ends[-1], times, starts.data_ptr(), len(starts))

    def run_timed(self, first: int, last: int) -> tuple[tuple[Tensor, ...], list[int], list[int]]:
        """Do as `run`, and take the time at each mark of these stages: also the marks' codes, and nanoseconds."""
        if self._memory.bytes is not self._within:
            self._move(self._memory.bytes)
        begin, end = self._ends[first], self._ends[last + 1]
        if (timed := self._timed.get((first, last))) is None:
            inner = [(place - begin, code) for place, code in self._marks if begin <= place <= end]
            memory = np.array([[place for place, _ in inner], [0] * len(inner)], dtype=np.int64)
            addresses = memory.ctypes.data, memory.ctypes.data + memory[0].nbytes
            timed = self._timed[first, last] = _Timed([code for _, code in inner], memory, addresses)
        places, times = timed.addresses
        _replay_timed(self._calls[begin], end - begin, places, len(timed.codes), times)
        return self._results[last], timed.codes, timed.memory[1].tolist()

    def _move(self, memory: Tensor) -> None:
        self._within = memory
        self._numbers[self._places] = self._offsets + np.uint64(memory.data_ptr())
        self._results = [tuple(result.within(memory) for result in items) for items in self._described]


def capture(steps: str, make: Callable[[], Program]) -> Program | None:
    """The program that `make` captures; None if it cannot be captured, and the log says why.

    `steps` names the affected steps there. They then run uncaptured: slower, and with the model's own error if it has
    one. That PyTorch computes a part is no fault: mixtures of experts, for instance.
    """
    try:
        with torch.inference_mode():
            return make()
    except Uncapturable as error:
        logger.info("%s are not captured: %s", steps, error)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        logger.warning("%s are not captured, so they are slower: %s", steps, " ".join(reason.split()))
    return None


class _Result:
    """A contiguous result of a stage, and its place in a buffer."""

    def __init__(self, buffers: Sequence[Buffer], tensor: Tensor) -> None:
        found = _owner(buffers, tensor.data_ptr())
        assert found is not None, "a result is no tensor that the stages made"
        assert tensor.is_contiguous(), "a result has gaps"
        self.buffer, self._begin = found, tensor.data_ptr() - found.address
        self._dtype = tensor.dtype
        self._shape = tensor.shape
        self._size = tensor.nbytes

    def within(self, memory: Tensor) -> Tensor:
        """A view of this tensor in the working memory."""
        first = self.buffer.offset + self._begin
        return memory[first : first + self._size].view(self._dtype).view(self._shape)


def _bits(take: Any, value: Any) -> int:
    """An argument of a function as the 64 bits that `sources/replay.h` reads."""
    if take is NUMBER:
        return int.from_bytes(struct.pack("<f", value), "little")
    if take in (INTEGER, CODE):
        return int(value) & (1 << 64) - 1
    return 0 if value is None else value if isinstance(value, int) else ctypes.addressof(value)


def _owner(buffers: Sequence[Buffer], address: int) -> Buffer | None:
    """The buffer that contains an address; `buffers` are sorted by address."""
    place = bisect_right(buffers, address, key=lambda buffer: buffer.address) - 1
    if place < 0 or address >= buffers[place].address + buffers[place].size:
        return None
    return buffers[place]


def place(buffers: Sequence[Buffer]) -> int:
    """Give each buffer the first room that no other has at the same time; the bytes that all take."""
    size = 0
    placed: list[Buffer] = []
    for buffer in sorted(buffers, key=lambda item: item.first):
        offset = 0
        for other in placed:  # by offset
            if other.last >= buffer.first:
                if other.offset - offset >= buffer.size:
                    break
                offset = max(offset, -(-(other.offset + other.size) // ALIGNMENT) * ALIGNMENT)
        buffer.offset = offset
        placed.append(buffer)
        placed.sort(key=lambda item: item.offset)
        size = max(size, offset + buffer.size)
    return size
