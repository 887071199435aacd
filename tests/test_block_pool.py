"""The block pool under random use, beside a counter."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvern.cache.block_pool import BlockPool


class PoolMachine(RuleBasedStateMachine):
    """The pool beside a counter of owners."""

    CAPACITY = 6

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.CAPACITY)
        self.owners: Counter[int] = Counter()

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        free = self.CAPACITY - len(self.owners)
        if count > free:
            with pytest.raises(IndexError, match=f"{count} blocks were asked for and {free} of 6 are free"):
                self.pool.allocate(count)
        else:
            blocks = self.pool.allocate(count)
            assert len(set(blocks)) == count and not self.owners.keys() & set(blocks)
            self.owners.update(blocks)

    @rule(block=st.integers(0, CAPACITY - 1))
    def share(self, block: int) -> None:
        if block in self.owners:
            self.pool.share([block])
            self.owners[block] += 1
        else:
            with pytest.raises(ValueError, match="cannot be shared"):
                self.pool.share([block])

    @rule(block=st.integers(0, CAPACITY - 1))
    def release(self, block: int) -> None:
        if block in self.owners:
            self.pool.release([block])
            self.owners -= Counter([block])
        else:
            with pytest.raises(ValueError, match="released more often"):
                self.pool.release([block])

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity()
        assert self.pool.free_count == self.CAPACITY - len(self.owners)
        assert [self.pool.references(block) for block in range(self.CAPACITY)] == [
            self.owners[block] for block in range(self.CAPACITY)
        ]


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=100, stateful_step_count=40)
