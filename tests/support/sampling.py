"""Parametrized tests of which `make test` runs a sample of the cases, with every value of a parameter if there is room.

`@pytest.mark.sample(4)` leaves all but four cases of a test to `make test-all`: they become `nightly`. The ids of the
cases alone say which. A case that is named on the command line is run, as all are on a GPU. Properties are tried with
`examples(most)`.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import settings


def examples(most: int) -> int:
    """As many examples of a property for `make test-all`, and a third for `make test`."""
    return most if settings.get_current_profile_name() == "night" else -(-most // 3)


def leave_to_the_night(items: Iterable[pytest.Item]) -> None:
    """Marks the cases that no sample has."""
    cases: dict[str, list[pytest.Function]] = defaultdict(list)
    sizes: dict[str, int] = {}
    for item in items:
        mark, name = item.get_closest_marker("sample"), item.nodeid.partition("[")[0]
        if mark is not None and isinstance(item, pytest.Function) and not item.get_closest_marker("nightly"):
            cases[name].append(item)
            (sizes[name],) = mark.args
    for name, of_a_test in cases.items():
        chosen = sample([(case.callspec.id, values_of(case)) for case in of_a_test], sizes[name])
        for place, case in enumerate(of_a_test):
            if place not in chosen:
                case.add_marker(pytest.mark.nightly)


def values_of(case: pytest.Function) -> frozenset[tuple[str, str]]:
    """The values of its parameters, by name; sets in an order that no seed of hashes changes."""
    values = {
        name: sorted(map(repr, value)) if isinstance(value, (set, frozenset)) else value
        for name, value in case.callspec.params.items()
    }
    return frozenset((name, repr(value)) for name, value in values.items())


def sample(cases: Sequence[tuple[str, frozenset[tuple[str, str]]]], most: int) -> set[int]:
    """The places of at most `most` cases, each an id and values: those with values that no other has come first."""
    order = sorted(range(len(cases)), key=lambda place: hashlib.sha256(cases[place][0].encode()).digest())
    chosen, seen = list[int](), set[tuple[str, str]]()
    while order and len(chosen) < most:
        best = max(order, key=lambda place: len(cases[place][1] - seen))
        order.remove(best)
        chosen.append(best)
        seen |= cases[best][1]
    return set(chosen)
