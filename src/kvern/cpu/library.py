"""The compiled kernels in this process: functions of C, called with the addresses of tensors."""

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

POINTER = ctypes.c_void_p
INTEGER = ctypes.c_int64
CODE = ctypes.c_int32
NUMBER = ctypes.c_float
"""Argument types: addresses (None is null), counts and sizes, codes of dtypes and formats, float32 numbers."""

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.float8_e4m3fn: 3}
"""Codes of the dtypes of tensors, as `sources/numbers.h` has them."""


def fields(names: str, kind: Any) -> list[tuple[str, Any]]:
    """Returns fields of a ctypes structure, all of type `kind`, from their names with spaces between."""
    return [(name, kind) for name in names.split()]


_loaded: ctypes.CDLL | None = None
_symbols: dict[str, Callable[..., None]] = {}
_recorded = False


class Call(NamedTuple):
    """A recorded call of a function: its name, argument types and arguments."""

    name: str
    takes: tuple[Any, ...]
    given: tuple[Any, ...]


class Calls(NamedTuple):
    """The recorded calls, and marks among them: how many calls come before each, and its code."""

    calls: list[Call]
    marks: list[tuple[int, int]]


class _Noted(threading.local):
    noted: Calls | None = None


_noted = _Noted()


def load(path: Path, threads: int) -> None:
    """Loads the library, once per process, and sets the number of threads. Raises OSError."""
    global _loaded
    if _loaded is None or _loaded._name != str(path):
        _loaded = ctypes.CDLL(str(path))
        _symbols.clear()
    _loaded.kvern_set_threads(threads)


def function(name: str, *takes: Any) -> Callable[..., None]:
    """A function of the library that returns nothing; it is looked up at its first call and releases the GIL."""

    def call(*given: Any) -> None:
        symbol = _symbols.get(name)
        if symbol is None:
            assert _loaded is not None, "the library of kernels is not loaded"
            found = getattr(_loaded, name)
            found.argtypes, found.restype = takes, None
            symbol = _symbols[name] = torch.profiler.record_function(name)(found) if _recorded else found
        if _noted.noted is not None:
            _noted.noted.calls.append(Call(name, takes, given))
        symbol(*given)

    return call


@contextmanager
def recorded() -> Iterator[None]:
    """Lets PyTorch's profiler record the functions by name."""
    global _recorded
    _symbols.clear()
    _recorded = True
    try:
        yield
    finally:
        _symbols.clear()
        _recorded = False


def is_recorded() -> bool:
    """True if PyTorch's profiler records each function."""
    return _recorded


@contextmanager
def captured() -> Iterator[Calls]:
    """Records the calls and marks of this thread."""
    noted = _noted.noted = Calls([], [])
    try:
        yield noted
    finally:
        _noted.noted = None


def mark(code: int) -> None:
    """Marks a place among the calls that are recorded."""
    if (noted := _noted.noted) is not None:
        noted.marks.append((len(noted.calls), code))


def replayed(name: str) -> int:
    """The address of the function that does the same by an array of numbers, see `sources/replay.h`."""
    found = ctypes.cast(getattr(_loaded, f"{name}_replayed"), POINTER).value
    assert found is not None
    return found


def address(tensor: Tensor | None) -> int | None:
    """The address of a tensor's data; None for None."""
    return None if tensor is None else tensor.data_ptr()
