"""Random lives notice mistakes that are planted in the scheduler and the cache."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

import kvern.engine.core
import kvern.engine.scheduler
from kvern.adapters.places import AdapterPlaces
from kvern.cache.manager import KVCacheManager
from kvern.cache.messages import StateMessage
from kvern.cache.radix import RadixCache
from kvern.cache.states import StatePool
from kvern.drafting.room import Wanted, to_verify
from kvern.engine.queues import WaitingQueue
from kvern.engine.scheduler import Scheduler
from kvern.engine.stages import ToldStages
from kvern.engine.step_budget import StepBudget, StepTime
from kvern.engine.trial import Trial
from kvern.request.request import Request, State
from kvern.request.step import BlockCopy, SchedulerOutput
from tests.support.random_lives import EngineMachine, consume, random_life, random_setup, with_states
from tests.support.simulated_device import Setup


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

    def schedule_reversed(
        self: Scheduler, time: StepTime | None = None, wanted: Wanted | None = None, begin: int = 1
    ) -> SchedulerOutput:
        output = schedule(self, time, wanted, begin)
        output.copies.reverse()
        return output

    monkeypatch.setattr(Scheduler, "schedule", schedule_reversed)


def blocks_released_early(monkeypatch: pytest.MonkeyPatch) -> None:
    update = Scheduler.update

    def update_and_release(self: Scheduler, request: Request, *arguments: Any) -> bool:
        full = update(self, request, *arguments)
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
    enter, leave = AdapterPlaces.enter, AdapterPlaces.leave

    def enter_and_leave(self: AdapterPlaces, key: int) -> tuple[int, bool]:
        entered = enter(self, key)
        leave(self, key)
        return entered

    monkeypatch.setattr(AdapterPlaces, "enter", enter_and_leave)
    monkeypatch.setattr(AdapterPlaces, "leave", lambda self, key: None)
    monkeypatch.setattr(AdapterPlaces, "check_integrity", lambda self, running: None)


def aging_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WaitingQueue, "age", lambda self, step: None)


def passed_by_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WaitingQueue, "wake", lambda self, cause: None)


def prefill_split(monkeypatch: pytest.MonkeyPatch) -> None:
    def chunk(self: StepBudget, start: int, remaining: int, *others: int) -> int:
        return min(remaining, self.tokens, 2)

    monkeypatch.setattr(StepBudget, "chunk", chunk)


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


def lost_adapters_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AdapterPlaces, "clear", lambda self: None)


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

    def update_and_keep(self: Scheduler, request: Request, token_ids: list[int], sampled: int, unused: int) -> bool:
        full = update(self, request, token_ids, sampled, unused)
        request.num_computed_tokens += (sampled - len(token_ids)) * (request.state is State.RUNNING)
        return full

    monkeypatch.setattr(Scheduler, "update", update_and_keep)


def rows_behind_drafts_begin_where_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = Scheduler.schedule

    def schedule_certain(
        self: Scheduler, time: StepTime | None = None, wanted: Wanted | None = None, begin: int = 1
    ) -> SchedulerOutput:
        output = schedule(self, time, wanted, begin)
        output.scheduled = [msgspec.structs.replace(item, uncertain=False) for item in output.scheduled]
        return output

    monkeypatch.setattr(Scheduler, "schedule", schedule_certain)


def drafts_follow_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_once(request: Request, cache: KVCacheManager, others: int, spare: int) -> tuple[int, list[int]]:
        request.drafts.in_flight, before = 0, request.drafts.in_flight
        found = to_verify(request, cache, others, spare)
        request.drafts.in_flight = before
        return found

    monkeypatch.setattr(kvern.engine.scheduler, "to_verify", at_once)


def guesses_without_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who guesses keeps keys in blocks that the row does not have."""
    take = Scheduler._take

    def take_without_blocks(
        self: Scheduler, request: Request, count: int, sampled: int, output: SchedulerOutput
    ) -> None:
        extend, self._extend = self._extend, lambda *_: True  # type: ignore[method-assign]
        take(self, request, count, sampled, output)
        self._extend = extend  # type: ignore[method-assign]

    monkeypatch.setattr(Scheduler, "_take", take_without_blocks)


