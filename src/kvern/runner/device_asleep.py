"""The memory of an engine on a GPU that falls asleep: weights wait in pinned memory of the host, caches become empty.

    start   what the engine has on the GPU moves to memory that can be given back; a thread copies it to the host
    leave   parts that have changed since are copied again; the GPU gets the memory
    enter   the copies -> the same addresses, so that captured graphs find them

Graphs, kernels and the CUDA context stay, and tensors below a mebibyte.
"""

import gc
import mmap
import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvern.cpu.cores import available_memory
from kvern.device.chunked_memory import ChunkedMemory
from kvern.device.copies import copy_all
from kvern.device.mapped_memory import MappedMemory
from kvern.device.pinned import PINNED_BYTES, Pins
from kvern.runner.memory import CONTEXT_BYTES
from kvern.runner.tensors import all_tensors, tensors_in

SMALLEST = 1 << 20
"""Bytes of a tensor that is worth it."""
SEGMENT_BYTES = 512 << 20
"""Bytes that move at once: as much is free while an engine starts."""
ALIGNED = 512
"""Bytes at whose multiples tensors begin, as those of PyTorch."""
LEAST_FREE = 2 << 30
"""Bytes of the host's memory that stay free."""


class _Part(NamedTuple):
    """A part of memory on the device, as int64 numbers too, and of its copy on the host."""

    address: int
    numbers: Tensor
    host: memoryview


