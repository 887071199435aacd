"""Who waits costs nothing: the decisions are those of a plain sorted list, without looking at all that wait."""

import itertools
from collections.abc import Callable, Iterable, Iterator

import pytest

from kvern.cache.manager import KVCacheManager
from kvern.engine import queues
from kvern.engine.queues import AGED, LOOKS, POLICIES, Cause, Order, Policy, RunningRequests, WaitingQueue
from kvern.engine.scheduler import Scheduler
from kvern.request.request import PromptInput, Request, RequestSpec
from kvern.request.sampling_params import ResolvedParams
from kvern.request.step import SchedulerOutput, StepResult
from tests.support.random_lives import random_life, random_setup
from tests.support.simulated_device import Setup
from tests.support.simulated_engine import SimulatedEngine

CROWD = 2000


class SortedList(WaitingQueue):
    """Sorts all whenever it is asked, and asks everybody anew after each admission.

    Keys are computed anew when the queue's are: at `refresh`, and for a request that comes, ages or is woken.
    """

    def __init__(self, policy: Policy, cache: KVCacheManager, running: RunningRequests, aging_steps: int) -> None:
        self.requests: list[Request] = []
        self.arrivals = itertools.count()
        self.orders: dict[Request, Order] = {}
        self.passed: list[Request] = []
        self.causes: dict[Request, Cause] = {}
        self.policy, self.cache, self.running, self.aging_steps = policy, cache, running, aging_steps

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    def __contains__(self, request: Request) -> bool:
        return request in self.requests

    @property
    def has_ready(self) -> bool:
        return bool(self.ready())

    def add(self, request: Request, step: int) -> None:
        request.queue.waiting_since = step
        if request.queue.arrival < 0:
            request.queue.arrival = next(self.arrivals)
        self.requests.append(request)
        self.look_at(request)

    def remove(self, request: Request) -> None:
        self.requests.remove(request)
        self.causes.pop(request, None)
        self.passed.clear()

    def look_at(self, request: Request) -> None:
        self.orders[request] = self.policy.order(request, self.cache)

    def ready(self) -> list[Request]:
        left = (item for item in self.requests if item not in self.passed)
        return sorted(left, key=self.orders.__getitem__)

    def best(self, adapters: bool = True) -> Request | None:
        firsts: dict[tuple[bool, str], Request] = {}
        for item in self.ready():
            firsts.setdefault((item.adapter is not None, item.owner), item)
        heads = (item for (uses, _), item in firsts.items() if adapters or not uses)
        return min(heads, key=self.before, default=None)

    def first(self, count: int) -> list[Request]:
        return sorted((item for item in self.ready() if item not in self.causes), key=self.before)[:count]

    def before(self, item: Request) -> tuple[object, ...]:
        order = self.orders[item]
        return *order[:2], *self.running.share(item), *order[2:]

    def has_owners(self, owners: Iterable[str]) -> bool:
        return len({*owners, *(item.owner for item in self.requests)}) > 1

    def park(self, request: Request, cause: Cause) -> None:
        self.passed.append(request)
        self.causes.setdefault(request, cause)

    def wake(self, cause: Cause) -> None:
        for request in [item for item, its_cause in self.causes.items() if its_cause == cause]:
            del self.causes[request]
            self.passed = [item for item in self.passed if item is not request]
            self.look_at(request)

    def wake_all(self) -> None:
        for cause in list(self.causes.values()):
            self.wake(cause)

    def age(self, step: int) -> None:
        self.passed.clear()
        for request in self.requests:
            if self.policy.ages and not request.queue.aged:
                request.queue.aged = step - request.queue.waiting_since >= self.aging_steps
                if request.queue.aged:
                    self.look_at(request)

    def refresh(self) -> None:
        if not self.policy.fixed:
            for request in self.requests:
                self.look_at(request)

    def check_integrity(self, cause: Callable[[Request], Cause | None]) -> None:
        pass


