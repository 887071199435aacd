"""`kvern plan` beside all records of H200s, and steps of a simulation beside plans."""

import statistics

import pytest
from benchmarks.planned import ALLOWED, BEYOND, model_of, rows

from kvern.engine.step_load import StepLoad
from kvern.engine.step_seconds import parts_of
from kvern.planning.estimate import Split, decode_seconds, prompt_seconds, step_factors
from kvern.planning.hardware import CARDS


def test_plans_are_within_15_percent_of_what_was_measured() -> None:
    found = rows()
    assert {row.name for row in found if abs(row.error) > ALLOWED} == set(BEYOND)
    assert all(abs(row.error) < 0.2 for row in found)
    assert statistics.mean(abs(row.error) for row in found) < 0.05
    assert abs(statistics.mean(row.error for row in found)) < 0.03, "no more are too fast than too slow"


@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.1-8b awq", "qwen3-30b-a3b fp8"])
def test_steps_of_simulations_take_what_plans_say(name: str) -> None:
    model, card, split = model_of(name), CARDS["h200"], Split(1, 1)
    factors = step_factors(model, card, split, model.token_bytes)
    for decodes in (1, 6, 24, 96):  # in the middle of numbers of rows that are not told apart
        step = sum(parts_of(StepLoad(rows=decodes, keys=decodes * 1000), factors)) + factors.overhead
        assert step == pytest.approx(decode_seconds(model, card, split, decodes, 1000), rel=0.01)
    prompt = parts_of(StepLoad(prompt=0).with_prompt(0, 8192), factors)
    assert prompt[2] == pytest.approx(prompt_seconds(model, card, split, 8192, 8192), rel=0.01)
    assert prompt[0] == pytest.approx(factors.late * factors.weights[14])
