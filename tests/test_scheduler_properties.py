"""Random lives of requests through the real core, scheduler and cache: nothing is lost, mixed up or starved."""

import itertools
import random
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

import kvern.engine.core
from kvern.adapters.slots import AdapterSlots
from kvern.cache.manager import KVCacheManager
from kvern.cache.radix import RadixCache
from kvern.cache.tier import TierTraffic
from kvern.engine.policy import POLICIES
from kvern.engine.scheduler import Scheduler
from kvern.engine.trial import Trial
from kvern.engine.waiting import WaitingQueue
from kvern.request import FinishReason, Request, State
from kvern.step import BlockCopy, BlockSave, SchedulerOutput
from tests.host_tier import HostTier
from tests.simulated_engine import STOP_TOKEN, Setup, SimulatedEngine

SWITCHES = list(itertools.product((True, False), repeat=4))


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    paged, prefix_cache, chunked, continuous = draw(st.sampled_from(SWITCHES))
    return Setup(
        paged=paged,
        prefix_cache=prefix_cache,
        chunked=chunked,
        continuous=continuous,
        policy=draw(st.sampled_from(sorted(POLICIES))),
        depth=draw(st.integers(1, 3)),
        block_size=draw(st.integers(1, 5)),
        max_model_len=draw(st.integers(8, 24)),
        spare_blocks=draw(st.integers(0, 6)),
        slots=draw(st.integers(1, 5)),
        spare_budget=draw(st.integers(0, 8)),
        aging_steps=draw(st.integers(1, 12)),
        adapter_slots=draw(st.integers(1, 3)),
        tier_blocks=draw(st.sampled_from((0, 3, 30))),
        tier_delay=draw(st.integers(0, 3)),
        tier_faults=draw(st.integers(0, 3)),
        drafts=draw(st.sampled_from((0, 0, 1, 4))),
    )


SHARED = ([0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2], [0, 1, 2, 0, 1, 1, 1, 1, 1, 1], [2, 2, 2, 2, 2, 2, 2, 2])


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """Mostly a piece of what other prompts begin with, and something of its own."""
    shared = draw(st.sampled_from(SHARED))
    prompt = shared[: draw(st.integers(0, len(shared)))] + draw(st.lists(st.integers(0, STOP_TOKEN), max_size=5))
    return prompt or [0]


FAULTS = st.sampled_from((None, None, None, None, None, None, 1, 6, 12))


class EngineMachine(RuleBasedStateMachine):
    """Arrivals, steps, failures, aborts, stops and evictions in any order."""

    @initialize(setup=setups())
    def start(self, setup: Setup) -> None:
        self.engine = SimulatedEngine(setup)

    @rule(
        prompt=prompts(),
        max_tokens=st.integers(1, 12),
        n=st.sampled_from((1, 1, 1, 2, 4)),
        namespace=st.sampled_from((0, 0, 0, 1)),
        priority=st.integers(-1, 1),
        turn=st.sampled_from((0, 0, 1, 5)),
        stop=st.booleans(),
        prompt_logprobs_from=st.sampled_from((None, None, None, 1, 4, 9)),
        adapter=st.sampled_from((None, None, 1, 2, 3)),
        fault=FAULTS,
    )
    def add(self, prompt: list[int], max_tokens: int, **options: Any) -> None:
        prompt = prompt[: self.engine.setup.max_model_len - 1]
        self.engine.add(prompt, max_tokens, **options)

    @rule(
        prompt=prompts(),
        max_tokens=st.integers(1, 12),
        beams=st.integers(1, 5),
        n=st.integers(1, 5),
        length_penalty=st.sampled_from((1.0, 0.0, -1.0, 2.0)),
        early_stopping=st.sampled_from((False, True, "never")),
        namespace=st.sampled_from((0, 0, 0, 1)),
        priority=st.integers(-1, 1),
        stop=st.booleans(),
        prompt_logprobs_from=st.sampled_from((None, None, None, 1, 4)),
        adapter=st.sampled_from((None, None, 1, 2, 3)),
        fault=FAULTS,
    )
    def search(self, prompt: list[int], max_tokens: int, beams: int, n: int, **options: Any) -> None:
        setup = self.engine.setup
        beams = min(beams, setup.limits.max_batch_requests)
        prompt = prompt[: setup.max_model_len - 1]
        self.engine.add(prompt, max_tokens, beams=beams, n=min(n, beams), **options)

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    @precondition(lambda self: self.engine.alive)
    @rule(place=st.integers(0, 1000), reason=st.sampled_from(("abort", "stop")))
    def finish(self, place: int, reason: FinishReason) -> None:
        alive = self.engine.alive
        self.engine.finish(alive[place % len(alive)], reason)

    @precondition(lambda self: self.engine.alive)
    @rule(places=st.tuples(st.integers(0, 1000), st.integers(0, 1000)))
    def clash(self, places: tuple[int, int]) -> None:
        alive = self.engine.alive
        self.engine.clash(*(alive[place % len(alive)] for place in places))

    @rule(count=st.integers(1, 8))
    def evict(self, count: int) -> None:
        before = self.engine.cache.pool.free_count + self.engine.cache.tree.evictable_count
        self.engine.cache.tree.evict(count)
        assert self.engine.cache.available_count == before
        self.engine.check()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.run()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=300, stateful_step_count=30)


