"""Combinations of parameters of which a few are tried by day: any two values meet in one of them."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest


def pairwise(*dimensions: Sequence[Any], possible: Callable[..., bool] = lambda *values: True) -> list[Any]:
    """All that are `possible`, for `pytest.mark.parametrize`; those that bring no new pair together are nightly.

    A value that is a tuple stands for several parameters.
    """
    every = [values for values in itertools.product(*dimensions) if possible(*values)]
    pairs = [set(itertools.combinations(enumerate(map(repr, values)), 2)) for values in every]
    by_day, met = set[int](), set[Any]()
    while any(pair - met for pair in pairs):
        best = max(range(len(every)), key=lambda place: len(pairs[place] - met))
        by_day.add(best)
        met |= pairs[best]
    return [
        pytest.param(*_flat(values), marks=[] if place in by_day else [pytest.mark.nightly])
        for place, values in enumerate(every)
    ]


def _flat(values: Sequence[Any]) -> list[Any]:
    return [one for value in values for one in (value if isinstance(value, tuple) else (value,))]
