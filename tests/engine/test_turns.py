"""Turns of users who share an engine."""

from hypothesis import given
from hypothesis import strategies as st

from kvern.serving.workload import Turns


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 4)), max_size=40))
def test_two_users_who_always_ask_get_the_same(asked: list[tuple[str, int]]) -> None:
    """While both wait, neither gets ahead by more than one of the other's requests."""
    turns = Turns()
    waiting = [(turns.take(owner, count), number, owner, count) for number, (owner, count) in enumerate(asked)]
    served = {"a": 0, "b": 0}
    left = {owner: [entry for entry in waiting if entry[2] == owner] for owner in "ab"}
    for turn, number, owner, count in sorted(waiting):
        if not all(left.values()):
            break
        turns.began(turn, owner, count)
        left[owner] = [entry for entry in left[owner] if entry[1] != number]
        served[owner] += count
        assert abs(served["a"] - served["b"]) <= 4


def test_who_was_away_is_not_ahead_of_the_present() -> None:
    turns = Turns()
    many = [turns.take("busy", 1) for _ in range(100)]
    for turn in many[:50]:
        turns.began(turn, "busy", 1)
    assert turns.waiting("busy") == 50
    assert turns.take("new", 1) == many[49]
    assert turns.take("new", 3) == many[49] + 1
    assert turns.take("new", 1) == many[49] + 4
    assert turns.take("busy", 1) == 100


def test_what_never_began_is_not_counted() -> None:
    turns = Turns()
    for _ in range(1000):
        turns.take("hasty", 1)
    turns.give_back("hasty", 998)
    assert turns.waiting("hasty") == 2
    assert turns.take("hasty", 1) == 2
    turns.began(2, "hasty", 3)
    assert turns.waiting("hasty") == 0
    turns.give_back("hasty", 50)
    assert turns.take("hasty", 1) == 2