def random_life(setup: Setup, seed: int, arrivals: int = 40, faults: float = 0.1) -> SimulatedEngine:
    """Serve a random crowd to its end, of which the share `faults` lets a step fail."""
    dice, engine = random.Random(seed), SimulatedEngine(setup)
    while arrivals or engine.alive:
        if arrivals and dice.random() < 0.4:
            shared = dice.choice(SHARED)
            prompt = shared[: dice.randint(1, len(shared))] + [dice.randrange(4) for _ in range(dice.randint(0, 6))]
            beams = min(dice.choice((1, 2, 4)), setup.limits.max_batch_requests) if dice.random() < 0.3 else None
            engine.add(
                prompt[: setup.max_model_len - 1],
                dice.randint(1, 9),
                n=dice.choice((1, 1, 1, 3)) if beams is None else dice.randint(1, beams),
                beams=beams,
                namespace=dice.random() < 0.1,
                priority=dice.randint(-1, 1),
                stop=dice.random() < 0.5,
                prompt_logprobs_from=dice.choice((None, None, None, None, 1, 1 + dice.randrange(12))),
                adapter=dice.choice((None, None, 1, 2, 3)),
                fault=dice.randint(1, 20) if dice.random() < faults else None,
            )
            arrivals -= 1
        if engine.alive and dice.random() < faults / 10:
            engine.clash(dice.choice(engine.alive), dice.choice(engine.alive))
        if engine.alive and dice.random() < 0.03:
            engine.finish(dice.choice(engine.alive))
        engine.step()
    engine.run()
    return engine


def consume(lives: Iterable[SimulatedEngine]) -> None:
    for _ in lives:
        pass


def random_setup(seed: int) -> Setup:
    """Any engine, small enough to run out of everything."""
    dice = random.Random(seed)
    return Setup(
        *dice.choice(SWITCHES),
        policy=dice.choice(sorted(POLICIES)),
        depth=dice.randint(1, 3),
        block_size=dice.randint(1, 5),
        max_model_len=dice.randint(14, 30),
        spare_blocks=dice.randint(0, 8),
        slots=dice.randint(1, 6),
        spare_budget=dice.randint(0, 12),
        aging_steps=dice.randint(1, 20),
        tier_blocks=dice.choice((0, 3, 30)),
        tier_delay=dice.randint(0, 3),
        tier_faults=dice.randint(0, 3),
        drafts=dice.choice((0, 0, 1, 4)),
    )


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize(("paged", "prefix_cache", "chunked", "continuous"), SWITCHES)
def test_every_configuration_serves_a_crowd(
    paged: bool, prefix_cache: bool, chunked: bool, continuous: bool, policy: str
) -> None:
    preemptions = 0
    for depth in (1, 2):
        setup = Setup(paged, prefix_cache, chunked, continuous, policy, depth)
        engine = random_life(setup, seed=depth)
        assert all(request.finish_reason for request in engine.requests.values())
        preemptions += engine.core.statistics().preemptions
    if paged and not prefix_cache:
        assert preemptions, "the pool is too large for this test to see a preemption"


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
        assert [decoding.preemptions, prefilling.preemptions] == ([0, 1] if first < second else [1, 0])
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


# The machine notices mistakes


def without_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    admit = KVCacheManager.admit

    def admit_without_copy(self: KVCacheManager, *args: Any) -> list[BlockCopy] | None:
        return None if admit(self, *args) is None else []

    monkeypatch.setattr(KVCacheManager, "admit", admit_without_copy)


