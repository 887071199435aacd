"""The block pool under random use, beside a counter."""

from hypothesis import settings

from tests.support.cache_machines import PoolMachine
from tests.support.sampling import examples

TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=examples(100), stateful_step_count=40)
