"""Memory of a GPU at addresses that stay: what is behind them can be given back, and taken again.

It comes from the driver's virtual memory management, past PyTorch's allocator: address ranges are reserved once, and
physical memory is mapped to them. Captured graphs and tensors that know the addresses hold.
"""

import ctypes
import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

OUT_OF_MEMORY = 2
"""CUDA_ERROR_OUT_OF_MEMORY."""


class _Location(ctypes.Structure):
    """CUmemLocation; type 1: a device."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Allocation(ctypes.Structure):
    """CUmemAllocationProp; type 1: physical memory that stays where it is."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _Access(ctypes.Structure):
    """CUmemAccessDesc; flags 3: reading and writing."""

    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


class Range(NamedTuple):
    """A range of addresses of the device."""

    address: int
    size: int


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *values: object) -> None:
    """Call the driver. Raises torch.OutOfMemoryError or RuntimeError."""
    if error := getattr(_driver(), name)(*values):
        kind = torch.OutOfMemoryError if error == OUT_OF_MEMORY else RuntimeError
        raise kind(f"the GPU's driver cannot map memory: {name} gives error {error}")


def _size(count: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(count)


def _address(number: int) -> ctypes.c_uint64:
    return ctypes.c_uint64(number)


Piece = Sequence[Range]
"""Parts of ranges that have one piece of memory behind them: one part, or several of the same size."""


class MappedMemory:
    """Address ranges of one GPU, with memory behind pieces of them: behind all of these, or behind none."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pieces: list[Piece] = []
        """Pieces that have memory, or will have it again after `map`."""
        self._ranges: list[Range] = []
        self._handles: list[int] = []
        place = _location(device)
        self._allocation, self._access = _Allocation(type=1, location=place), _Access(place, 3)
        self.granularity = granularity(device)
        """The bytes at whose multiples pieces begin and end."""

    @property
    def size(self) -> int:
        """The bytes of its pieces."""
        return sum(piece[0].size for piece in self.pieces)

    def add(self, size: int) -> Range:
        """One more range with memory behind it, of at least so many bytes. Raises torch.OutOfMemoryError."""
        added = self.reserve(size)
        try:
            self.extend([[added]])
        except BaseException:
            self._ranges.remove(added)
            _call("cuMemAddressFree", _address(added.address), _size(added.size))
            raise
        return added

    def reserve(self, size: int) -> Range:
        """One more range, of at least so many bytes, without memory."""
        size = -(-size // self.granularity) * self.granularity
        found = ctypes.c_uint64()
        _call("cuMemAddressReserve", ctypes.byref(found), _size(size), _size(0), _address(0), _address(0))
        self._ranges.append(Range(found.value, size))
        return self._ranges[-1]

    def extend(self, pieces: Sequence[Piece]) -> None:
        """Have memory behind more pieces, of any contents. Raises torch.OutOfMemoryError; then none of them has."""
        before = len(self.pieces)
        try:
            for piece in pieces:
                self._map(piece)
                self.pieces.append(piece)
        except BaseException:
            self.cut(before)
            raise

    def cut(self, count: int) -> None:
        """Give back the memory behind all but the first pieces. What runs must have ended."""
        while len(self.pieces) > count:
            self._unmap(self.pieces[-1])
            self.pieces.pop()

    def tensor(self, address: int, size: int) -> Tensor:
        """The uint8 tensor [size] over the bytes at an address, the first of which has memory. It holds all of this
        memory."""
        return torch.as_tensor(_Bytes(address, size, self), device=self.device)

    def unmap(self) -> None:
        """Give the memory behind all pieces back, until `map`. What runs must have ended."""
        while self._handles:
            self._unmap(self.pieces[len(self._handles) - 1])

    def map(self) -> None:
        """Have memory behind all pieces again, of any contents. Raises torch.OutOfMemoryError; then none has."""
        try:
            for piece in self.pieces[len(self._handles) :]:
                self._map(piece)
        except BaseException:
            self.unmap()
            raise

    def _map(self, piece: Piece) -> None:
        handle = ctypes.c_uint64()
        size = _size(piece[0].size)
        _call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self._allocation), _address(0))
        mapped = 0
        try:
            for where in piece:
                _call("cuMemMap", _address(where.address), size, _size(0), handle, _address(0))
                mapped += 1
                _call("cuMemSetAccess", _address(where.address), size, ctypes.byref(self._access), _size(1))
        except BaseException:
            for where in piece[:mapped]:
                _call("cuMemUnmap", _address(where.address), size)
            _call("cuMemRelease", handle)
            raise
        self._handles.append(handle.value)

    def _unmap(self, piece: Piece) -> None:
        for where in piece:
            _call("cuMemUnmap", _address(where.address), _size(where.size))
        _call("cuMemRelease", _address(self._handles.pop()))

    def __del__(self) -> None:
        """No tensor is over it any more."""
        if self._handles:
            torch.cuda.synchronize(self.device)
        self.unmap()
        for each in self._ranges:
            _call("cuMemAddressFree", _address(each.address), _size(each.size))


def granularity(device: torch.device) -> int:
    """Returns the bytes at whose multiples a GPU's memory is mapped."""
    allocation, found = _Allocation(type=1, location=_location(device)), ctypes.c_size_t()
    _call("cuMemGetAllocationGranularity", ctypes.byref(found), ctypes.byref(allocation), 1)
    return found.value


def _location(device: torch.device) -> _Location:
    return _Location(1, torch.cuda.current_device() if device.index is None else device.index)


class _Bytes:
    """Bytes of memory that is held as long as they are used."""

    def __init__(self, address: int, size: int, memory: MappedMemory) -> None:
        self.memory = memory
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 2}
