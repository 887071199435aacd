"""The allocation of blocks for several block tables, and what is evicted for them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvern.cache.block_pool import BlockPool
from kvern.cache.radix import CacheMemory, Node
from kvern.request.step import BlockCopy

if TYPE_CHECKING:
    from kvern.cache.extension import CacheExtension


class Allocation:
    """Counts and allocates blocks; cached blocks that no request uses are evicted for them.

    Numbers and lists of blocks are given for each member: the first block table, then each extension.
    """

    def __init__(self, memory: CacheMemory, extensions: "Sequence[CacheExtension]") -> None:
        self._pool = memory.pool
        self._memory = memory.memory
        self._tree = memory.tree
        self._extensions = extensions
        self.tables = [1, *(extension.tables for extension in extensions)]
        self._pools = [memory.pool, *(extension.pool for extension in extensions)]
        self._is_alone = not extensions
        """There is the first block table, and nothing else: what is most frequent goes a short way."""
        last_first = reversed(list(dict.fromkeys(pool for pool in self._pools if pool is not None)))
        self._members = {
            pool: [*(member for member in range(1, len(self._pools)) if self._pools[member] is pool)]
            + [0] * (pool is memory.pool)
            for pool in last_first
        }
        """The members with blocks of each pool, in the order in which they get them."""

    def available(self, pool: BlockPool) -> int:
        """Blocks of a pool that are free or can be evicted."""
        own = sum(extension.evictable_count for extension in self._extensions if extension.pool is pool)
        return pool.free_count + own + (self._tree.evictable_count if pool is self._pool else 0)

    @property
    def growth_count(self) -> int:
        """See `KVCacheManager.growth_count`."""
        return min(self.available(pool) // self._tables(pool) for pool in self._members)

    def _tables(self, pool: BlockPool) -> int:
        return sum(self.tables[member] for member in self._members[pool])

    def fit(self, needed: Sequence[int], reserve: int = 0) -> bool:
        """True if each member can have as many blocks as it needs, with `reserve` more left for each block table."""
        if self._is_alone:
            return needed[0] + reserve <= self._pool.free_count + self._tree.evictable_count
        return all(
            sum(needed[member] for member in members) + reserve * self._tables(pool) <= self.available(pool)
            for pool, members in self._members.items()
        )

    def take(self, needed: Sequence[int], partial: Node | None = None) -> list[list[int]]:
        """Allocate so many blocks for each member; the heads of the blocks of `partial` will be copied to the first."""
        if self._is_alone:
            self._tree.evict(needed[0] - self._pool.free_count)
            blocks = self._pool.allocate(needed[0])
            if partial is not None:
                _keep_in_place(blocks, [(0, [partial.block])])
            return [blocks]
        sources: list[Sequence[int]] = [()] * len(needed)
        if partial is not None:
            sources = [[partial.block], *(extension.blocks_at(partial) for extension in self._extensions)]
        taken: list[list[int]] = [[] for _ in needed]
        for pool, members in self._members.items():
            count = sum(needed[member] for member in members)
            self._make_room(pool, count)
            blocks, first = pool.allocate(count), 0
            starts = {}
            for member in members:
                starts[member], first = first, first + needed[member]
            if pool is self._memory:
                _keep_in_place(blocks, [(starts[member], sources[member]) for member in members])
            for member in members:
                taken[member] = blocks[starts[member] : starts[member] + needed[member]]
        return taken

    def copies(self, sources: Sequence[Sequence[int]], targets: Sequence[list[int]], tokens: int) -> list[BlockCopy]:
        """Copies of the first `tokens` positions of blocks, in each block table whose blocks hold keys and values."""
        return [
            BlockCopy(source, target, tokens)
            for pool, own, others in zip(self._pools, sources, targets, strict=True)
            if pool is self._memory
            for source, target in zip(own, others, strict=False)
        ]

    def _make_room(self, pool: BlockPool, count: int) -> None:
        """Evict until so many blocks are free: first what is unlikely to be used, then nodes, then the rest."""
        own = [extension for extension in self._extensions if extension.pool is pool]
        if not own:
            self._tree.evict(count - pool.free_count)
        while own and pool.free_count < count:
            if any(extension.evict(False) for extension in own):
                continue
            if self._tree.evictable_count:
                self._tree.evict(1)
            elif not any(extension.evict(True) for extension in own):
                break

    def check_integrity(self, references: int) -> None:
        """Raise AssertionError unless the blocks of all pools have so many references."""
        counted = 0
        for pool in {self._pool, self._memory}:
            pool.check_integrity()
            counted += sum(pool.references(block) for block in range(pool.most))
        assert references == counted, f"{references} references are known and {counted} are counted"


def _keep_in_place(blocks: list[int], sources: Sequence[tuple[int, Sequence[int]]]) -> None:
    """Reorder blocks so that each copy whose source is among them has its source as its target.

    `sources`: the place of the first target, and the sources. Otherwise the target of one copy might be the source of
    a later one.
    """
    for first, members in sources:
        for target, source in enumerate(members, first):
            if source in blocks:
                found = blocks.index(source)
                blocks[target], blocks[found] = source, blocks[target]
