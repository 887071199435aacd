"""Which request ends engines: found among any others, whenever it comes, and never a wrong one."""

import random
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvern.serving.probation import DEATHS, LARGEST_GROUP, Cause, Probation
from kvern.serving.supervisor import cause_of

LOSSES = 2


def run(
    names: list[str], killers: dict[str, int], chance: random.Random, cause: Cause = "fault"
) -> tuple[list[str], int]:
    """Engines until nobody is suspected; who was found guilty, and how many engines died.

    A killer ends the process at the step of its progress; others end with their tenth. Who was cleared runs on beside
    those on trial, and what the last step has brought may be lost with an engine, LOSSES times.
    """
    probation, progress, guilty, deaths = Probation(), dict.fromkeys(names, 0), [], 0
    waiting, given, known, losses = list(names), dict.fromkeys(names), dict(progress), LOSSES
    while waiting or probation.active:
        given |= dict.fromkeys(probation.on_trial if probation.active else waiting)
        there = [name for name in given if name in waiting]
        running = [name for name in there if chance.random() < 0.8] or there[:1]
        deadly = [name for name in running if killers.get(name) == progress[name]]
        if deadly:
            deaths += 1
            assert deaths < 1000
            found = probation.died(running, cause)
            if found is not None:
                guilty.append(found)
                waiting.remove(found)
            given.clear()
            if losses and chance.random() < 0.5:
                progress, losses = dict(known), losses - 1
            continue
        known = dict(progress)
        for name in running:
            progress[name] += 1
            if progress[name] == 10:
                waiting.remove(name)
            probation.clear(name)
    return guilty, deaths


@given(st.integers(1, 80), st.integers(0, 9), st.integers(0, 10**6), st.sampled_from([*DEATHS]))
def test_the_killers_are_found_and_nobody_else(count: int, killers: int, seed: int, cause: Cause) -> None:
    chance = random.Random(seed)
    names = [str(number) for number in range(count)]
    marked = {name: chance.randrange(10) for name in chance.sample(names, min(killers, count))}
    guilty, deaths = run(names, marked, chance, cause)
    assert sorted(guilty) == sorted(marked)
    most = LARGEST_GROUP.bit_length() + DEATHS[cause] + 1
    assert deaths <= (len(marked) + bool(marked) * LOSSES) * most


def test_who_is_left_of_a_group_is_not_blamed_for_one_of_it_that_was_cleared() -> None:
    """That runs on, and may end the engine a token later."""
    probation = Probation()
    probation.died(["a", "deadly", "innocent"], "fault")
    probation.clear("a")
    assert probation.on_trial == ["deadly", "innocent"]
    probation.clear("deadly")
    assert probation.died(["deadly", "innocent", "a"], "fault") is None
    assert probation.on_trial == ["innocent"]
    assert probation.clear("innocent") and probation.on_trial == ["deadly"]
    assert probation.died(["deadly", "innocent"], "fault") is None
    assert probation.on_trial == ["deadly"]
    assert probation.died(["deadly"], "fault") == "deadly"


def test_who_comes_on_trial_alone_is_not_blamed_for_one_that_was_cleared_before() -> None:
    probation = Probation()
    probation.died(["deadly", "innocent"], "fault")
    assert probation.clear("deadly") and probation.on_trial == ["innocent"]
    assert probation.died(["innocent", "deadly"], "fault") is None
    assert probation.on_trial == ["innocent"]


def test_a_kill_from_outside_blames_nobody() -> None:
    """Not even four in a row; with progress between them, not however many."""
    probation = Probation()
    for _ in range(100):
        for _ in range(DEATHS["outside"] - 1):
            assert probation.died(["a"], "outside") is None
            assert probation.on_trial == ["a"]
        probation.clear("a")
        assert not probation.active


@pytest.mark.parametrize(
    ("code", "cause"),
    [(1, "fault"), (None, "fault"), *((-getattr(signal, name), "fault") for name in ("SIGSEGV", "SIGABRT", "SIGBUS"))]
    + [(-getattr(signal, name), "outside") for name in ("SIGKILL", "SIGTERM", "SIGHUP", "SIGXCPU", "SIGRTMIN")],
)
def test_signals_tell_whether_a_process_was_ended_from_outside(code: int | None, cause: Cause) -> None:
    assert cause_of(code) == cause


def test_an_engine_that_dies_before_it_computes_blames_nobody() -> None:
    probation = Probation()
    probation.died(["a", "b"], "fault")
    for _ in range(10):
        assert probation.died([], "fault") is None
    assert probation.on_trial == ["a"]


def test_who_was_cleared_and_is_there_again_is_tried_behind_the_others() -> None:
    probation = Probation()
    probation.died(["a", "b", "c"], "fault")
    assert probation.clear("a") and probation.on_trial == ["b", "c"]
    assert probation.died(["a", "b", "c"], "fault") is None
    assert probation.on_trial == ["b"]
    assert probation.died(["b"], "fault") == "b"
    assert probation.on_trial == ["c"] and probation.clear("c")
    assert probation.on_trial == ["a"] and probation.clear("a") and not probation.active
