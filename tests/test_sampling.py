"""Which cases of a parametrized test `make test` runs."""

import itertools

from tests.support.sampling import sample

CASES = [
    (f"{first}-{second}", frozenset({("first", first), ("second", second)}))
    for first, second in itertools.product("abcd", "xyz")
]


def test_every_value_is_in_a_sample_with_room_for_all() -> None:
    chosen = [CASES[place][1] for place in sample(CASES, 4)]
    assert frozenset.union(*chosen) == frozenset.union(*(values for _, values in CASES))


def test_a_sample_is_as_large_as_asked_and_the_same_in_any_order() -> None:
    for most in range(1, len(CASES) + 3):
        chosen = {CASES[place] for place in sample(CASES, most)}
        assert len(chosen) == min(most, len(CASES))
        assert chosen == {CASES[::-1][place] for place in sample(CASES[::-1], most)}
