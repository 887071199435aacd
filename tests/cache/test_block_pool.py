"""The block pool under random use, beside a counter."""

from hypothesis import settings

from kvern.cache.block_pool import BlockPool
from tests.support.cache_machines import PoolMachine
from tests.support.sampling import examples

TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=examples(100), stateful_step_count=40)


def test_chunks_count_as_touched_from_their_first_block_until_they_go() -> None:
    pool = BlockPool(6, 2)
    pool.allocate(0)
    assert pool.touched_chunks == 0
    pool.allocate(1)
    assert pool.touched_chunks == 1
    blocks = pool.allocate(4)
    pool.release(blocks)
    assert pool.touched_chunks == 3
    pool.resize(2)
    pool.resize(3)
    assert pool.touched_chunks == 2, "the memory of the third is new"
