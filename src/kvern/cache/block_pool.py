"""Fixed-size KV blocks with reference counts: which are free, and who shares the rest."""

from collections.abc import Iterable


class BlockPool:
    """Hands out block numbers 0..capacity-1.

    A block is free (count 0) or referenced by requests and at most once by the prefix tree (count > 0). Freed blocks
    are reused last-in first-out, because their memory is still warm.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._references = [0] * capacity
        self._free = list(range(capacity - 1, -1, -1))

    @property
    def free_count(self) -> int:
        """The number of blocks without references."""
        return len(self._free)

    def references(self, block: int) -> int:
        """Returns the number of owners of `block`."""
        return self._references[block]

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, each with one reference. Raises IndexError when fewer are free."""
        if count > len(self._free):
            raise IndexError(f"{count} blocks were asked for and {len(self._free)} of {self.capacity} are free")
        first = len(self._free) - count
        blocks = self._free[first:][::-1]
        del self._free[first:]
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
        references = self._references
        for block in blocks:
            count = references[block] - 1
            if count < 0:
                raise ValueError(f"block {block} was released more often than it was taken")
            references[block] = count
            if count == 0:
                self._free.append(block)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the free list and the reference counts tell the same story."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is in the free list twice"
        for block, count in enumerate(self._references):
            assert count >= 0 and (count == 0) == (block in free), f"block {block}: count {count}, free {block in free}"
