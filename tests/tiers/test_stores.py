"""What every store of KV pages does: its bytes come back as they were put, or they do not come."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvern.tiers.store import Store
from tests.support.mooncake_master import mooncake_master, needs_mooncake
from tests.support.page_stores import PAGE, get, has, name_of, opened, page_of, put
from tests.support.redis_server import needs_server, redis_server
from tests.support.sampling import examples


@contextlib.contextmanager
def disk_option(folder: Path) -> Iterator[str]:
    yield f"disk:{folder}:100MB"


@contextlib.contextmanager
def valkey_option(folder: Path) -> Iterator[str]:
    folder.mkdir()
    with redis_server(folder) as server:
        yield f"valkey://127.0.0.1:{server.port}"


@contextlib.contextmanager
def host_option(folder: Path) -> Iterator[str]:
    yield "host:100MB"


@contextlib.contextmanager
def mooncake_option(folder: Path) -> Iterator[str]:
    with mooncake_master() as master:
        yield f"mooncake://127.0.0.1:{master.port}?segment=100MB"


KINDS: dict[str, Callable[[Path], AbstractContextManager[str]]] = {
    "host": host_option,
    "disk": disk_option,
    "valkey": valkey_option,
    "mooncake": mooncake_option,
}
MARKS = {"valkey": [needs_server], "mooncake": [needs_mooncake]}
ENDS_WITH_ITS_PROCESS = {"host", "mooncake"}
"""Kinds whose pages are in this process's memory."""


@pytest.fixture(scope="module", params=[pytest.param(kind, marks=MARKS.get(kind, [])) for kind in KINDS])
def option(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with KINDS[request.param](tmp_path_factory.mktemp("pages") / "store") as option:
        yield option


@pytest.fixture(scope="module")
def store(option: str) -> Iterator[Store]:
    with opened(option) as store:
        yield store


def test_what_is_put_comes_back(store: Store) -> None:
    assert get(store, [1, 2]) == [False, False]
    assert put(store, [1, 2, 3]) == [True, True, True]
    assert has(store, [3, 4, 1]) == [True, False, True]
    assert get(store, [2, 5, 1, 3]) == [True, False, True, True]


def test_a_page_that_is_kept_is_not_written_again(store: Store) -> None:
    assert put(store, [10]) == put(store, [10, 11])[:1] == [True]
    other = memoryview(bytes(PAGE))
    assert store.put([name_of(10)], [other]) == [True]
    assert get(store, [10]) == [True]


def test_nothing_is_asked_and_nothing_given(store: Store) -> None:
    assert store.has([]) == store.get([], []) == store.put([], []) == []


def test_places_are_filled_where_they_are(store: Store) -> None:
    """Places are parts of one larger memory, and what stands beside them stays."""
    put(store, [20, 21])
    memory = memoryview(bytearray(b"." * (3 * PAGE)))
    places = [memory[2 * PAGE - 7 : 3 * PAGE - 7], memory[7 : PAGE + 7]]
    assert store.get([name_of(20), name_of(21)], places) == [True, True]
    assert places[0] == page_of(name_of(20)) and places[1] == page_of(name_of(21))
    assert memory[:7] == b"." * 7 and memory[PAGE + 7 : 2 * PAGE - 7] == b"." * (PAGE - 14) and memory[-7:] == b"." * 7


def test_a_place_of_another_size_is_a_miss(store: Store) -> None:
    put(store, [30])
    for size in (PAGE - 1, PAGE + 1):
        assert get(store, [30], size) == [False]
        put(store, [30])


def test_a_page_that_was_wrong_is_dropped(store: Store) -> None:
    put(store, [35, 36])
    store.drop([name_of(35), name_of(37)])
    assert has(store, [35, 36]) == get(store, [35, 36]) == [False, True]
    assert put(store, [35]) == get(store, [35]) == [True]


def test_pages_outlive_the_store_that_wrote_them(option: str) -> None:
    if option.partition(":")[0] in ENDS_WITH_ITS_PROCESS:
        pytest.skip("its pages are in this process's memory")
    with opened(option) as first:
        assert put(first, [40]) == [True]
    with opened(option) as second:
        assert get(second, [40]) == [True]


@pytest.mark.sample(2)
@settings(max_examples=examples(25))
@given(
    st.lists(st.tuples(st.booleans(), st.lists(st.integers(100, 120), unique=True, max_size=8)), max_size=12),
    st.sampled_from([1, 63, 4096, 5000]),
)
def test_any_order_of_calls(store: Store, calls: list[tuple[bool, list[int]]], size: int) -> None:
    known = set[int]()
    for is_put, drawn in calls:
        numbers = [1000 * size + number for number in drawn]
        if is_put:
            assert all(put(store, numbers, size))
            known.update(numbers)
        for number, found, filled in zip(numbers, has(store, numbers), get(store, numbers, size), strict=True):
            assert number not in known or (found and filled)
