"""What is tried a hundred times by day, at length."""

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.support.cache_machines import CacheMachine, PoolMachine
from tests.support.random_lives import EngineMachine


@pytest.mark.nightly
@pytest.mark.parametrize("machine", [EngineMachine, CacheMachine, PoolMachine])
def test_many_lives(machine: type[RuleBasedStateMachine]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=1000, stateful_step_count=40))
