"""Whose fault a failing step is: steps of random units over a pretended engine, without scheduler and device."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvern.engine.trial import Trial
from kvern.request.request import PromptInput, Request, RequestSpec, State, requests_of
from kvern.request.sampling_params import ResolvedParams

WORK = 12
"""Tokens that each request has to compute."""


def make(unit: str, members: int) -> list[Request]:
    return requests_of(RequestSpec(unit, PromptInput([0] * WORK), ResolvedParams(n=members), 1))


def run(requests: list[Request], faults: dict[str, int], dice: random.Random, room: int) -> tuple[list[str], int]:
    """Steps until all have ended: who was blamed, and how many steps failed. At most `room` requests run in a step."""
    trial, done, blamed, failures = Trial(), dict.fromkeys(requests, 0), [], 0
    for _ in range(10_000):
        trial.settle()
        alive = [request for request in requests if request.state is not State.FINISHED]
        if not alive:
            return blamed, failures
        allowed = [request for request in alive if trial.units is None or request.unit in trial.units]
        assert allowed, "a half is on trial of which nobody is left"
        dice.shuffle(allowed)
        step = [(request, min(WORK, done[request] + dice.randint(1, 4))) for request in allowed[:room]]
        if any(tokens >= faults.get(request.unit, WORK + 1) for request, tokens in step):
            failures += 1
            guilty = trial.failed(step)
            if guilty is not None:
                assert {request.unit for request, _ in step} == {guilty}
                blamed.append(guilty)
                for request in requests:
                    if request.unit == guilty:
                        request.state = State.FINISHED
            for request in requests:
                done[request] = dice.randint(0, done[request])  # what the cache still has
            continue
        trial.passed(step)
        for request, tokens in step:
            done[request] = tokens
            if tokens == WORK:
                request.state = State.FINISHED
    raise AssertionError("it does not come to an end")


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=12),
    st.sets(st.integers(0, 11)),
    st.integers(1, WORK),
    st.integers(1, 20),
    st.integers(0, 1 << 16),
)
def test_all_the_guilty_are_found_and_nobody_else(
    sizes: list[int], marked: set[int], fault: int, room: int, seed: int
) -> None:
    requests = [request for number, members in enumerate(sizes) for request in make(str(number), members)]
    guilty = {str(number) for number in marked if number < len(sizes)}
    blamed, _ = run(requests, dict.fromkeys(guilty, fault), random.Random(seed), room)
    assert sorted(blamed) == sorted(guilty)


@pytest.mark.parametrize("place", [0, 1, 77, 255])
def test_one_among_many_is_found_in_as_many_failures_as_it_takes_halvings(place: int) -> None:
    requests = [request for number in range(256) for request in make(str(number), 1)]
    blamed, failures = run(requests, {str(place): 1}, random.Random(0), 256)
    assert (blamed, failures) == ([str(place)], 1 + 8)


def test_halves_one_after_the_other() -> None:
    one, two, three, four = (make(name, 1)[0] for name in "abcd")
    trial = Trial()
    assert trial.units is None
    assert trial.failed([(request, 5) for request in (one, two, three, four)]) is None
    assert trial.units == {"a", "b"}
    trial.passed([(one, 4), (two, 5), (three, 5)])
    assert not trial.settle(), "one has not got as far as it had to, and it is not the turn of the third"
    trial.passed([(one, 5)])
    assert trial.settle() and trial.units == {"c", "d"}
    three.state = State.FINISHED  # from outside
    assert not trial.settle() and trial.units == {"c", "d"}
    assert trial.failed([(four, 7)]) == "d"
    assert trial.settle() and trial.units is None


def test_who_ran_beside_one_that_has_ended_is_not_blamed() -> None:
    ended, other = make("a", 1)[0], make("b", 1)[0]
    trial = Trial()
    ended.state = State.FINISHED
    assert trial.failed([(ended, 3), (other, 3)]) is None
    assert trial.settle() and trial.units == {"b"}
    trial.passed([(other, 3)])
    assert trial.settle() and trial.units is None


def test_a_half_that_cannot_run_is_given_up() -> None:
    trial = Trial()
    trial.failed([(make(name, 1)[0], 3) for name in "ab"])
    trial.skip()
    assert trial.units == {"b"}
    trial.skip()
    assert trial.units is None and not trial.settle()
