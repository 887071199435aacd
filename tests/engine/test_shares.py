"""One owner's requests, however many and long, leave room for those of another who has nothing running."""

from dataclasses import replace
from typing import Any

import pytest

from kvern.engine.shares import QUANTUM
from kvern.request.request import Request
from tests.support.simulated_device import Setup
from tests.support.simulated_engine import SimulatedEngine

SOON = 6
"""Steps: others give way in the first, and a few are on their way or compute the prompt."""
ROOMY = Setup(slots=4, max_model_len=60, spare_blocks=60, spare_budget=8)


def steps_to_first_token(engine: SimulatedEngine, request: Request, most: int = 400) -> int:
    for step in range(most):
        if request.output_length:
            return step
        engine.step()
    raise AssertionError(f"no token in {most} steps")


def crowd(engine: SimulatedEngine, count: int, owner: str = "greedy", length: int = 3, **options: Any) -> list[Request]:
    requests = []
    for number in range(count):
        prompt = [number % 3] * length
        requests += engine.add(prompt, 50, owner=owner, turn=number, **options)
    for _ in range(length + 4):
        engine.step()
    return requests


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("blocks", [60, 2])
def test_who_has_nothing_running_does_not_wait_for_another_s_streams(depth: int, blocks: int) -> None:
    """Whether rows or blocks run out; the answers are those that each would have alone, which the engine checks."""
    engine = SimulatedEngine(replace(ROOMY, depth=depth, spare_blocks=blocks))
    crowd(engine, 12)
    for _ in range(3):
        (request,) = engine.add([1, 2], 1, owner="small")
        assert steps_to_first_token(engine, request) <= SOON + depth
    engine.run()


def test_owners_that_were_long_away_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvern.engine.queues.MOST_OWNERS", 2)
    engine = SimulatedEngine(ROOMY)
    for owner in "abcbd":
        engine.add([1, 2], 2, owner=owner)
        engine.run()
    assert list(engine.scheduler.running._entered) == ["b", "d"]


def test_several_who_ask_for_much_share_the_rows() -> None:
    engine = SimulatedEngine(replace(ROOMY, slots=6))
    crowd(engine, 8, "a")
    crowd(engine, 8, "b")
    crowd(engine, 8, "c")
    assert engine.scheduler.running.rows == {"a": 2, "b": 2, "c": 2}
    before = engine.scheduler.preemption_count
    for _ in range(10):
        engine.step()
    assert engine.scheduler.preemption_count == before, "equal shares change places without need"
    engine.run()


def test_more_owners_than_rows_take_turns() -> None:
    engine = SimulatedEngine(replace(ROOMY, slots=2))
    for owner in "abcdef":
        crowd(engine, 3, owner)
    (request,) = engine.add([1, 2], 1, owner="small")
    assert steps_to_first_token(engine, request) <= 4 * QUANTUM, "an answer may take longer than that"
    engine.run()


def test_a_long_prompt_of_another_does_not_delay_a_first_token() -> None:
    engine = SimulatedEngine(Setup(slots=4, max_model_len=400, spare_blocks=400, spare_budget=0))
    for number in range(2):
        engine.add([number] * 390, 5, owner="greedy")
    engine.step()
    (request,) = engine.add([1, 2], 1, owner="small")
    assert steps_to_first_token(engine, request) <= SOON
    engine.run()


def test_samples_and_searches_give_way() -> None:
    for options in ({"n": 12}, {"beams": 4}):
        engine = SimulatedEngine(ROOMY)
        engine.add([0, 1], 40, owner="greedy", **options)
        for _ in range(8):
            engine.step()
        (request,) = engine.add([1, 2], 1, owner="small")
        assert steps_to_first_token(engine, request) <= SOON
        engine.run()


def test_an_adapter_s_place_is_given_up() -> None:
    engine = SimulatedEngine(replace(ROOMY, adapter_places=1))
    crowd(engine, 10, adapter=1)
    (request,) = engine.add([1, 2], 1, owner="small", adapter=2)
    assert steps_to_first_token(engine, request) <= SOON
    engine.run()


def test_what_the_policy_puts_first_stays() -> None:
    engine = SimulatedEngine(replace(ROOMY, policy="priority", aging_steps=1000))
    urgent = crowd(engine, 4, priority=-1)
    (request,) = engine.add([1, 2], 1, owner="small")
    for _ in range(20):
        engine.step()
    assert not request.output_length and not any(item.queue.preemptions for item in urgent)
    engine.run()


def test_one_owner_alone_is_never_made_to_give_way() -> None:
    engine = SimulatedEngine(ROOMY)
    crowd(engine, 12)
    engine.run()
    assert not engine.scheduler.preemption_count


def test_who_lacks_an_adapter_s_place_is_not_forgotten_for_others_that_lack_rows() -> None:
    engine = SimulatedEngine(replace(ROOMY, adapter_places=1))
    for number in range(8):
        engine.add([number % 3] * 3, 50, owner="greedy", turn=number, adapter=1 if number < 2 else None)
    for _ in range(6):
        engine.step()
    (request,) = engine.add([1, 2], 1, owner="small", adapter=2)
    assert steps_to_first_token(engine, request) <= SOON
    engine.run()


def test_users_of_an_adapter_s_place_get_on_though_another_always_wants_it() -> None:
    engine = SimulatedEngine(replace(ROOMY, adapter_places=1, prefix_cache=False, max_model_len=120, spare_blocks=240))
    long = [engine.add([number] * 60, 20, owner="greedy", adapter=1)[0] for number in range(2)]
    for step in range(1500):
        if not any(engine.scheduler.get(request.request_id) for request in long):
            break
        if step % 4 == 0 and sum(other.owner == "small" for other in engine.alive) < 2:
            engine.add([1, 2], 3, owner="small", adapter=2)
        engine.step()
    assert all(request.output_length == 20 for request in long)
    engine.run()


def test_a_search_with_fewer_rows_than_beams_gets_on() -> None:
    engine = SimulatedEngine(ROOMY)
    (search,) = engine.add([0, 1], 12, beams=4, owner="a")
    for _ in range(6):
        engine.step()
    (stream,) = engine.add([1, 2], 50, owner="b")
    for _ in range(400):
        engine.step()
        if engine.scheduler.get(search.request_id) is None:
            break
    assert stream.output_length < 50 and not stream.queue.preemptions, "the search waited for the stream"
    engine.run()
