"""Fixed-size KV blocks with reference counts: which are free, and who shares the rest."""

from collections.abc import Iterable


class BlockPool:
    """Hands out block numbers 0..capacity-1.

    A block is free (count 0) or referenced by requests and at most once by the prefix tree (count > 0). Freed blocks
    are reused last-in first-out, because their memory is still warm.

    The capacity may change by whole chunks of blocks, up to `most` blocks: those of the lowest chunk are handed out
    first, so that the highest ones become free.
    """

    def __init__(self, most: int, chunk: int = 0) -> None:
        """`chunk`: blocks of a chunk; 0: the pool has one, and keeps its size."""
        self.most = most
        self.capacity = most
        self.chunk = chunk or max(most, 1)
        self._references = [0] * most
        self._free = [
            list(range(min(first + self.chunk, most) - 1, first - 1, -1))
            for first in range(0, max(most, 1), self.chunk)
        ]
        """The free blocks of each chunk."""
        self.chunks = len(self._free)
        """The number of chunks whose blocks are handed out."""
        self.free_count = most
        """The number of blocks without references in these."""
        self.touched_chunks = 0
        """The chunks up to the last one of which a block was handed out since it has its memory."""

    @property
    def most_chunks(self) -> int:
        """The number of chunks that there can be."""
        return len(self._free)

    @property
    def used_chunks(self) -> int:
        """The number of chunks up to the last one with a block that is not free."""
        return next((number for number in range(self.most_chunks, 0, -1) if not self._is_free(number - 1)), 0)

    def blocks_in(self, chunks: int) -> int:
        """Returns the number of blocks in so many chunks."""
        return min(chunks * self.chunk, self.most)

    def _is_free(self, chunk: int) -> bool:
        return len(self._free[chunk]) == min(self.chunk, self.most - chunk * self.chunk)

    def resize(self, chunks: int) -> None:
        """Hand out the blocks of so many chunks from now on.

        Raises ValueError if there are not as many, or if blocks of others are in use.
        """
        if not max(1, self.used_chunks) <= chunks <= self.most_chunks:
            raise ValueError(f"{chunks} chunks of blocks: {self.used_chunks} are in use, of {self.most_chunks}")
        self.chunks, self.capacity = chunks, self.blocks_in(chunks)
        self.touched_chunks = min(self.touched_chunks, chunks)
        self.free_count = sum(map(len, self._free[:chunks]))

    def references(self, block: int) -> int:
        """Returns the number of owners of `block`."""
        return self._references[block]

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, each with one reference. Raises IndexError when fewer are free."""
        if count > self.free_count:
            raise IndexError(f"{count} blocks were asked for and {self.free_count} of {self.capacity} are free")
        self.free_count -= count
        if count == 1 and self._free[0]:
            block = self._free[0].pop()
            self._references[block] = 1
            self.touched_chunks = max(self.touched_chunks, 1)
            return [block]
        blocks: list[int] = []
        for number, free in enumerate(self._free, 1):
            first = max(0, len(free) + len(blocks) - count)
            blocks += free[first:][::-1]
            del free[first:]
            if len(blocks) == count:
                self.touched_chunks = max(self.touched_chunks, number if count else 0)
                break
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add one owner to blocks that have at least one."""
        references = self._references
        for block in blocks:
            count = references[block]
            if count == 0:
                raise ValueError(f"block {block} is free and cannot be shared")
            references[block] = count + 1

    def release(self, blocks: Iterable[int]) -> None:
        """Remove one owner; a block without owners becomes free."""
        references, free = self._references, self._free
        chunk = self.chunk
        for block in blocks:
            count = references[block] - 1
            if count < 0:
                raise ValueError(f"block {block} was released more often than it was taken")
            references[block] = count
            if count == 0:
                free[block // chunk].append(block)
                self.free_count += 1

    def check_integrity(self) -> None:
        """Raise AssertionError unless the free lists and the reference counts tell the same story."""
        listed = [block for chunk in self._free for block in chunk]
        free = set(listed)
        assert len(free) == len(listed), "a block is in the free list twice"
        assert all(block // self.chunk == number for number, chunk in enumerate(self._free) for block in chunk)
        assert self.free_count == sum(block < self.capacity for block in free), "free blocks do not add up"
        for block, count in enumerate(self._references):
            assert count >= 0 and (count == 0) == (block in free), f"block {block}: count {count}, free {block in free}"
            assert count == 0 or block < self.capacity, f"block {block} is in use, and {self.capacity} may be"
