"""Which decode steps are captured, and in which order; and when an engine finds time for it."""

from collections.abc import Callable
from typing import Any

import pytest

from kvern.engine import process
from kvern.worker.graph_captures import Captured, captures, padded_size


def test_few_sizes_serve_all_and_pad_little() -> None:
    sizes = {padded_size(requests) for requests in range(1, 513)}
    assert len(sizes) < 24
    for requests in range(1, 513):
        size = padded_size(requests)
        assert size == min(other for other in sizes if other >= requests)
        assert size - requests < max(8, requests / 4)
        assert padded_size(size) == size


@pytest.mark.parametrize("prefixes", [True, False])
@pytest.mark.parametrize("adapters", [True, False])
def test_every_step_has_its_graph_and_the_likeliest_come_first(prefixes: bool, adapters: bool) -> None:
    order = list(captures(100, prefixes, adapters))
    sizes = {padded_size(requests) for requests in range(1, 101)}
    assert len(order) == len(set(order))
    for adapted in (False, True):
        for filtered in (False, True):
            plain = {item.size for item in order if item[1:] == (filtered, False, adapted)}
            behind_prefixes = {item.size for item in order if item[1:] == (filtered, True, adapted)}
            assert plain == (sizes if adapters or not adapted else set())
            assert behind_prefixes == ({size for size in plain if size >= 4} if prefixes else set())
    assert order[: len(sizes)] == [Captured(size, False, False, False) for size in sorted(sizes, reverse=True)]
