"""Memory of a GPU at addresses that stay: what is behind them can be given back, and taken again.

It comes from the driver's virtual memory management, past PyTorch's allocator: address ranges are reserved once, and
physical memory is mapped to them. Captured graphs and tensors that know the addresses hold.
"""

import ctypes
import functools
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


class MappedMemory:
    """Address ranges of one GPU, all of which have memory behind them, or none has."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.ranges: list[Range] = []
        self._handles: list[int] = []
        place = _Location(1, torch.cuda.current_device() if device.index is None else device.index)
        self._allocation, self._access = _Allocation(type=1, location=place), _Access(place, 3)
        found = ctypes.c_size_t()
        _call("cuMemGetAllocationGranularity", ctypes.byref(found), ctypes.byref(self._allocation), 1)
        self._granularity = found.value

    @property
    def size(self) -> int:
        """Its bytes."""
        return sum(each.size for each in self.ranges)

    def add(self, size: int) -> Range:
        """One more range with memory behind it, of at least so many bytes. Raises torch.OutOfMemoryError."""
        size = -(-size // self._granularity) * self._granularity
        found = ctypes.c_uint64()
        _call("cuMemAddressReserve", ctypes.byref(found), _size(size), _size(0), _address(0), _address(0))
        added = Range(found.value, size)
        try:
            self._map(added)
        except BaseException:
            _call("cuMemAddressFree", _address(added.address), _size(size))
            raise
        self.ranges.append(added)
        return added

    def tensor(self, address: int, size: int) -> Tensor:
        """The uint8 tensor [size] over the bytes at an address. It holds all of this memory."""
        return torch.as_tensor(_Bytes(address, size, self), device=self.device)

    def unmap(self) -> None:
        """Give the memory behind all ranges back. What runs must have ended."""
        while self._handles:
            self._unmap(self.ranges[len(self._handles) - 1])

    def map(self) -> None:
        """Have memory behind all ranges again, of any contents. Raises torch.OutOfMemoryError; then none has."""
        try:
            for each in self.ranges[len(self._handles) :]:
                self._map(each)
        except BaseException:
            self.unmap()
            raise

    def _map(self, where: Range) -> None:
        handle = ctypes.c_uint64()
        _call("cuMemCreate", ctypes.byref(handle), _size(where.size), ctypes.byref(self._allocation), _address(0))
        try:
            _call("cuMemMap", _address(where.address), _size(where.size), _size(0), handle, _address(0))
            try:
                access = ctypes.byref(self._access)
                _call("cuMemSetAccess", _address(where.address), _size(where.size), access, _size(1))
            except BaseException:
                _call("cuMemUnmap", _address(where.address), _size(where.size))
                raise
        except BaseException:
            _call("cuMemRelease", handle)
            raise
        self._handles.append(handle.value)

    def _unmap(self, where: Range) -> None:
        _call("cuMemUnmap", _address(where.address), _size(where.size))
        _call("cuMemRelease", _address(self._handles.pop()))

    def __del__(self) -> None:
        """No tensor is over it any more."""
        if self._handles:
            torch.cuda.synchronize(self.device)
        self.unmap()
        for each in self.ranges:
            _call("cuMemAddressFree", _address(each.address), _size(each.size))


class _Bytes:
    """Bytes of memory that is held as long as they are used."""

    def __init__(self, address: int, size: int, memory: MappedMemory) -> None:
        self.memory = memory
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 2}
