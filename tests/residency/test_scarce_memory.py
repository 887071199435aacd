"""Other programs take memory that was free at the start: models make way before the kernel ends an engine."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvern.residency.policy import LEAST_STAY, Footprint, Move, Residency, Terms
from kvern.residency.pressure import HostMemory
from tests.support.sampling import examples
from tests.support.simulated_residency import Machine, World, awake, moves

GB = 10**9
SIZE = Footprint(4 * GB, 3.0, GB, 0.3, cache=GB)
TOTAL = 1000 * GB
FLOOR = HostMemory(0, TOTAL).floor


def left(spare: float) -> HostMemory:
    """A machine with so many GB above the floor."""
    return HostMemory(FLOOR + int(spare * GB), TOTAL)


def residency_of(*names: str, awake_from: float | None = 0.0, terms: Terms | None = None) -> Residency:
    residency = Residency(100 * GB)
    for number, name in enumerate(names):
        residency.add(name, terms or Terms(), SIZE, 0.0)
        if awake_from is not None:
            awake(residency, name, awake_from + 10 * number)
    return residency


def test_the_least_valuable_idle_model_falls_asleep_and_then_becomes_cold() -> None:
    """And is not woken before somebody asks, however much memory there is."""
    residency = residency_of("a", "b", "c")
    for turn in range(4):
        residency.asked("a", 40.0 + 10 * turn)
        residency.ended("a", 40.0 + 10 * turn)
    residency.host = left(0)
    assert moves(residency, 100.0) == []
    residency.host = left(-0.1)
    [move] = residency.decide(100.0).moves
    assert (move.name, move.state, move.relieves) == ("b", "asleep", True)
    assert moves(residency, 100.1) == [], "b gives back 3 GB"
    residency.moved("b", 101.0)
    residency.host = left(-3.5)
    assert moves(residency, 101.0) == [("c", "asleep"), ("a", "asleep")]
    residency.moved("a", 102.0)
    residency.moved("c", 102.0)
    residency.host = left(-1.5)
    assert moves(residency, 102.0) == [("b", "cold"), ("c", "cold")]
    residency.moved("b", 103.0)
    residency.moved("c", 103.0)
    residency.host = left(50)
    assert moves(residency, 104.0) == []


def test_pinned_models_and_the_last_busy_one_stay() -> None:
    residency = residency_of("pinned", terms=Terms(pin=True), awake_from=None)
    assert moves(residency, 0.0) == [("pinned", "awake")]
    residency.moved("pinned", 1.0)
    residency.add("busy", Terms(), SIZE, 0.0)
    residency.asked("busy", 10.0)
    assert moves(residency, 10.0) == [("busy", "awake")]
    residency.moved("busy", 13.0)
    residency.host = left(-9)
    assert moves(residency, 1000.0) == []
    residency.ended("busy", 1000.0)
    assert moves(residency, 2000.0) == [("busy", "cold")]


def test_two_busy_models_take_turns_and_no_request_that_began_is_refused() -> None:
    residency = residency_of("a", "b", awake_from=None)
    for name in "ab":
        residency.asked(name, 0.0)
    assert moves(residency, 0.0) == [("a", "awake"), ("b", "awake")]
    for name in "ab":
        residency.moved(name, 3.0)
    residency.host = left(-1)
    decision = residency.decide(10.0)
    assert not decision.moves and decision.next_at == 3.0 + LEAST_STAY
    assert moves(residency, decision.next_at) == [("a", "asleep")]
    residency.moved("a", 30.0)
    residency.host = left(1)
    assert moves(residency, 30.0) == [("b", "asleep")], "its turn has ended, too"
    residency.moved("b", 61.0)
    residency.host = left(3)
    assert moves(residency, 61.0) == [("a", "awake")], "3 GB are not enough for both"
    residency.moved("a", 62.0)
    residency.host = left(-9)
    residency.ended("a", 63.0)
    assert moves(residency, 100.0) == [("a", "cold"), ("b", "cold")]
    residency.moved("a", 101.0)
    residency.moved("b", 101.0)
    residency.host = left(1)
    decision = residency.decide(200.0)
    assert not decision.refused and not decision.moves, "b waits for more than there is"
    residency.host = left(3)
    assert moves(residency, 202.0) == [("b", "awake")]


@pytest.mark.parametrize("wakes", [True, False])
def test_a_model_whose_requests_went_on_or_away_is_refused_like_others(wakes: bool) -> None:
    residency = residency_of("a", "b", awake_from=None)
    for name in "ab":
        residency.asked(name, 0.0)
    assert moves(residency, 0.0) == [("a", "awake"), ("b", "awake")]
    for name in "ab":
        residency.moved(name, 3.0)
    residency.host = left(-1)
    assert moves(residency, 50.0) == [("a", "asleep")]
    residency.moved("a", 51.0)
    if wakes:
        residency.host = left(9)
        assert moves(residency, 52.0) == [("a", "awake")]
        residency.moved("a", 53.0)
        residency.dismiss("a")
    residency.ended("a", 54.0)
    residency.ended("b", 54.0)
    if wakes:
        assert moves(residency, 55.0) == [("a", "asleep")]
        residency.moved("a", 56.0)
    residency.host = left(1)
    residency.dismiss("b", "cold")
    assert moves(residency, 57.0) == [("b", "cold")]
    residency.moved("b", 58.0)
    residency.asked("a", 60.0)
    assert "end other programs" in residency.decide(60.0).refused["a"]


def test_idle_models_end_one_by_one_while_the_machine_around_gpus_has_little_memory() -> None:
    """Whatever their cards have left, and none is woken before somebody asks; pinned and busy ones stay."""
    residency = residency_of("a", "b", "c")
    residency.add("pinned", Terms(pin=True), SIZE, 0.0)
    assert moves(residency, 50.0) == [("pinned", "awake")]
    residency.moved("pinned", 51.0)
    residency.asked("b", 60.0)
    residency.dismiss("c")
    for turn in range(5):
        residency.asked("c", 100.0 + 10 * turn)
        residency.ended("c", 100.0 + 10 * turn)
    assert moves(residency, 150.0) == [("c", "asleep")]
    residency.moved("c", 151.0)
    residency.host, residency.around = left(50), left(-0.1)
    decision = residency.decide(200.0)
    assert decision.moves == [Move("a", "cold", relieves=True)]
    assert moves(residency, 200.5) == [], "that may be enough"
    residency.moved("a", 201.0)
    assert moves(residency, 201.0) == [("c", "cold")]
    residency.moved("c", 202.0)
    residency.asked("c", 203.0)
    decision = residency.decide(203.0)
    assert not decision.moves and "of the memory of the machine 19.90 GB of 1000.00 GB" in decision.refused["c"]
    residency.ended("c", 203.0)
    residency.ended("b", 300.0)
    residency.asked("a", 399.0)
    decision = residency.decide(400.0)
    assert decision.moves == [Move("b", "cold", relieves=True)] and not decision.refused, "a may have its memory"
    residency.moved("b", 401.0)
    residency.around = left(0)
    assert moves(residency, 402.0) == [("a", "awake")] and residency.states["pinned"] == "awake"


def test_a_wake_waits_for_others_to_make_way_or_is_refused_with_the_numbers() -> None:
    residency = residency_of("a")
    residency.add("b", Terms(), SIZE, 0.0)
    residency.host = left(1)
    residency.asked("b", 50.0)
    assert moves(residency, 50.0) == [("a", "asleep")]
    assert moves(residency, 50.1) == []
    residency.moved("a", 51.0)
    residency.host = left(2.5)
    assert moves(residency, 51.0) == [("a", "cold")]
    residency.moved("a", 52.0)
    residency.host = left(2.9)
    [(name, reason)] = residency.decide(52.0).refused.items()
    assert name == "b" and reason == (
        "it takes 3.00 GB more, other models can give back 0.00 GB, and of the memory here 22.90 GB of 1000.00 GB are "
        "free, and 20.00 GB shall stay so: end other programs, or use a smaller model"
    )
    assert residency.barred("b", 52.0) == 1.0
    residency.host = left(3)
    assert moves(residency, 53.0) == [("b", "awake")], "its KV cache is taken as it fills"


def test_what_caches_give_back_for_a_wake_is_as_good_as_free_but_relieves_nobody() -> None:
    residency = residency_of("a")
    residency.add("b", Terms(pin=True), SIZE, 0.0)
    residency.host, residency.lent = left(1), 1 * GB
    assert moves(residency, 100.0) == [("a", "asleep")], "b takes 3 GB at once"
    residency.moved("a", 101.0)
    residency.lent = 2 * GB
    assert moves(residency, 101.0) == [("b", "awake")]
    residency.moved("b", 102.0)
    residency.host, residency.lent = left(-0.5), 9 * GB
    assert moves(residency, 103.0) == [("a", "cold")]


def test_models_that_wake_at_the_same_time_fit_together() -> None:
    residency = residency_of("a", "b", awake_from=None)
    residency.host = left(5)
    residency.asked("a", 0.0)
    residency.asked("b", 0.0)
    decision = residency.decide(0.0)
    assert [move.name for move in decision.moves] == ["a"] and not decision.refused
    assert moves(residency, 1.0) == [], "nobody makes way for memory that may be there"
    residency.moved("a", 3.0)
    residency.host = left(3)
    assert moves(residency, 3.0) == [("b", "awake")]


def test_a_frequent_model_is_not_woken_into_scarce_memory() -> None:
    residency = residency_of("a", awake_from=None)
    residency.host = left(2)
    for turn in range(5):
        residency.asked("a", 10.0 * turn)
        residency.ended("a", 10.0 * turn)
    assert moves(residency, 60.0) == []
    residency.host = left(3)
    assert moves(residency, 61.0) == [("a", "awake")]


def test_a_model_that_is_refused_in_its_sleep_still_has_its_process() -> None:
    """It grew beyond what all models may take."""
    residency = residency_of("a")
    residency.dismiss("a")
    assert moves(residency, 20.0) == [("a", "asleep")]
    residency.moved("a", 21.0)
    residency.memory = 2 * GB
    residency.asked("a", 30.0)
    assert "all models may take 2.00 GB" in residency.decide(30.0).refused["a"]
    residency.ended("a", 30.0)
    assert residency.states["a"] == "asleep" and residency.held == GB


@st.composite
def worlds(draw: st.DrawFn) -> tuple[World, list[tuple[float, str, float]]]:
    """A few models, requests at any time, and other programs that take memory and give all of it back after 300 s."""
    residency = Residency(draw(st.integers(4, 30)) * GB)
    names = "abcde"[: draw(st.integers(1, 5))]
    for name in names:
        size = draw(st.integers(1, 6))
        asleep = draw(st.none() | st.integers(0, 1))
        seconds = draw(st.sampled_from((0.1, 1.0, 5.0)))
        terms = Terms(draw(st.sampled_from((0.5, 1.0, 8.0))), draw(st.integers(0, 4)) == 0)
        cache = draw(st.integers(0, size - 1)) * GB
        footprint = Footprint(size * GB, seconds, asleep * GB // 4 if asleep else None, seconds / 8, cache)
        residency.add(name, terms, footprint, 0.0)
    total = draw(st.integers(4, 30)) * GB
    taken = st.tuples(st.floats(0, 100), st.integers(0, total // GB).map(lambda size: size * GB))
    others = [*sorted(draw(st.lists(taken, max_size=4))), (300.0, 0)]
    machine = Machine(total, others, draw(st.sampled_from((0.0, 0.5, 1.0))), draw(st.booleans()))
    around = Machine(total, [*sorted(draw(st.lists(taken, max_size=4))), (300.0, 0)]) if draw(st.booleans()) else None
    grace = draw(st.sampled_from((0.0, 2.0)))
    world = World(residency, grace, machine=machine, looks=10.0, looks_until=700.0, around=around)
    request = st.tuples(st.floats(0, 150), st.sampled_from(names), st.floats(0.01, 20))
    return world, draw(st.lists(request, max_size=30))


@settings(max_examples=examples(100), deadline=None)
@given(worlds())
def test_the_floor_holds_but_for_busy_models_and_requests_go_on_when_memory_is_back(
    drawn: tuple[World, Sequence[tuple[float, str, float]]],
) -> None:
    world, arrivals = drawn
    residency = world.residency
    pinned = {name for name in residency.states if residency.terms(name).pin}
    world.run(arrivals, until=299.0)
    assert residency.host is not None
    idle = [name for name, state in residency.states.items() if state != "cold" and not residency.moving(name)]
    idle = [name for name in idle if name not in pinned and not world.running.get(name)]
    assert residency.host.spare >= 0 or not [name for name in idle if not world.waiting.get(name)]
    assert not pinned & {name for _, name in world.demoted}
    assert residency.held <= residency.memory


@settings(max_examples=examples(100), deadline=None)
@given(worlds())
def test_every_request_begins_or_is_refused_once_memory_is_back(
    drawn: tuple[World, Sequence[tuple[float, str, float]]],
) -> None:
    world, arrivals = drawn
    world.run(arrivals)
    assert len(world.waits) + sum(world.refused.values()) == len(arrivals)
    assert not any(world.running.values())


@pytest.mark.parametrize("relieves", [True, False])
def test_the_simulation_notices_a_policy_that_does_not_relieve(relieves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not relieves:
        monkeypatch.setattr(Residency, "_relieve", lambda *arguments: None)
    residency = residency_of("a", "b", awake_from=None)
    machine = Machine(10 * GB, [(0.0, 0), (100.0, 4 * GB)])
    world = World(residency, machine=machine, looks=5.0, looks_until=200.0)
    world.run([(0.0, "a", 1.0), (10.0, "b", 1.0)], until=190.0)
    assert residency.host is not None and (residency.host.spare >= 0) == relieves


def test_a_download_holds_up_nobody() -> None:
    residency = residency_of("far", "near", awake_from=None)
    residency.host = left(4)
    residency.asked("far", 0.0)
    assert moves(residency, 0.0) == [("far", "awake")]
    residency.downloads("far", True)
    residency.asked("near", 1.0)
    assert moves(residency, 1.0) == [("near", "awake")]


def test_nobody_makes_way_for_a_model_that_only_an_empty_cache_would_have_room_for() -> None:
    residency = residency_of(awake_from=None)
    residency.add("busy", Terms(), Footprint(5 * GB, 3.0, GB // 5, 0.3, cache=4 * GB), 0.0)
    residency.add("x", Terms(), Footprint(3 * GB, 3.0), 0.0)
    awake(residency, "busy", 0.0)
    residency.host = left(1.5)
    residency.asked("x", 100.0)
    decision = residency.decide(100.0)
    assert not decision.moves and list(decision.refused) == ["x"]
    residency.asked("x", 100.5)
    assert not residency.decide(100.5).refused and residency.barred("x", 100.5) <= 1.0
    residency.host = left(9)
    assert moves(residency, 101.1) == [("x", "awake")], "memory is back: it is tried at once"


def test_models_end_at_once_where_memory_runs_out() -> None:
    """One that writes its weights to a file holds up nobody."""
    residency = residency_of("a", "b")
    residency.host = left(-0.1)
    assert moves(residency, 100.0) == [("a", "asleep")]
    residency.host = HostMemory(FLOOR // 4, TOTAL)
    assert moves(residency, 101.0) == [("b", "cold")]


def test_idle_models_end_before_a_busy_one_is_interrupted() -> None:
    residency = residency_of("idle", "busy", "other")
    for name in ("busy", "other"):
        residency.asked(name, 30.0)
    residency.host = left(-2.9)
    assert moves(residency, 1000.0) == [("idle", "cold")]


def test_a_model_is_not_refused_while_another_loads() -> None:
    residency = residency_of("p", "q", terms=Terms(pin=True), awake_from=None)
    residency.host = left(5)
    assert moves(residency, 0.0) == [("p", "awake")]
    residency.host = left(1)
    decision = residency.decide(1.0)
    assert not decision.refused and not decision.moves
    residency.host = left(3.5)
    residency.moved("p", 3.0)
    assert moves(residency, 3.1) == [("q", "awake")]
