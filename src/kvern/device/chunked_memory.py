"""The memory of KV caches on a GPU that is taken and given back while the engine runs, at addresses that stay.

A pool has addresses for the largest cache, and memory behind the first chunks of blocks in each of its parts:

    a part of a pool   | chunk 0 | chunk 1 |   ...   | last chunk | scratch
                         mapped    mapped    nothing    nothing     mapped

`scratch` has the block that pads batches, in which nobody looks for anything: all parts of a pool have one piece of
memory for theirs. So graphs that were captured, and tensors, hold whatever is mapped; block tables must name no block
beyond.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from kvern.device.mapped_memory import MappedMemory, Piece, Range


def blocks_of_a_piece(granularity: int, sizes: Iterable[int]) -> int:
    """Returns the fewest blocks that have memory of their own, where pieces of memory have multiples of `granularity`
    bytes, and blocks so many in each part of a pool."""
    return math.lcm(*(granularity // math.gcd(granularity, size) for size in sizes))


class _Pool:
    """The places of the parts of a pool, one after another."""

    def __init__(self, address: int, parts: int, part_blocks: int, block_bytes: int) -> None:
        self.parts = range(parts)
        self._address = address
        self._part_blocks = part_blocks
        self._block_bytes = block_bytes
        self._numbers = torch.empty(0)

    def piece(self, part: int, first: int, end: int) -> Range:
        """The memory of blocks of a part."""
        size = self._block_bytes
        return Range(self._address + (part * self._part_blocks + first) * size, (end - first) * size)

    def view(self, memory: MappedMemory) -> Tensor:
        """Returns all addresses as a tensor of bytes, some of the first of which have memory."""
        size = len(self.parts) * self._part_blocks * self._block_bytes
        whole = memory.tensor(self._address, size)
        self._numbers = whole.view(torch.int64).view(len(self.parts), -1)
        return whole

    @torch.inference_mode()
    def zero(self, first: int, end: int) -> None:
        """Let blocks that have memory be zeros, each part in one run."""
        for numbers in self._numbers:
            numbers[first * self._block_bytes // 8 : end * self._block_bytes // 8].zero_()


class ChunkedMemory:
    """Pools of the same blocks, of which the first ones have memory."""

    def __init__(self, device: torch.device, blocks: int, chunk: int, least: int, unit: int) -> None:
        """At most `blocks` blocks, in chunks of `chunk`; `least` of them always have memory.

        `unit`: `blocks_of_a_piece` of all pools, of which all these numbers are multiples.
        """
        self.least = self.blocks = least
        self.scratch = blocks
        """The number of the block that pads batches."""
        self.all_blocks = blocks + unit
        """The number of blocks that have addresses."""
        self.least_bytes = 0
        """The bytes that it always has."""
        self._chunk = chunk
        self._memory = MappedMemory(device)
        self._pools: list[_Pool] = []

    @property
    def size(self) -> int:
        """The bytes that it has now."""
        return self._memory.size

    def zeros(self, parts: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """One more pool: [parts, all_blocks, *shape], zeros as far as it has memory. Raises torch.OutOfMemoryError."""
        block_bytes = math.prod(shape) * dtype.itemsize
        where = self._memory.reserve(parts * self.all_blocks * block_bytes)
        pool = _Pool(where.address, parts, self.all_blocks, block_bytes)
        scratch = [pool.piece(part, self.scratch, self.all_blocks) for part in pool.parts]
        self._memory.extend([*self._pieces([pool], 0, self.blocks), scratch])
        whole = pool.view(self._memory)
        self._pools.append(pool)
        self.least_bytes = self._memory.size
        self._zero([pool])
        return whole.view(dtype).view(parts, self.all_blocks, *shape)

    def resize(self, blocks: int) -> int:
        """Have memory behind so many blocks, in whole chunks, at least `least`; returns behind how many there is some.

        Those are fewer if the GPU has no memory for a chunk: then it has the ones below. What runs must have ended.
        """
        wanted, before = min(max(blocks, self.least), self.scratch), self.blocks
        if wanted < before:
            torch.cuda.synchronize(self._memory.device)
            self._memory.cut(len(self._memory.pieces) - len(self._pieces(self._pools, wanted, before)))
            self.blocks = wanted
            return wanted
        try:
            while self.blocks < wanted:
                end = min(self.blocks + self._chunk, wanted)
                self._memory.extend(self._pieces(self._pools, self.blocks, end))
                self.blocks = end
        except torch.OutOfMemoryError:
            pass
        for pool in self._pools:
            pool.zero(before, self.blocks)
        torch.cuda.synchronize(self._memory.device)  # loads from a tier come through other streams
        return self.blocks

    def leave(self) -> None:
        """Give all memory back until `enter`, after which it is that of the least blocks. What runs must have ended."""
        self.resize(self.least)
        self._memory.unmap()

    def enter(self) -> None:
        """Have the memory again, zeros. Raises torch.OutOfMemoryError; then there is none."""
        self._memory.map()
        self._zero(self._pools)

    def _pieces(self, pools: Sequence[_Pool], first: int, end: int) -> list[Piece]:
        """Returns the memory of blocks chunk after chunk, those of all parts beside each other.

        A chunk begins at a multiple of its size, whatever `first` and `end` are: what was taken in one piece is given
        back in one.
        """
        bounds = [first, *range(first // self._chunk * self._chunk + self._chunk, end, self._chunk), end]
        return [
            [pool.piece(part, *chunk)]
            for chunk in pairwise(bounds)
            if chunk[0] < chunk[1]
            for pool in pools
            for part in pool.parts
        ]

    def _zero(self, pools: Sequence[_Pool]) -> None:
        for pool in pools:
            pool.zero(0, self.blocks)
            pool.zero(self.scratch, self.all_blocks)