def copies_of_what_is_not_written_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    admit = KVCacheManager.admit

    def admit_too_trusting(
        self: KVCacheManager, request: Request, step: int, reserve: int = 0
    ) -> list[BlockCopy] | None:
        return admit(self, request, 10**9, reserve)

    monkeypatch.setattr(KVCacheManager, "admit", admit_too_trusting)


def copies_in_the_wrong_order(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = Scheduler.schedule

    def schedule_reversed(self: Scheduler) -> SchedulerOutput:
        output = schedule(self)
        output.copies.reverse()
        return output

    monkeypatch.setattr(Scheduler, "schedule", schedule_reversed)


def blocks_released_early(monkeypatch: pytest.MonkeyPatch) -> None:
    update = Scheduler.update

    def update_and_release(self: Scheduler, request: Request, token_ids: list[int], sampled: int) -> bool:
        full = update(self, request, token_ids, sampled)
        if full and len(request.block_ids) > len(request.nodes):
            self.cache.pool.release(request.block_ids[-1:])
        return full

    monkeypatch.setattr(Scheduler, "update", update_and_release)


def used_nodes_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    def acquire_nothing(self: RadixCache, nodes: list[Any]) -> None:
        pass

    monkeypatch.setattr(RadixCache, "acquire", acquire_nothing)
    monkeypatch.setattr(RadixCache, "release", acquire_nothing)


def namespaces_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCacheManager, "_namespace", lambda self, request: b"everybody")


def adapters_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCacheManager, "_namespace", lambda self, request: request.spec.namespace)


def adapter_replaced_while_used(monkeypatch: pytest.MonkeyPatch) -> None:
    enter, leave = AdapterSlots.enter, AdapterSlots.leave

    def enter_and_leave(self: AdapterSlots, key: int) -> tuple[int, bool]:
        entered = enter(self, key)
        leave(self, key)
        return entered

    monkeypatch.setattr(AdapterSlots, "enter", enter_and_leave)
    monkeypatch.setattr(AdapterSlots, "leave", lambda self, key: None)
    monkeypatch.setattr(AdapterSlots, "check_integrity", lambda self, running: None)


def aging_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WaitingQueue, "age", lambda self, step: None)


def passed_by_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WaitingQueue, "wake", lambda self, cause: None)


def prefill_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "_chunk", lambda self, remaining, budget: min(remaining, budget, 2))


def forks_that_copy_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    fork = KVCacheManager.fork

    def fork_without_copy(self: KVCacheManager, *args: Any) -> list[BlockCopy] | None:
        copies = fork(self, *args)
        return copies and [BlockCopy(copied.source, copied.target, 0) for copied in copies]

    monkeypatch.setattr(KVCacheManager, "fork", fork_without_copy)


def forks_that_share_a_partial_block(monkeypatch: pytest.MonkeyPatch) -> None:
    def fork_sharing_all(self: KVCacheManager, parent: Request, child: Request) -> list[BlockCopy] | None:
        self.pool.share(parent.block_ids)
        self.tree.acquire(parent.nodes)
        child.block_ids, child.nodes = list(parent.block_ids), list(parent.nodes)
        child.num_computed_tokens = parent.num_computed_tokens
        return []

    monkeypatch.setattr(KVCacheManager, "fork", fork_sharing_all)


def held_beams_keep_their_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "_make_room", lambda self: False)


def lost_blocks_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RadixCache, "forget_since", lambda self, step: None)


def scheduled_means_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RadixCache, "is_written", lambda self, node: True)


def blocks_saved_a_step_late(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = TierTraffic.plan
    late: list[BlockSave] = []

    def plan_late(self: TierTraffic, output: SchedulerOutput) -> None:
        plan(self, output)
        late[:], output.saves = output.saves, list(late)

    monkeypatch.setattr(TierTraffic, "plan", plan_late)


def lost_saves_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostTier, "lose", lambda self, keys: None)


def failed_loads_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = TierTraffic.loaded
    monkeypatch.setattr(TierTraffic, "loaded", lambda self, number, count: loaded(self, number, 10**9))


def loading_blocks_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    fetch = TierTraffic.fetch

    def fetch_and_free(self: TierTraffic, *args: Any) -> bool:
        waits = fetch(self, *args)
        self._pool.release([block for load in self._loading.values() for block in load.blocks])
        return waits

    monkeypatch.setattr(TierTraffic, "fetch", fetch_and_free)


def lost_adapters_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AdapterSlots, "clear", lambda self: None)