def answers_go_on_behind_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Request, "until_stop", lambda _, token_ids: token_ids)


Mistake = Callable[[pytest.MonkeyPatch], None]


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
    guesses_without_blocks,
    answers_go_on_behind_a_stop,
]


WAITS: list[Mistake] = [held_beams_keep_their_blocks, lost_tokens_awaited, everybody_runs_during_a_trial]
"""Mistakes through which somebody waits for ever; of a crowd, everybody leaves some time. The first is found late."""


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(mistake, marks=[] if mistake is WAITS[1] else [pytest.mark.nightly])
        for mistake in MISTAKES
        if mistake is not copies_in_the_wrong_order
    ],
)
def test_the_machine_notices(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch)
    few = settings(max_examples=3000, stateful_step_count=30, report_multiple_bugs=False, phases=[Phase.generate])
    with pytest.raises((AssertionError, ValueError, KeyError)):
        run_state_machine_as_test(EngineMachine, settings=few)


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(mistake, marks=[pytest.mark.nightly] if number % 4 else [])
        for number, mistake in enumerate(mistake for mistake in MISTAKES if mistake not in WAITS)
    ],
)
def test_a_crowd_notices(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch)
    with pytest.raises((AssertionError, ValueError, KeyError)):
        consume(random_life(random_setup(seed), seed) for seed in range(200))


def states_of_failed_steps_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StatePool, "undo", lambda self, step, waiting: None)


def states_are_copied_a_step_early(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = StatePool.plan

    def plan_early(self: StatePool, output: SchedulerOutput) -> Any:
        for request in self._at_marks:
            self.snapshot(request, output.step)
        self._at_marks.clear()
        return plan(self, output)

    monkeypatch.setattr(StatePool, "plan", plan_early)


def states_of_new_requests_are_not_zeroed(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = StatePool.plan

    def plan_without_zeros(self: StatePool, output: SchedulerOutput) -> Any:
        message = plan(self, output)
        if isinstance(message, StateMessage):
            message = StateMessage([pair for pair in message.copies if pair[0] >= 0], message.given)
        return message

    monkeypatch.setattr(StatePool, "plan", plan_without_zeros)


def states_of_unverified_drafts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    free = KVCacheManager.free

    def free_what_is_known(self: KVCacheManager, request: Request, step: int) -> None:
        request.num_computed_tokens = min(request.num_computed_tokens, len(request.token_ids))
        free(self, request, step)

    monkeypatch.setattr(KVCacheManager, "free", free_what_is_known)


def states_behind_a_stop_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    update = Scheduler.update

    def update_and_forget(self: Scheduler, request: Request, token_ids: list[int], sampled: int, unused: int) -> bool:
        return update(self, request, token_ids, sampled)

    monkeypatch.setattr(Scheduler, "update", update_and_forget)


def states_of_stages_see_no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ToldStages, "ended", lambda self, output, result: None)


STATE_MISTAKES: list[Mistake] = [
    states_of_stages_see_no_drafts,
    states_of_failed_steps_stay,
    states_are_copied_a_step_early,
    states_of_new_requests_are_not_zeroed,
    states_of_unverified_drafts_are_kept,
    states_behind_a_stop_are_kept,
    rejected_drafts_count,
    rows_behind_drafts_begin_where_planned,
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("mistake", STATE_MISTAKES)
def test_a_crowd_with_states_notices(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    def setup(seed: int) -> Setup:
        setup = replace(random_setup(seed), paged=True, prefix_cache=True, chunked=True, drafts=seed % 4)
        return with_states(setup, 8)

    mistake(monkeypatch)
    with pytest.raises((AssertionError, ValueError, KeyError)):
        consume(random_life(setup(seed), seed, faults=0.3) for seed in range(300))
