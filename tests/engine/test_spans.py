"""Tokens of prompts that see each other are computed in one step, and found in the prefix cache all together."""

from dataclasses import replace

import pytest

from kvern.request.spans import Spans
from tests.support.random_lives import consume, random_life, random_setup
from tests.support.simulated_device import Setup
from tests.support.simulated_engine import SimulatedEngine


def lives(count: int) -> None:
    consume(random_life(replace(random_setup(seed), spans=True), seed) for seed in range(count))


def test_no_step_computes_a_part_of_a_span() -> None:
    lives(60)


def anywhere(spans: Spans, position: int) -> int:
    return position


@pytest.mark.parametrize("where", ["kvern.cache.manager.cut", "kvern.engine.scheduler.cut"])
def test_a_crowd_notices_spans_in_part(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(where, anywhere)
    with pytest.raises(AssertionError, match="in part"):
        lives(60)


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
