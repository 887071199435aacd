"""Which models are awake: never more than there is memory for, and everybody's turn comes."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvern.residency.policy import LEAST_STAY, LONGEST_SLEEP, STAY, Footprint, Residency, State, Terms
from tests.support.sampling import examples
from tests.support.simulated_residency import LeastRecentlyUsed, World, awake, moves, zipf_load, zipf_world

SMALL = Footprint(awake=2, load_seconds=1.0)


def residency_of(memory: int, **terms: Terms) -> Residency:
    residency = Residency(memory)
    for name, said in terms.items():
        residency.add(name, said, SMALL, 0.0)
    return residency


def test_a_model_is_woken_by_its_request_and_the_least_valuable_one_makes_way() -> None:
    residency = residency_of(4, a=Terms(), b=Terms(), c=Terms())
    for turn in range(3):
        residency.asked("a", 10.0 * turn)
        residency.ended("a", 10.0 * turn)
    awake(residency, "a", 40.0)
    awake(residency, "b", 50.0)
    residency.asked("c", 60.0)
    assert moves(residency, 60.0) == [("b", "cold")]
    assert moves(residency, 60.1) == [], "c waits for the memory of b"
    residency.moved("b", 60.2)
    assert moves(residency, 60.2) == [("c", "awake")]
    assert residency.states == {"a": "awake", "b": "cold", "c": "cold"}


def test_weights_count() -> None:
    residency = residency_of(4, a=Terms(weight=100.0), b=Terms(), c=Terms())
    awake(residency, "a", 0.0)
    awake(residency, "b", 10.0)
    residency.asked("b", 20.0)
    residency.ended("b", 20.0)
    residency.asked("c", 30.0)
    assert moves(residency, 30.0) == [("b", "cold")]


@pytest.mark.parametrize("seconds", [1.0, 5.0])
def test_a_busy_model_stays_for_ten_times_its_wake_and_for_prefill(seconds: float) -> None:
    residency = Residency(2)
    for name in "ab":
        residency.add(name, Terms(), Footprint(awake=2, load_seconds=seconds), 0.0)
    residency.asked("a", 0.0)
    assert moves(residency, 0.0) == [("a", "awake")]
    residency.moved("a", 1.0)
    residency.asked("b", 2.0)
    decision = residency.decide(2.0)
    assert decision.moves == [] and decision.next_at == 1.0 + max(STAY * seconds, LEAST_STAY)
    assert moves(residency, decision.next_at) == [("a", "cold")]


@pytest.mark.parametrize("prefill", [3.0, 30.0, 100.0])
def test_two_busy_models_end_requests_of_any_length(prefill: float) -> None:
    """What a request has not computed to its first token is lost when its model makes way."""
    residency = Residency(10)
    for name in "ab":
        residency.add(name, Terms(), Footprint(awake=8, load_seconds=3.0, asleep=1, wake_seconds=0.2), 0.0)
        residency.asked(name, 0.0)
    now, left = 0.0, {"a", "b"}
    while left and now < 2000:
        decision = residency.decide(now)
        for move in decision.moves:
            now += residency.footprint(move.name).seconds_from(residency.states[move.name])
            residency.moved(move.name, now)
        awake = [name for name in left if residency.states[name] == "awake"]
        turn = prefill if decision.next_at is None else min(prefill, decision.next_at - now)
        if awake and turn == prefill:
            residency.ended(awake[0], now + turn)
            left.remove(awake[0])
        now += 0.0 if decision.moves and not awake else max(turn, 0.001)
    assert not left


def test_models_that_wait_asleep_make_way_for_the_first() -> None:
    """Also for one that takes more asleep than was estimated."""
    residency = Residency(8300)
    first = Footprint(8000, 3.0, 200, 0.3)
    for name in "ab":
        residency.add(name, Terms(), first, 0.0)
    residency.asked("a", 0.0)
    assert moves(residency, 0.0) == [("a", "awake")]
    residency.moved("a", 1.0)
    residency.asked("b", 2.0)
    assert moves(residency, 30.0) == [("a", "asleep")]
    residency.moved("a", 31.0, Footprint(8000, 3.0, 350, 0.3))
    assert moves(residency, 31.0) == [("a", "cold")]
    residency.moved("a", 32.0)
    assert moves(residency, 32.0) == [("b", "awake")]


def test_a_process_that_is_lost_in_its_sleep_leaves_no_order() -> None:
    residency = Residency(10)
    residency.add("a", Terms(), Footprint(8, 3.0, 1, 0.3), 0.0)
    awake(residency, "a", 0.0)
    residency.dismiss("a")
    assert moves(residency, 2.0) == [("a", "asleep")]
    assert residency.lost("a") is None, "its move ends otherwise"
    residency.moved("a", 3.0)
    lost = residency.lost("a")
    assert lost is not None and (lost.name, lost.state) == ("a", "cold")
    residency.asked("a", 4.0)
    residency.moved("a", 4.0)
    assert moves(residency, 4.0) == [("a", "awake")]
    residency.moved("a", 7.0)
    residency.ended("a", 8.0)
    assert moves(residency, 8.0) == [] and residency.states["a"] == "awake"


@pytest.mark.parametrize("reached", ["asleep", "cold"])
def test_an_order_ends_when_it_is_carried_out(reached: State) -> None:
    """Also if a request came meanwhile, which wakes the model, or if it cannot be asleep."""
    residency = Residency(10)
    residency.add("a", Terms(), Footprint(8, 3.0, 1, 0.3), 0.0)
    awake(residency, "a", 0.0)
    residency.dismiss("a")
    assert moves(residency, 2.0) == [("a", "asleep")]
    residency.asked("a", 2.5)
    residency.moved("a", 3.0, state=reached)
    assert residency.states["a"] == reached and moves(residency, 3.0) == [("a", "awake")]
    residency.moved("a", 4.0)
    residency.ended("a", 5.0)
    assert moves(residency, 5.0) == []


def test_an_idle_model_makes_way_after_the_time_of_a_wake() -> None:
    residency = residency_of(2, a=Terms(), b=Terms())
    awake(residency, "a", 0.0)
    residency.asked("b", 1.5)
    assert residency.decide(1.5).next_at == 2.0
    assert moves(residency, 2.0) == [("a", "cold")]


def test_keep_alive_and_what_it_ends() -> None:
    residency = residency_of(8, a=Terms(keep_alive=30.0), b=Terms(pin=True, keep_alive=1.0))
    assert moves(residency, 0.0) == [("b", "awake")]
    residency.moved("b", 1.0)
    for turn in range(9):
        residency.asked("a", 5.0 * turn)
        residency.ended("a", 5.0 * turn)
    awake(residency, "a", 50.0)
    assert residency.expires_at("a") == residency.decide(60.0).next_at == 81.0
    assert moves(residency, 81.0) == [("a", "cold")]
    residency.moved("a", 81.0)
    assert moves(residency, 90.0) == [], "nobody has asked since, however often it was asked before"
    residency.keep("a", 0.0)
    awake(residency, "a", 100.0)
    assert moves(residency, 101.0) == [("a", "cold")]
    assert residency.expires_at("b") is None and residency.states["b"] == "awake"


def test_the_users_terms_hold_again_when_a_model_has_gone_to_sleep() -> None:
    residency = residency_of(8, a=Terms(keep_alive=30.0))
    awake(residency, "a", 0.0)
    residency.keep("a", None)
    assert residency.decide(100.0).next_at is None
    residency.dismiss("a")
    assert moves(residency, 100.0) == [("a", "cold")]
    residency.moved("a", 100.0)
    awake(residency, "a", 200.0)
    assert residency.expires_at("a") == 231.0, "neither the order of a client nor its dismissal is left"
    residency.keep("a", 5.0)
    assert residency.expires_at("a") == 206.0


def test_a_model_that_is_dismissed_while_it_wakes_goes_once_it_is_awake() -> None:
    residency = residency_of(8, a=Terms())
    residency.dismiss("a")
    residency.asked("a", 0.0)
    assert moves(residency, 0.0) == [("a", "awake")]
    residency.dismiss("a")
    residency.moved("a", 1.0)
    assert moves(residency, 1.0) == [], "its request runs"
    residency.ended("a", 2.0)
    assert moves(residency, 2.0) == [("a", "cold")]
    residency.moved("a", 2.0)
    awake(residency, "a", 10.0)
    assert residency.expires_at("a") is None


def test_a_frequent_model_is_woken_when_there_is_memory() -> None:
    residency = residency_of(2, a=Terms(), big=Terms(keep_alive=5.0))
    for turn in range(5):
        residency.asked("a", 10.0 * turn)
        residency.ended("a", 10.0 * turn)
    awake(residency, "big", 60.0)
    assert moves(residency, 66.0) == [("big", "cold")]
    residency.moved("big", 66.0)
    assert moves(residency, 67.0) == [("a", "awake")]


def test_one_that_cannot_be_woken_is_tried_less_and_less_often() -> None:
    residency = residency_of(4, a=Terms(), pinned=Terms(pin=True))
    assert moves(residency, 0.0) == [("pinned", "awake")]
    residency.failed("pinned", 1.0)
    assert residency.decide(1.0).next_at == 2.0 and residency.barred("pinned", 1.5) == 0.5
    assert moves(residency, 2.0) == [("pinned", "awake")]
    residency.failed("pinned", 2.0)
    assert residency.decide(2.0).next_at == 4.0
    awake(residency, "a", 2.5)


def test_one_that_can_never_be_woken_is_tried_every_minute() -> None:
    residency = residency_of(4, a=Terms(pin=True))
    now = 0.0
    for _ in range(1100):
        assert moves(residency, now) == [("a", "awake")]
        residency.failed("a", now)
        now += residency.barred("a", now)
    assert residency.barred("a", now - 60.0) == 60.0


def test_a_fault_in_a_decision_leaves_no_model_that_nobody_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    residency = residency_of(4, a=Terms(keep_alive=10.0), b=Terms())
    residency.add("big", Terms(), Footprint(4, 1.0), 0.0)
    awake(residency, "a", 0.0)
    awake(residency, "b", 5.0)
    residency.asked("big", 20.0)

    def broken(name: str, now: float) -> float:
        raise OverflowError(name)

    with monkeypatch.context() as patched:
        patched.setattr(residency, "visits", broken)
        with pytest.raises(OverflowError):
            residency.decide(20.0)
    assert {residency.moving(name) for name in residency.states} == {None}
    assert moves(residency, 20.0) == [("a", "cold"), ("b", "cold")]


def test_one_that_never_fits_is_refused_with_the_numbers() -> None:
    residency = Residency(3_000_000_000)
    residency.add("pinned", Terms(pin=True), Footprint(1_000_000_000, 1.0), 0.0)
    residency.add("big", Terms(), Footprint(2_500_000_000, 1.0), 0.0)
    residency.asked("big", 0.0)
    refused = residency.decide(0.0).refused["big"]
    assert "takes 2.50 GB beside 1.00 GB of models that are pinned, and all models may take 3.00 GB" in refused


def test_a_model_that_takes_more_than_estimated_sends_another_to_sleep() -> None:
    residency = residency_of(4, a=Terms(), b=Terms())
    awake(residency, "a", 0.0)
    residency.asked("b", 10.0)
    assert moves(residency, 10.0) == [("b", "awake")]
    residency.moved("b", 11.0, Footprint(3, 1.0))
    assert moves(residency, 11.0) == [("a", "cold")]


def test_a_model_whose_files_are_larger_than_was_known_waits_for_the_memory() -> None:
    residency = residency_of(4, a=Terms(), b=Terms())
    awake(residency, "a", 0.0)
    residency.asked("b", 10.0)
    assert moves(residency, 10.0) == [("b", "awake")]
    residency.postponed("b", Footprint(3, 1.0))
    assert moves(residency, 11.0) == [("a", "cold")]
    residency.moved("a", 11.0)
    assert moves(residency, 11.0) == [("b", "awake")]


def test_sleeping_comes_before_the_end_of_the_process() -> None:
    residency = Residency(10)
    for name in "ab":
        residency.add(name, Terms(), Footprint(6, 2.0, asleep=1, wake_seconds=0.1), 0.0)
    awake(residency, "a", 0.0)
    residency.asked("b", 20.0)
    assert moves(residency, 20.0) == [("a", "asleep")]
    residency.moved("a", 20.0)
    assert moves(residency, 20.0) == [("b", "awake")]
    assert residency.held == 7
    residency.moved("b", 22.0)
    residency.ended("b", 22.0)
    residency.memory = 6
    assert moves(residency, 30.0) == [("b", "asleep")], "a has a process, which takes 2 s for little memory"


def test_a_model_is_asleep_by_one_order_and_cold_by_another_or_after_long() -> None:
    residency = Residency(10)
    residency.add("a", Terms(keep_alive=5.0), Footprint(6, 2.0, asleep=1, wake_seconds=0.1), 0.0)
    awake(residency, "a", 0.0)
    residency.dismiss("a")
    assert moves(residency, 1.0) == [("a", "asleep")]
    residency.moved("a", 2.0, Footprint(6, 2.0, asleep=2, wake_seconds=0.1))
    residency.dismiss("a")
    assert moves(residency, 3.0) == [] and residency.held == 2
    residency.dismiss("a", "cold")
    assert moves(residency, 4.0) == [("a", "cold")]
    residency.moved("a", 4.5)
    assert residency.held == 0
    awake(residency, "a", 10.0)
    residency.dismiss("a", "cold")
    assert moves(residency, 11.0) == [("a", "cold")], "it need not sleep first"
    residency.moved("a", 12.0)
    awake(residency, "a", 20.0)
    assert moves(residency, 26.0) == [("a", "asleep")], "nobody asked for 5 s"
    residency.moved("a", 26.0)
    decision = residency.decide(30.0)
    assert not decision.moves and decision.next_at == 21.0 + LONGEST_SLEEP
    assert moves(residency, 21.0 + LONGEST_SLEEP) == [("a", "cold")]


@st.composite
def worlds(draw: st.DrawFn) -> tuple[World, list[tuple[float, str, float]]]:
    """A few models of all sizes, with and without sleep, and requests at any time."""
    memory = draw(st.integers(4, 12))
    residency = Residency(memory)
    names = "abcdef"[: draw(st.integers(1, 6))]
    for name in names:
        size = draw(st.integers(1, 6))
        asleep = draw(st.none() | st.integers(0, 1))
        seconds = draw(st.sampled_from((0.1, 1.0, 5.0)))
        terms = Terms(
            draw(st.sampled_from((0.5, 1.0, 8.0))),
            draw(st.integers(0, 4)) == 0,
            draw(st.sampled_from((None, 0.0, 3.0))),
        )
        residency.add(name, terms, Footprint(size, seconds, min(asleep, size) if asleep else None, seconds / 8), 0.0)
    request = st.tuples(st.floats(0, 60), st.sampled_from(names), st.floats(0.01, 20))
    return World(residency, draw(st.sampled_from((0.0, 2.0)))), draw(st.lists(request, max_size=40))


@settings(max_examples=examples(150), deadline=None)
@given(worlds())
def test_there_is_never_more_than_fits_and_every_request_begins_or_is_refused(
    drawn: tuple[World, Sequence[tuple[float, str, float]]],
) -> None:
    world, arrivals = drawn
    pinned = {name for name in world.residency.states if world.residency.terms(name).pin}
    world.run(arrivals, until=100_000.0)
    assert world.most_held <= world.residency.memory
    assert not pinned & {name for _, name in world.demoted}
    assert len(world.waits) + sum(world.refused.values()) == len(arrivals)


@pytest.mark.parametrize("seconds", [0.2, 30.0])
def test_clients_that_want_two_models_in_turns_make_progress(seconds: float) -> None:
    """Both are always in use, and there is memory for one: they do not thrash, and neither starves."""
    world = World(residency_of(2, a=Terms(), b=Terms()))
    dice = random.Random(0)
    arrivals = [(dice.uniform(0, 200), name, seconds) for name in "ab" for _ in range(500)]
    world.run(arrivals)
    assert len(world.waits) == len(arrivals) and max(world.waits) <= 2 * STAY + 2 * seconds
    wakes = world.wake_seconds / SMALL.load_seconds
    assert 10 <= wakes <= world.now / 5


def test_fewer_seconds_of_wakes_than_the_least_recently_used() -> None:
    """20 models under a Zipf load, of which 5 fit; a wake costs what an H200 takes."""

    def seconds(kind: type[Residency]) -> float:
        world = zipf_world(kind, [8_000_000_000] * 20, 5)
        arrivals = zipf_load(20, 1000, seed=0)
        world.run(arrivals)
        assert len(world.waits) == len(arrivals) and world.most_held <= world.residency.memory
        return world.wake_seconds

    assert seconds(Residency) <= 0.8 * seconds(LeastRecentlyUsed)