def lost_tokens_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    undo = Scheduler.undo

    def undo_but_wait(self: Scheduler, step: int) -> None:
        awaited = {request: request.in_flight for request in (*self.waiting, *self.running)}
        undo(self, step)
        for request in self.waiting:
            request.in_flight = awaited[request]

    monkeypatch.setattr(Scheduler, "undo", undo_but_wait)


def everybody_runs_during_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "restrict", lambda self, units: None)


def all_are_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trial, "failed", lambda self, planned: next(request.unit for request, _ in planned))


def rejected_drafts_count(monkeypatch: pytest.MonkeyPatch) -> None:
    update = Scheduler.update

    def update_and_keep(self: Scheduler, request: Request, token_ids: list[int], sampled: int) -> bool:
        full = update(self, request, token_ids, sampled)
        request.num_computed_tokens += (sampled - len(token_ids)) * (request.state is State.RUNNING)
        return full

    monkeypatch.setattr(Scheduler, "update", update_and_keep)


def rows_behind_drafts_begin_where_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = Scheduler.schedule

    def schedule_certain(self: Scheduler) -> SchedulerOutput:
        output = schedule(self)
        output.scheduled = [msgspec.structs.replace(item, uncertain=False) for item in output.scheduled]
        return output

    monkeypatch.setattr(Scheduler, "schedule", schedule_certain)


def drafts_follow_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    drafts = Scheduler._drafts

    def drafts_at_once(self: Scheduler, request: Request, budget: int) -> list[int]:
        request.drafts_in_flight, before = 0, request.drafts_in_flight
        found = drafts(self, request, budget)
        request.drafts_in_flight = before
        return found

    monkeypatch.setattr(Scheduler, "_drafts", drafts_at_once)


def answers_go_on_behind_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvern.engine.core, "_until_stop", lambda request, token_ids: token_ids)


Mistake = Callable[[pytest.MonkeyPatch], None]
TIER_MISTAKES: list[Mistake] = [
    blocks_saved_a_step_late,
    lost_saves_believed,
    failed_loads_believed,
    loading_blocks_freed,
]
MISTAKES: list[Mistake] = [
    without_copies,
    copies_of_what_is_not_written_yet,
    copies_in_the_wrong_order,
    blocks_released_early,
    used_nodes_evicted,
    namespaces_mixed,
    adapters_mixed,
    adapter_replaced_while_used,
    aging_forgotten,
    passed_by_for_ever,
    prefill_split,
    forks_that_copy_nothing,
    forks_that_share_a_partial_block,
    held_beams_keep_their_blocks,
    lost_blocks_reused,
    scheduled_means_written,
    lost_adapters_not_loaded,
    lost_tokens_awaited,
    everybody_runs_during_a_trial,
    all_are_blamed,
    rejected_drafts_count,
    rows_behind_drafts_begin_where_planned,
    drafts_follow_drafts,
    answers_go_on_behind_a_stop,
]


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


@pytest.mark.parametrize("mistake", [mistake for mistake in MISTAKES if mistake is not copies_in_the_wrong_order])
def test_the_machine_notices(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch)
    few = settings(max_examples=1000, stateful_step_count=30, report_multiple_bugs=False, phases=[Phase.generate])
    with pytest.raises((AssertionError, ValueError, KeyError)):
        run_state_machine_as_test(EngineMachine, settings=few)


WAITS: list[Mistake] = [held_beams_keep_their_blocks, lost_tokens_awaited, everybody_runs_during_a_trial]
"""Mistakes through which somebody waits for ever; of a crowd, everybody leaves some time."""


@pytest.mark.parametrize("mistake", [mistake for mistake in MISTAKES if mistake not in WAITS])
def test_a_crowd_notices(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch)
    with pytest.raises((AssertionError, ValueError, KeyError)):
        consume(random_life(random_setup(seed), seed) for seed in range(200))


@pytest.mark.parametrize("mistake", TIER_MISTAKES)
def test_a_crowd_with_a_tier_notices(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    def setup(seed: int) -> Setup:
        return replace(random_setup(seed), paged=True, prefix_cache=True, tier_blocks=30, tier_faults=2)

    mistake(monkeypatch)
    with pytest.raises((AssertionError, ValueError, KeyError)):
        consume(random_life(setup(seed), seed, faults=0.3) for seed in range(300))


def test_decisions_need_no_torch() -> None:
    modules = "kvern.engine.core, kvern.engine.scheduler, kvern.engine.policy, kvern.cache.manager"
    check = f"import {modules}, sys; assert 'torch' not in sys.modules, 'torch is imported'"
    subprocess.run([sys.executable, "-c", check], check=True)
