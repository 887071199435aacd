"""What there is of blocks for requests: of the first table and of layers with a window, from one pool or from two.

Two pools: all layers have a window, which has all of the memory, and the first table's blocks are numbers alone.
"""

from collections.abc import Sequence

from kvern.cache.block_pool import BlockPool
from kvern.cache.radix import Node, RadixCache
from kvern.cache.windows import WindowedBlocks
from kvern.request.step import BlockCopy


class Allocation:
    """Counts and takes blocks; what is cached and nobody uses makes room. `pool`: of the first table."""

    def __init__(self, pool: BlockPool, tree: RadixCache, windows: WindowedBlocks | None) -> None:
        self._pool, self._tree, self._windows = pool, tree, windows
        self._memory = pool if windows is None else windows.pool
        self._one_pool = self._memory is pool
        self.window_tables = 0 if windows is None else windows.limits.tables

    @property
    def available_count(self) -> int:
        """As of `KVCacheManager`."""
        available = self._pool.free_count + self._tree.evictable_count
        return available + self._windows.evictable_count if self._windows is not None and self._one_pool else available

    @property
    def growth_count(self) -> int:
        """As of `KVCacheManager`."""
        if self._windows is None or self._one_pool:
            return self.available_count // (1 + self.window_tables)
        return min(self.available_count, self._windows.available_count // self.window_tables)

    @property
    def usage(self) -> float:
        """As of `KVCacheManager`."""
        available = self.available_count
        if self._windows is not None and not self._one_pool:
            available = self._windows.available_count
        return 1 - available / self._memory.capacity

    def fit(self, needed: int, of_window: int, reserve: int = 0) -> bool:
        """Whether there are so many blocks of both kinds, and `reserve` more in each block table."""
        of_window += reserve * self.window_tables
        if self._windows is None or self._one_pool:
            return needed + reserve + of_window <= self.available_count
        return needed + reserve <= self.available_count and of_window <= self._windows.available_count

    def take(self, needed: int, of_window: int, partial: Node | None = None) -> tuple[list[int], list[int]]:
        """Blocks of layers with a window, and of the first table; the head of `partial` is copied to the first ones."""
        if self._windows is None:
            self._tree.evict(needed - self._pool.free_count)
            return [], self._pool.allocate(needed)
        windowed = () if partial is None else partial.windowed
        if not self._one_pool:
            self._windows.evict(of_window, self._tree)
            self._tree.evict(needed - self._pool.free_count)
            found = self._memory.allocate(of_window)
            _stay(found, windowed, len(windowed) - 1)
            return found, self._pool.allocate(needed)
        self._windows.evict(needed + of_window, self._tree)
        found = self._pool.allocate(needed + of_window)
        _stay(found, () if partial is None else (*windowed, partial.block), of_window)
        return found[:of_window], found[of_window:]

    def copies(
        self, source: int, target: int, windowed: Sequence[int], targets: Sequence[int], tokens: int
    ) -> list[BlockCopy]:
        """Of the head of a block to another, in all tables that have memory."""
        pairs = [(source, target)] if self._one_pool else []
        pairs += zip(windowed, targets[: len(windowed)], strict=True)
        return [BlockCopy(*pair, tokens) for pair in pairs]

    def check_integrity(self, owners: int) -> None:
        """Raise AssertionError unless blocks have as many references as is said."""
        counted = 0
        for pool in {self._pool, self._memory}:
            pool.check_integrity()
            counted += sum(pool.references(block) for block in range(pool.capacity))
        assert owners == counted, f"{owners} references are known and {counted} are counted"


def _stay(blocks: list[int], sources: Sequence[int], last: int) -> None:
    """Reorder blocks so that `sources` among them stand where they would be copied to: the first places, and `last`.

    Else a copy's target might be the source of one behind it.
    """
    for place, source in enumerate(sources, 1):
        if source in blocks:
            target, found = last if place == len(sources) else place - 1, blocks.index(source)
            blocks[target], blocks[found] = source, blocks[target]
