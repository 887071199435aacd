"""Tokens of prompts that see each other are computed in one step, and found in the prefix cache all together."""

from dataclasses import replace

import pytest

from kvern.cache.messages import WindowMessage
from kvern.cache.windows import WindowedBlocks
from kvern.request.spans import Spans
from kvern.request.step import ExtensionMessage, SchedulerOutput
from tests.support.random_lives import consume, random_life, random_setup
from tests.support.simulated_device import Setup
from tests.support.simulated_engine import SimulatedEngine


def lives(count: int) -> None:
    consume(random_life(replace(random_setup(seed), spans=True), seed) for seed in range(count))


@pytest.mark.parametrize("count", [15, pytest.param(60, marks=pytest.mark.nightly)])
def test_no_step_computes_a_part_of_a_span(count: int) -> None:
    lives(count)


def anywhere(spans: Spans, position: int) -> int:
    return position


@pytest.mark.sample(1)
@pytest.mark.parametrize("where", ["kvern.cache.manager.cut", "kvern.engine.scheduler.cut"])
def test_a_crowd_notices_spans_in_part(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(where, anywhere)
    with pytest.raises(AssertionError, match="in part"):
        lives(60)


FEW = Setup(
    prefix_cache=False, policy="prefix", block_size=5, max_model_len=28, spare_blocks=2, slots=6, spare_budget=1,
    aging_steps=12, adapter_places=2, step_rows=3, windowed=(9, 1), spans=True,
)  # fmt: skip
"""So few tokens a step that a span may wait for a step of its own, before which nothing is scheduled."""


def test_forks_hear_of_their_windows_after_a_plan_without_requests() -> None:
    consume(random_life(FEW, seed) for seed in range(7))


def test_a_crowd_notices_forks_that_are_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(self: WindowedBlocks, output: SchedulerOutput) -> ExtensionMessage | None:
        grown, self._grown = self._grown, []
        return WindowMessage(grown) if grown and output.scheduled else None

    monkeypatch.setattr(WindowedBlocks, "plan", plan)
    with pytest.raises(AssertionError):
        consume(random_life(FEW, seed) for seed in range(30))


@pytest.mark.parametrize("step_rows", [0, 1])
def test_a_span_that_fills_a_step_waits_for_one_step_of_decodes(step_rows: int) -> None:
    """Decodes beside it would leave no budget for it."""
    setup = Setup(slots=4, spare_budget=2, spans=True, max_model_len=60, spare_blocks=60, step_rows=step_rows)
    engine = SimulatedEngine(setup)
    decoding = [request for _ in range(3) for request in engine.add([0, 1], 50)]
    for _ in range(4):
        engine.step()
    (late,) = engine.add([0, *[2] * setup.limits.max_batch_tokens, 1], 4)
    before = [request.output_length for request in decoding]
    computed = []
    for _ in range(8):
        engine.step()
        computed.append(late.num_computed_tokens)
    assert max(computed) > setup.limits.max_batch_tokens
    assert all(request.output_length > length for request, length in zip(decoding, before, strict=True))
    engine.run()