class DeviceMemoryAsleep:
    """`MemoryAsleep` of a GPU."""

    def __init__(
        self,
        owner: object,
        device: torch.device,
        emptied: Sequence[Tensor],
        processes: int = 1,
        chunked: ChunkedMemory | None = None,
    ) -> None:
        """`owner`: an object from which all tensors are found that are worth it, and of which no graph was captured.

        `emptied`: caches among them, whose contents are not needed again; they become zeros. `processes`: so many copy
        as much to the host. `chunked`: memory of caches that goes besides. Raises torch.OutOfMemoryError.
        """
        self.device = device
        self._chunked = chunked
        self._memory = MappedMemory(device)
        found = _by_storage(owner, device)
        empty = {tensor.untyped_storage().data_ptr() for tensor in emptied}
        caches = [group for address, group in found.items() if address in empty]
        held = [_Freed(group) for group in caches]  # theirs is the memory in which others move
        torch.cuda.empty_cache()
        segments = [*_segments([group for address, group in found.items() if address not in empty])]
        kept = [self._move(segment) for segment in segments]
        self._emptied = [freed.restored(self._memory) for freed in held]
        self._zero()
        self.size = self._memory.size
        self._host, self._parts = self._parts_of(kept)
        self._sums = torch.empty(len(self._parts), dtype=torch.int64)
        self._copied = 0
        size = PINNED_BYTES // 8
        self._key, self._product, self._taken = torch.randint(
            -(2**62), 2**62, (3, size), dtype=torch.int64, device=device
        )
        """Numbers of a part: factors of a digest, what it makes of a part, and a part that is being copied."""
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(device)
        self._pins: Pins | None = None
        if len(self._host) * processes <= available_memory() - LEAST_FREE:
            self._pins = Pins(_Copies(self), device, "the copy of weights on the host")
            weakref.finalize(self, self._pins.end)

    def leave(self) -> int:
        """See `MemoryAsleep`. Raises OSError if the host has no memory for the contents."""
        if self._pins is not None:
            self._pins.wait()
        if self._copied < len(self._parts):
            size, free = len(self._host) / 1e9, available_memory() / 1e9
            raise OSError(
                f"of its weights {self._copied} of {len(self._parts)} parts are in the host's memory: they take "
                f"{size:.1f} GB, and {free:.1f} GB are free"
            )
        torch.cuda.synchronize(self.device)
        sums = torch.stack([self._sum(part.numbers) for part in self._parts]).cpu() if self._parts else self._sums
        changed = (sums != self._sums).nonzero().flatten().tolist()
        self._copy([self._parts[place] for place in changed], to_host=True)
        self._sums = sums
        self._memory.unmap()
        if self._chunked is not None:
            self._chunked.leave()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self.device) + CONTEXT_BYTES

    def enter(self) -> None:
        """See `MemoryAsleep`."""
        self._memory.map()
        try:
            if self._chunked is not None:
                self._chunked.enter()
        except BaseException:
            self._memory.unmap()
            raise
        self._copy(self._parts, to_host=False)
        self._zero()
        torch.cuda.synchronize(self.device)

    def forget(self, tensors: Sequence[Tensor]) -> None:
        """Tensors that are used no longer: their memory stays."""

    def keep(self, number: int) -> None:
        """Copy a part to the host, whose memory for it is pinned now. Called by one thread, beside steps."""
        part = self._parts[number]
        with torch.cuda.stream(self._stream), torch.inference_mode():
            taken = self._taken[: len(part.numbers)].copy_(part.numbers)  # steps may change the part meanwhile
            self._copy([part._replace(address=taken.data_ptr())], to_host=True)
            self._sums[number] = self._sum(taken).cpu()
        self._copied += 1

    @property
    def host_parts(self) -> list[memoryview]:
        """The memory on the host, in order."""
        return [part.host for part in self._parts]

    @torch.inference_mode()
    def _sum(self, numbers: Tensor) -> Tensor:
        """A digest of 64 bits of numbers, which depends on their places.

        High bits are folded into low ones first: of a product modulo 2**64 they reach no others.
        """
        found = self._product[: len(numbers)]
        torch.bitwise_right_shift(numbers, 32, out=found)
        torch.bitwise_xor(found, numbers, out=found)
        total: Tensor = found.mul_(self._key[: len(numbers)]).sum()
        return total

    def _copy(self, parts: Sequence[_Part], *, to_host: bool) -> None:
        """Copies parts, and waits for that. What steps do with them has ended."""
        pairs = [(_address(part.host), part.address, len(part.host)) for part in parts]
        copy_all(pairs, self._stream, to_host=to_host)
        self._stream.synchronize()

    @torch.inference_mode()
    def _zero(self) -> None:
        for tensor in self._emptied:
            tensor.zero_()

    @torch.inference_mode()
    def _move(self, segment: Sequence[list[Tensor]]) -> tuple[int, Tensor]:
        """Move tensors, those that share memory together; returns the address and the bytes of what they have now."""
        sizes = [_aligned(group[0].untyped_storage().nbytes()) for group in segment]
        where = self._memory.add(sum(sizes))
        whole = self._memory.tensor(where.address, where.size)
        whole.zero_()
        start = where.address
        for group, size in zip(segment, sizes, strict=True):
            storage = group[0].untyped_storage()
            bytes_of = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
            own = self._memory.tensor(start, storage.nbytes())
            own.copy_(bytes_of)
            for tensor in group:
                tensor.set_(own.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
            start += size
        del storage, bytes_of
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        return where.address, whole

    @staticmethod
    def _parts_of(kept: Sequence[tuple[int, Tensor]]) -> tuple[memoryview, list[_Part]]:
        size = sum(len(whole) for _, whole in kept)
        host = memoryview(mmap.mmap(-1, max(size, 1)))[:size]
        parts: list[_Part] = []
        first = 0
        for address, whole in kept:
            for start in range(0, len(whole), PINNED_BYTES):
                numbers = whole[start : start + PINNED_BYTES].view(torch.int64)
                parts.append(_Part(address + start, numbers, host[first : first + numbers.nbytes]))
                first += numbers.nbytes
        return host, parts


class _Copies:
    """The copies on the host of memory that may fall asleep, which they do not hold."""

    def __init__(self, memory: DeviceMemoryAsleep) -> None:
        self._memory = weakref.ref(memory)
        self._host = memory.host_parts
        self._next = 0

    def parts(self, most: int) -> list[memoryview]:
        """See `Pinnable`."""
        return self._host

    def may_grow(self, size: int) -> bool:
        """See `Pinnable`."""
        return available_memory() > size + LEAST_FREE

    def extend(self, part: memoryview) -> None:
        """See `Pinnable`."""
        if (memory := self._memory()) is not None:
            memory.keep(self._next)
        self._next += 1

    def cut(self) -> None:
        """See `Pinnable`."""


class _Freed:
    """Tensors whose memory is given back before they get other memory."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._size = tensors[0].untyped_storage().nbytes()
        self._forms = [(tensor, tensor.storage_offset(), tensor.size(), tensor.stride()) for tensor in tensors]
        with torch.inference_mode():
            for tensor in tensors:
                tensor.set_(tensor.new_empty(0).untyped_storage(), 0, (0,), (1,))

    def restored(self, memory: MappedMemory) -> Tensor:
        """Gives the tensors new memory; returns it as a tensor of bytes."""
        own = memory.tensor(memory.add(self._size).address, self._size)
        with torch.inference_mode():
            for tensor, *form in self._forms:
                tensor.set_(own.untyped_storage(), *form)
        return own


def _by_storage(owner: object, device: torch.device) -> dict[int, list[Tensor]]:
    """Returns all tensors that share memory which an owner has from PyTorch, by its address."""
    segments = [
        (each["address"], each["address"] + each["total_size"])
        for each in torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        if tuple(each["segment_pool_id"]) == (0, 0)  # not of a graph
    ]
    wanted = {
        tensor.untyped_storage().data_ptr()
        for tensor in tensors_in(owner)
        if tensor.device == device and tensor.layout == torch.strided and tensor.untyped_storage().nbytes() >= SMALLEST
    }
    wanted = {address for address in wanted if any(first <= address < end for first, end in segments)}
    gc.collect()  # or memory would be held by what nobody uses
    found: dict[int, list[Tensor]] = {}
    for tensor in all_tensors():
        if tensor.device == device and tensor.layout == torch.strided:
            address = tensor.untyped_storage().data_ptr()
            if address in wanted:
                found.setdefault(address, []).append(tensor)
    return found


def _segments(groups: Sequence[list[Tensor]]) -> Iterator[list[list[Tensor]]]:
    """Yields groups of tensors of about as many bytes as are free."""
    segment: list[list[Tensor]] = []
    size = 0
    for group in groups:
        own = _aligned(group[0].untyped_storage().nbytes())
        if segment and size + own > SEGMENT_BYTES:
            yield segment
            segment, size = [], 0
        segment.append(group)
        size += own
    if segment:
        yield segment


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _address(memory: memoryview) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
