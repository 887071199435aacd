"""Steps whose kernels a host launches one by one, while it does not see that the step before has ended."""

import random
from types import SimpleNamespace

import numpy as np
import pytest

from kvern.engine.step_load import StepLoad
from kvern.loads.request import LoadRequest
from kvern.runner.device_runner import DeviceRunner
from kvern.runner.prompt_graphs import TOKENS, prompt_shapes
from kvern.simulate.costs import FittedPrice, fit_steps
from kvern.simulate.engine import Prompts, simulated_engine
from kvern.simulate.launches import Launches, StepSample, StepWork, find_launches, scaled, seen
from kvern.simulate.records import RecordedStep, RecordHeader, StepRecord
from tests.support.simulation import SIZES, EvenPrice

SLOW = Launches(512, 0.03)


def step(prompt: int, seconds: float = 0.0, follows: bool = True) -> StepSample:
    return StepSample(StepWork(StepLoad(4 + prompt, 0, 0.0, 0.0, prompt), 5, 0), seconds, follows)


def test_the_end_of_a_step_is_seen_when_the_next_one_is_launched() -> None:
    """The device goes on at once, and what one step seems to take longer the next one seems to take less."""
    steps = [step(0, follows=False), step(64), step(600), step(64)]
    assert seen(steps, [0.01, 0.01, 0.025, 0.01], SLOW) == pytest.approx([0.01, 0.03, 0.005, 0.01])
    assert seen(steps, [0.01, 0.04, 0.025, 0.01], SLOW) == pytest.approx([0.01, 0.04, 0.025, 0.01])
    assert seen(steps, [0.01, 0.01, 0.025, 0.01], Launches()) == [0.01, 0.01, 0.025, 0.01]


def test_steps_that_are_all_launched_slowly_take_as_long_as_that() -> None:
    steps = [step(600, follows=False), *[step(600)] * 5]
    assert seen(steps, [0.01] * 6, SLOW)[1:-1] == pytest.approx([0.03] * 4)
    assert seen(steps, [0.05] * 6, SLOW)[2:-1] == pytest.approx([0.05] * 3)


def test_steps_between_two_ends_that_are_known_take_what_is_between_them() -> None:
    steps = [step(0, 0.01, follows=False), step(64, 0.033), step(600, 0.011), step(64, 0.02)]
    own = scaled(steps, np.array([0.01, 0.01, 0.03, 0.01]), SLOW)
    assert own == pytest.approx([0.01, 0.011, 0.033, 0.02])


def test_costs_are_found_behind_ends_that_were_seen_late() -> None:
    """Half of all steps with many tokens follow each other; the others are alone among those of graphs."""
    dice = random.Random(3)
    steps, own = [], []
    for _ in range(1500):
        several = dice.choice((1, 1, 1, 4)) if dice.random() < 0.3 else 0
        for prompt in [dice.choice((0, 64, 256, 512)), *(dice.choice((600, 1500)) for _ in range(several))]:
            steps.append(step(prompt, follows=bool(steps)))
            own.append(0.008 + 2e-5 * prompt)
    taken = seen(steps, own, SLOW)
    samples = [each._replace(seconds=seconds + 1e-4) for each, seconds in zip(steps, taken, strict=True)]
    assert find_launches(samples, 512).seconds == pytest.approx(0.03, rel=0.05)
    fit = fit_steps(samples, graph_tokens=512)
    for prompt in (64, 512, 600, 1500):
        assert fit.seconds(step(prompt).work) == pytest.approx(0.008 + 2e-5 * prompt, rel=0.05)
    plain = fit_steps(samples)
    assert fit.errors.windows < plain.errors.windows and plain.launches == Launches()
    assert FittedPrice(fit, 1).launches == fit.launches


def test_a_simulated_host_sees_an_end_late_too() -> None:
    price = EvenPrice()
    price.launches = Launches(40, 3.0)
    engine = simulated_engine(SIZES, price, leaps=False)
    engine.run([LoadRequest(0.0, 60, 3)], Prompts())
    (answer,) = engine.timeline.answers.values()
    assert answer.first == pytest.approx(3.0)  # its step takes 1.6 s
    assert answer.last == pytest.approx(3.0 + 2 * 1.01)


def test_a_record_says_which_steps_were_launched_before_the_one_before_had_ended() -> None:
    steps = [
        RecordedStep(1.0, 1.0, StepLoad(4), 4, 0, 0),
        RecordedStep(1.5, 0.5, StepLoad(4), 4, 0, 0),
        RecordedStep(4.0, 1.0, StepLoad(4), 4, 0, 0),
    ]
    header = RecordHeader(version="1", model="m", hardware="h", vocabulary=9, sizes=SIZES)
    assert [each.follows for each in StepRecord(header, [], steps).samples] == [False, True, False]
    assert header.graph_tokens == 0


def test_a_runner_says_how_many_tokens_of_prompts_its_graphs_have() -> None:
    runner = object.__new__(DeviceRunner)
    runner._prompts = None
    assert runner.graph_tokens == 0
    runner._prompts = SimpleNamespace(shapes=prompt_shapes(64, 8192, 4096))  # type: ignore[assignment]
    assert runner.graph_tokens == TOKENS[-1]
