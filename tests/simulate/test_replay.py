"""Recorded runs of a model: given the times of the steps, a simulation decides each of them as the engine did."""

import gc
import random
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import msgspec
import pytest

from kvern.bench.steps import MeasuredEngine
from kvern.config import EngineConfig
from kvern.engine.queues import POLICIES
from kvern.io.interpreter import NEW_OBJECTS, SWITCH_SECONDS
from kvern.loads.request import LoadRequest
from kvern.runner.tier import Tier
from kvern.simulate.engine import EngineSizes, Prompts, simulated_engine
from kvern.simulate.records import StepRecord, replay
from tests.support.served import eventually
from tests.support.simulation import EvenPrice


def load() -> list[LoadRequest]:
    """A crowd for few rows and blocks: prompts that share their beginnings, of two tenants."""
    dice = random.Random(3)
    arrivals = sorted(dice.uniform(0, 0.02) for _ in range(24))  # faster than any processor answers them
    return [
        LoadRequest(arrival, dice.choice((20, 90, 600)), dice.randint(2, 40), tenant=dice.choice("ab"))
        if place % 3
        else LoadRequest(arrival, 560, dice.randint(2, 40), (dice.choice((1, 2)), 10 + dice.choice((1, 2))))
        for place, arrival in enumerate(arrivals)
    ]


@pytest.fixture(scope="module")
def engine() -> Iterator[MeasuredEngine]:
    config = EngineConfig(
        "kvern-1m", max_model_len=704, max_batch_requests=6, max_batch_tokens=128, kv_cache_tokens=1408, block_size=8
    )
    with closing(MeasuredEngine(config)) as engine:
        yield engine


def recorded(engine: MeasuredEngine, **changes: object) -> StepRecord:
    before = engine.sizes
    engine.sizes = msgspec.structs.replace(before, **changes)
    try:
        record, driven = engine.run(load())
    finally:
        engine.sizes = before
    assert all(answer.ended for answer in driven.timeline.answers.values())
    return record


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_replay_decides_every_step_alike(engine: MeasuredEngine, policy: str) -> None:
    record = recorded(engine, policy=policy, aging_steps=30)
    found = replay(record)
    assert found.differs is None and found.steps == len(record.steps) > 50


def test_steps_are_recorded_with_the_settings_of_an_engine_s_process() -> None:
    before = gc.get_threshold(), sys.getswitchinterval()
    frozen = gc.get_freeze_count()
    with closing(MeasuredEngine(EngineConfig("kvern-1m", max_model_len=128, kv_cache_tokens=1024))) as measured:
        measured.warm()
        measured.warm()
        assert gc.get_threshold()[0] == NEW_OBJECTS and sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)
        assert gc.get_freeze_count() > frozen
    assert (gc.get_threshold(), sys.getswitchinterval()) == before


def test_a_replay_notices_other_decisions(engine: MeasuredEngine) -> None:
    record = recorded(engine)
    others: list[EngineSizes] = [
        msgspec.structs.replace(record.header.sizes, **change)
        for change in ({"max_batch_tokens": 120}, {"prefix_cache": False}, {"max_batch_requests": 5})
    ]
    assert all(replay(record, sizes).differs is not None for sizes in others)


@pytest.fixture(scope="module")
def tiered_engine() -> Iterator[MeasuredEngine]:
    """A cache for two prompts, over host memory for a few more."""
    config = EngineConfig(
        "kvern-1m",
        max_model_len=704,
        max_batch_requests=6,
        max_batch_tokens=128,
        kv_cache_tokens=1408,
        block_size=8,
        kv_tier=("host:2MB",),
    )
    with closing(MeasuredEngine(config)) as engine:
        yield engine


def trust(engine: MeasuredEngine) -> Tier:
    """Has an engine load whatever its tier has, once all is saved."""
    tier: Any = engine.tier
    eventually(lambda: tier.shelf.is_quiet)
    engine.pace = tier.computing = None
    tier.shelf._clock = lambda: 0.0
    found: Tier = tier
    return found


def test_a_replay_decides_alike_what_a_tier_brings(tiered_engine: MeasuredEngine) -> None:
    """Its threads bring pages when they do, and what they have answered is in the record."""
    tiered_engine.warm()
    recorded(tiered_engine)  # the cache is another for each run, and the tier is not
    trust(tiered_engine)
    for policy in ("fcfs", "sjf"):
        record = recorded(tiered_engine, policy=policy)
        assert any(step.report for step in record.steps)
        found = replay(record)
        assert found.differs is None and found.steps == len(record.steps) > 50
    others = [step if not step.report else msgspec.structs.replace(step, report=None) for step in record.steps]
    assert replay(msgspec.structs.replace(record, steps=others)).differs is not None


def test_a_simulated_tier_brings_what_that_of_an_engine_brings() -> None:
    """Requests come one after the other, when all is saved: what is evicted and found is then the same."""
    config = EngineConfig("kvern-1m", max_model_len=704, kv_cache_tokens=1408, block_size=8, kv_tier=("host:2MB",))
    with closing(MeasuredEngine(config)) as measured:
        check_brought(measured)


def check_brought(measured: MeasuredEngine) -> None:
    tier = trust(measured)
    real, _ = measured.driven()
    dice = random.Random(5)
    load = [LoadRequest(0.0, 600, 9, (dice.randrange(6), 100 + place)) for place in range(40)]
    prompts = Prompts(measured.vocabulary)
    for number, request in enumerate(load):
        real.add(prompts.spec(number, request), 0.0)
        while real.has_work:
            real.step()
        eventually(lambda: tier.shelf.is_quiet)
    simulated = simulated_engine(measured.sizes, EvenPrice())
    simulated.run([msgspec.structs.replace(one, arrival=1e4 * place) for place, one in enumerate(load)], Prompts())
    assert simulated.hit_tokens == real.hit_tokens > simulated.loaded_tokens == real.loaded_tokens > 1000
    assert simulated.executor.tier is not None
    evicted = [each.executor.tier.figures()["host"].evicted_pages for each in (simulated, real)]  # type: ignore[union-attr]
    assert evicted[0] == evicted[1] > 0
