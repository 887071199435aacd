"""The tuner with costs and a clock of its own: no engine, and no time passes."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvern.deploy.tuner import Configuration, Knob, Tuner

KNOBS = [
    Knob("tokens", (256, 512, 1024, 2048, 4096), ladder=True),
    Knob("requests", (8, 16, 32), ladder=True),
    Knob("drafts", (None, "ngram", "suffix")),
]
START = {"tokens": 1024, "requests": 16, "drafts": None}


class Clock:
    """A clock that moves by what is measured."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def noise(share: float) -> Iterator[float]:
    """Factors around 1, always the same."""
    while True:
        for step in (0.2, -1.0, 0.6, -0.3, 1.0, -0.5):
            yield 1 + share * step


def tuned(
    cost: Callable[[Configuration], float], share: float = 0.002, seconds: float = 1e9
) -> tuple[dict[str, Any], Tuner]:
    clock = Clock()
    factors = noise(share)

    def measure(configuration: Configuration) -> float:
        found = cost(configuration) * next(factors)
        clock.now += found if math.isfinite(found) else 0.0
        return found

    tuner = Tuner(measure, clock, repetitions=7, seconds=seconds)
    return dict(tuner.tune(START, KNOBS).configuration), tuner


def valley(configuration: Configuration) -> float:
    """The best is at 4096 tokens, 8 requests and drafts of suffix, and options depend on each other."""
    tokens = abs(math.log2(configuration["tokens"] / 4096))
    requests = abs(math.log2(configuration["requests"] / 8))
    drafts = {None: 0.0, "ngram": 0.3, "suffix": -0.2 if configuration["requests"] == 8 else 0.1}
    return 10 + tokens + requests + drafts[configuration["drafts"]]


def test_the_best_is_found_from_anywhere_along_ladders_and_choices() -> None:
    best, tuner = tuned(valley)
    assert best == {"tokens": 4096, "requests": 8, "drafts": "suffix"}
    assert len(tuner.trials) < 20 and not tuner.ended_early
    assert all(len(trial.runs) <= 7 for trial in tuner.trials.values())


def test_noise_is_no_choice_and_the_first_is_kept_at_a_tie() -> None:
    best, tuner = tuned(lambda configuration: 10.0, share=0.2)
    assert best == START
    assert not any(trial.kept for trial in tuner.trials.values())
    assert all(len(trial.runs) == 7 for trial in tuner.trials.values())  # the interval never became narrow
    best, _ = tuned(lambda configuration: 10.0 - 0.05 * (configuration["tokens"] == 2048), share=0.2)
    assert best == START  # half a percent is nothing beside noise of 20 %


def test_runs_that_agree_are_not_repeated() -> None:
    _, tuner = tuned(lambda configuration: 10.0, share=0.0)
    assert {len(trial.runs) for trial in tuner.trials.values()} == {3}


def test_what_is_far_slower_is_given_up_after_two_runs() -> None:
    _, tuner = tuned(lambda configuration: 30.0 if configuration["drafts"] == "ngram" else 10.0, share=0.1)
    [slow] = [trial for trial in tuner.trials.values() if trial.configuration["drafts"] == "ngram"]
    assert len(slow.runs) == 2 and not slow.kept


def test_a_configuration_that_does_not_run_is_no_choice_and_is_asked_once() -> None:
    best, tuner = tuned(lambda configuration: math.inf if configuration["tokens"] > 1024 else 10.0)
    assert best == START
    assert [len(trial.runs) for trial in tuner.trials.values() if trial.configuration["tokens"] == 2048] == [1]
    best, _ = tuned(lambda configuration: math.inf if configuration == START else valley(configuration))
    assert best["tokens"] == 4096  # even where the first one does not run


@pytest.mark.parametrize("seconds", [0.0, 35.0, 200.0])
def test_no_configuration_is_begun_after_the_time(seconds: float) -> None:
    best, tuner = tuned(valley, seconds=seconds)
    measured = [sum(trial.runs) for trial in tuner.trials.values()]
    assert sum(measured[:-1]) < max(seconds, 1)
    assert tuner.ended_early and best in [dict(trial.configuration) for trial in tuner.trials.values()]
    if not seconds:
        assert best == START


def test_the_choice_is_near_the_best_of_the_whole_grid() -> None:
    grid = [
        valley({"tokens": tokens, "requests": requests, "drafts": drafts})
        for tokens in KNOBS[0].values
        for requests in KNOBS[1].values
        for drafts in KNOBS[2].values
    ]
    best, _ = tuned(valley, share=0.004)
    assert min(grid) / valley(best) > 0.97