def steps_of_a_life(seed: int, monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[str, int, int]]]:
    """What each step of a random crowd computes."""
    steps = []
    submit = SimulatedEngine.submit

    def noted(self: SimulatedEngine, output: SchedulerOutput) -> StepResult:
        spans = [(item.start, item.count) for item in output.scheduled]
        steps.append([(name, *span) for name, span in zip(output.request_ids, spans, strict=True)])
        return submit(self, output)

    with monkeypatch.context() as patch:
        patch.setattr(SimulatedEngine, "submit", noted)
        random_life(random_setup(seed), seed, faults=0.1 if seed % 2 else 0.0)
    return steps


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(12, 40))]
)
def test_decisions_are_those_of_a_sorted_list(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of samples, beams, adapters, failing steps and aborts in any mixture."""
    if random_setup(seed).policy == "prefix":
        monkeypatch.setattr(queues, "LOOKS", 100)  # all keys are computed anew at each step
    found = steps_of_a_life(seed, monkeypatch)
    monkeypatch.setattr("kvern.engine.scheduler.WaitingQueue", SortedList)
    assert found == steps_of_a_life(seed, monkeypatch)


class Counted:
    """An engine with a free row and no free blocks, a crowd that waits, and what its steps look at."""

    def __init__(self, policy: str, monkeypatch: pytest.MonkeyPatch, requests: int = CROWD, **options: object) -> None:
        self.keys = self.questions = 0
        key, cause = POLICIES[policy].key, Scheduler._cause

        def counted_key(request: Request, cache: KVCacheManager) -> float:
            self.keys += 1
            return key(request, cache)

        def counted_cause(scheduler: Scheduler, request: Request) -> Cause | None:
            self.questions += 1
            return cause(scheduler, request)

        counted = Policy(counted_key, POLICIES[policy].fixed, POLICIES[policy].ages)
        monkeypatch.setitem(POLICIES, policy, counted)
        monkeypatch.setattr(Scheduler, "_cause", counted_cause)
        setup = Setup(policy=policy, slots=8, spare_budget=200, max_model_len=200, spare_blocks=0, aging_steps=10_000)
        self.engine = SimulatedEngine(setup)
        monkeypatch.setattr(self.engine, "check", lambda: None)  # it does look at all
        self.engine.add([0] * 100, 100)
        self.engine.step()
        for index in range(requests):
            self.engine.add([1 + index % 2] * 110, 8, priority=index % 5, turn=index % 7, **options)  # type: ignore[arg-type]
        self.look(2)

    def look(self, steps: int) -> tuple[int, int]:
        """Keys computed in so many steps, and how often they asked whether somebody can run."""
        self.keys = self.questions = 0
        for _ in range(steps):
            self.engine.scheduler.schedule()
            (request,) = self.engine.scheduler.running
            self.engine.scheduler.update(request, [0], 1)
        return self.keys, self.questions


@pytest.mark.sample(2)
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_step_looks_at_few_that_wait(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, questions = Counted(policy, monkeypatch).look(steps=10)
    assert keys <= (0 if POLICIES[policy].fixed else 10 * 2 * LOOKS) and questions == 10


def test_a_step_passes_by_those_that_cannot_run_without_asking_again(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted("priority", monkeypatch, adapter=1)
    scheduler = counted.engine.scheduler
    monkeypatch.setattr(scheduler.adapters, "fits", lambda key: False)
    assert counted.look(steps=10) == (0, 10)
    scheduler.restrict(frozenset({next(iter(scheduler.running)).unit}))
    assert counted.look(steps=1) == (0, CROWD), "each is passed by once"
    assert counted.look(steps=10) == (0, 0)
    scheduler.restrict(None)
    counted.look(steps=1)
    assert counted.look(steps=10) == (0, 10)
    scheduler.check_integrity()


def test_a_crowd_ages_a_few_at_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted("priority", monkeypatch)
    scheduler = counted.engine.scheduler
    scheduler.step += 10_000
    assert counted.look(steps=10) == (0, 10)
    assert sum(request.queue.aged for request in scheduler.waiting) == 10 * AGED
    assert [request.queue.aged for request in scheduler.waiting] == [True] * 10 * AGED + [False] * (CROWD - 10 * AGED)
    scheduler.check_integrity()


def test_those_that_leave_the_middle_of_the_queue_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Counted("sjf", monkeypatch).engine.scheduler
    for request in list(scheduler.waiting)[100:]:
        scheduler.finish(request, "abort")
    entries = sum(len(heap) for heap in scheduler.waiting._heaps.values())
    assert len(scheduler.waiting) == 100 and entries <= 2 * 100 + LOOKS
    scheduler.check_integrity()


def test_what_becomes_cached_moves_a_request_forward() -> None:
    """However many wait: keys are computed anew in turn."""
    queue_length = 5 * LOOKS
    cache = KVCacheManager(64, 4)
    queue = WaitingQueue(POLICIES["prefix"], cache, RunningRequests(4, POLICIES["prefix"], cache), aging_steps=1000)
    requests = []
    for index in range(queue_length):
        spec = RequestSpec(str(index), PromptInput([index] * 9), ResolvedParams(), 4)
        requests.append(Request(spec))
        requests[-1].queue.arrival = index
    for request in requests:
        queue.add(request, 0)
    assert queue.best() is requests[0]
    block = cache.pool.allocate(1)[0]
    favoured = requests[-1]
    cache.tree.insert(favoured.cache_namespace, None, tuple(favoured.token_ids[:4]), block, 0)
    refreshed = 0
    while queue.best() is not favoured:
        queue.refresh()
        refreshed += 1
    assert 0 < refreshed <= queue_length // LOOKS
    cache.pool.release([block])
    cache.tree.clear()
    queue.refresh()
    assert queue.best() is not favoured, "the best are looked at again"
