"""Recorded runs of a model: given the times of the steps, a simulation decides each of them as the engine did."""

import random

import msgspec
import pytest

from kvern.bench.steps import MeasuredEngine
from kvern.config import EngineConfig
from kvern.engine.queues import POLICIES
from kvern.loads.request import LoadRequest
from kvern.simulate.engine import EngineSizes
from kvern.simulate.records import StepRecord, replay


def load() -> list[LoadRequest]:
    """A crowd for few rows and blocks: prompts that share their beginnings, of two tenants."""
    dice = random.Random(3)
    arrivals = sorted(dice.uniform(0, 0.3) for _ in range(24))
    return [
        LoadRequest(arrival, dice.choice((20, 90, 600)), dice.randint(2, 40), tenant=dice.choice("ab"))
        if place % 3
        else LoadRequest(arrival, 560, dice.randint(2, 40), (dice.choice((1, 2)), 10 + dice.choice((1, 2))))
        for place, arrival in enumerate(arrivals)
    ]


@pytest.fixture(scope="module")
def engine() -> MeasuredEngine:
    config = EngineConfig(
        "kvern-1m", max_model_len=704, max_batch_requests=6, max_batch_tokens=128, kv_cache_tokens=1408, block_size=8
    )
    return MeasuredEngine(config)


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


def test_a_replay_notices_other_decisions(engine: MeasuredEngine) -> None:
    record = recorded(engine)
    others: list[EngineSizes] = [
        msgspec.structs.replace(record.header.sizes, **change)
        for change in ({"max_batch_tokens": 120}, {"prefix_cache": False}, {"max_batch_requests": 5})
    ]
    assert all(replay(record, sizes).differs is not None for sizes in others)
