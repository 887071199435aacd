"""Whatever happens to requests, nothing is lost, mixed up or starved."""

import subprocess
import sys

import pytest
from hypothesis import settings

from kvern.engine.queues import AGED, POLICIES
from kvern.request.request import Request
from tests.support.random_lives import SWITCHES, EngineMachine, random_life
from tests.support.sampling import examples
from tests.support.simulated_device import Setup
from tests.support.simulated_engine import SimulatedEngine

TestEngineMachine = EngineMachine.TestCase


TestEngineMachine.settings = settings(max_examples=examples(100), stateful_step_count=30)


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("paged", "prefix_cache", "chunked", "continuous", "policy"),
    [
        pytest.param(*switches, policy, marks=[pytest.mark.nightly] if (number + place) % len(POLICIES) else [])
        for number, switches in enumerate(SWITCHES)
        for place, policy in enumerate(sorted(POLICIES))
    ],
)
def test_every_configuration_serves_a_crowd(
    paged: bool, prefix_cache: bool, chunked: bool, continuous: bool, policy: str
) -> None:
    preemptions = 0
    for depth in (1, 2):
        setup = Setup(paged, prefix_cache, chunked, continuous, policy, depth)
        engine = random_life(setup, seed=depth)
        assert all(request.answer.finish_reason for request in engine.requests.values())
        preemptions += engine.core.statistics().preemptions
    if paged and not prefix_cache:
        assert preemptions, "the pool is too large for this test to see a preemption"


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_drafts_bring_several_tokens_a_step(depth: int) -> None:
    """A proposer that is always right; the answers are checked as all are."""
    steps = []
    for drafts in (0, 3):
        engine = SimulatedEngine(Setup(depth=depth, max_model_len=64, drafts=drafts, accuracy=1.0, spare_budget=20))
        engine.add([0, 1], 40)
        engine.run()
        steps.append(engine.core.statistics().steps)
    assert engine.accepted_drafts > 8
    assert steps[1] < 0.8 * steps[0]


# Nobody starves

LONGEST = 24


RUN_STEPS = 3 * LONGEST
"""Steps that a running request of these tests can take at most: each one computes or samples a token of it, but for
those in which it gives way to the prompts of others that run already."""


def wait_of_the_unfavoured(policy: str, aging_steps: int, give_up: int) -> int | None:
    """Steps until a request is admitted that each newcomer precedes, one newcomer a step; None: not by `give_up`."""
    engine = SimulatedEngine(Setup(policy=policy, slots=2, aging_steps=aging_steps, prefix_cache=True))
    favoured = [0, 1, 2, 0, 1, 2, 0, 1]
    for _ in range(4):
        engine.add(favoured, 6, priority=-1)
    engine.step()
    (unfavoured,) = engine.add([2] * 9, 12, priority=1)
    for step in range(give_up):
        engine.add(favoured, 6, priority=-1)
        engine.step()
        if unfavoured.num_computed_tokens:
            return step
    return None


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"fcfs"}))
def test_aging_bounds_the_wait(policy: str) -> None:
    aging_steps, slots = 40, 2
    bound = aging_steps + slots * RUN_STEPS
    wait = wait_of_the_unfavoured(policy, aging_steps, bound + 1)
    assert wait is not None and aging_steps - 2 <= wait <= bound
    assert wait_of_the_unfavoured(policy, 10_000, bound + 1) is None, "this crowd does not need aging: no test at all"


def first_of_a_crowd(steps: int) -> bool:
    """Whether the one that ages a step later than the others is admitted first, when a row is free after these steps.

    Its turn is before theirs.
    """
    engine = SimulatedEngine(Setup(policy="priority", slots=1, aging_steps=6))
    engine.add([0], steps)
    engine.step()
    others = [request for _ in range(AGED) for request in engine.add([1], 4, turn=5)]
    (late,) = engine.add([1], 4, turn=1)
    while True:
        engine.step()
        if chosen := [request for request in engine.scheduler.running if request in (late, *others)]:
            return chosen == [late]


def test_who_ages_a_step_later_is_overtaken_in_that_step_alone() -> None:
    assert [first_of_a_crowd(steps) for steps in range(2, 12)].count(False) == 1


def test_first_come_first_served_admits_in_the_order_of_arrival() -> None:
    engine = SimulatedEngine(Setup(slots=2))
    requests = [request for length in (9, 2, 7, 1, 5) for request in engine.add([1] * length, 3)]
    admitted: list[Request] = []
    while engine.alive:
        engine.step()
        admitted += [request for request in engine.scheduler.running if request not in admitted]
    assert admitted == requests


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("priority", [2, 1, 0]), ("sjf", [1, 2, 0]), ("prefix", [0, 2, 1]), ("fcfs", [0, 1, 2])],
)
def test_each_policy_has_its_own_order(policy: str, expected: list[int]) -> None:
    engine = SimulatedEngine(Setup(policy=policy, slots=1, max_model_len=48))
    (first,) = engine.add([0] * 12 + [1] * 4, 1)
    while first in engine.alive:
        engine.step()
    crowd = [
        engine.add([0] * 12 + [1] * 8, 9, priority=2),
        engine.add([2] * 4, 2, priority=1),
        engine.add([0] * 8 + [2], 3, priority=0),
    ]
    order: list[int] = []
    while engine.alive:
        engine.step()
        for index, (request,) in enumerate(crowd):
            if request in engine.scheduler.running and index not in order:
                order.append(index)
    assert order == expected


def test_the_worst_request_gives_way() -> None:
    """When blocks run out, who goes last goes, also if it still computes its prompt."""
    setup = Setup(policy="priority", block_size=1, max_model_len=24, spare_blocks=0, slots=3, spare_budget=0)
    for first, second in ((-1, 1), (1, -1)):
        engine = SimulatedEngine(setup)
        (decoding,) = engine.add([0] * 2, 20, priority=first)
        engine.step()
        (prefilling,) = engine.add([1] * 18, 1, priority=second)
        while not engine.scheduler.preemption_count:
            engine.step()
        preempted = [decoding.queue.preemptions, prefilling.queue.preemptions]
        assert preempted == ([0, 1] if first < second else [1, 0])
        engine.run()


def test_a_static_batch_admits_nobody_before_its_last_request_ends() -> None:
    engine = SimulatedEngine(Setup(continuous=False, slots=2, max_model_len=40))
    (short,), (long,) = engine.add([0], 2), engine.add([1], 20)
    (later,) = engine.add([2], 2)
    while long in engine.alive:
        engine.step()
        assert later in engine.scheduler.waiting
    assert short not in engine.alive
    engine.run()


# Samples of one prompt


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_samples_share_the_blocks_of_their_prompt(prefix_cache: bool) -> None:
    setup = Setup(prefix_cache=prefix_cache, spare_blocks=20, slots=8, spare_budget=40)
    engine = SimulatedEngine(setup)
    samples = engine.add([0, 1, 2] * 4, 4, n=6)
    engine.step()
    assert set(engine.scheduler.running) == set(samples)
    assert len({tuple(request.block_ids[:2]) for request in samples}) == 1
    used = engine.cache.pool.capacity - engine.cache.available_count
    assert used <= 3 + 5, "two blocks are shared, and each sample has a last one of its own"
    engine.run()


def test_decisions_need_no_torch() -> None:
    modules = "kvern.engine.core, kvern.engine.scheduler, kvern.engine.queues, kvern.cache.manager"
    check = f"import {modules}, sys; assert 'torch' not in sys.modules, 'torch is imported'"
    subprocess.run([sys.executable, "-c", check], check=True)
