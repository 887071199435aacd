"""Engines whose stores lie, raise and hang: the same tokens, and nothing is held afterwards."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvern import LLM
from kvern.tiers.store import STORES
from tests.support.idle import core_here, is_idle
from tests.support.served import eventually
from tests.support.stores import MemoryStore
from tests.support.tiers import PAGE_TOKENS, answer, figures, forget, tier_of

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "threads": 1,
    "block_size": 4,
    "max_model_len": 64,
    "kv_cache_tokens": 120,
    "max_batch_requests": 2,
    "kv_tier": ("bad:1",),
}
PROMPT = [*range(20, 61)]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    monkeypatch.setattr(PAGE_TOKENS, 8)
    monkeypatch.setattr(STORES, "_registered", dict(STORES._registered))
    found = MemoryStore()
    STORES.register("bad")(lambda rest, identity: found)
    return found


def flipped(store: MemoryStore) -> None:
    store.pages = {name: bytes([page[0] ^ 1]) + page[1:] for name, page in store.pages.items()}


def swapped(store: MemoryStore) -> None:
    store.pages = dict(zip(store.pages, [*store.pages.values()][1:] + [*store.pages.values()][:1], strict=True))


def cut(store: MemoryStore) -> None:
    store.pages = {name: page[:100] for name, page in store.pages.items()}


def lies(how: str) -> Callable[[MemoryStore], None]:
    return lambda store: setattr(store, "lies", how)


def raises(call: str) -> Callable[[MemoryStore], None]:
    return lambda store: store.raises.add(call)


@pytest.mark.sample(5)
@pytest.mark.parametrize("is_local", [True, False])
@pytest.mark.parametrize(
    "spoil",
    [flipped, swapped, cut, *map(lies, ("zeros", "empty", "short")), *map(raises, ("has", "get"))],
    ids=["flipped", "swapped", "cut", "zeros", "empty", "short", "has raises", "get raises"],
)
def test_what_a_store_does_changes_no_token(
    spoil: Callable[[MemoryStore], None], is_local: bool, tiny_model: Path, store: MemoryStore
) -> None:
    store.is_local = is_local
    with LLM(tiny_model, **OPTIONS) as llm:
        tier = tier_of(llm)
        tier.computing = None
        expected, _ = answer(llm, PROMPT)
        forget(llm)
        spoil(store)
        knows = store.raises == {"has"} and not is_local  # what it was given itself
        for number in range(5):
            found, cached = answer(llm, PROMPT)
            assert found.token_ids == expected.token_ids
            assert number or knows or not cached, "right pages may be put in the place of wrong ones, but later"
            forget(llm)
        assert is_idle(llm)
        counted = figures(llm)
        assert counted.corrupt_pages or counted.failures or counted.missed_tokens


def test_a_store_that_hangs_holds_nothing(tiny_model: Path, store: MemoryStore) -> None:
    with LLM(tiny_model, **OPTIONS) as llm:
        tier = tier_of(llm)
        tier.computing = None
        expected, _ = answer(llm, PROMPT)
        forget(llm)
        store.waits = {"get", "put"}
        found, cached = answer(llm, PROMPT)
        assert (found.token_ids, cached) == (expected.token_ids, 0)
        assert figures(llm).late_tokens
        core_here(llm).scheduler.cache.tree.clear()
        core_here(llm).scheduler.check_integrity()
        store.waits = set()
        store.go.set()
        forget(llm)
        assert is_idle(llm)


def test_a_distant_store_is_asked_and_waited_for(tiny_model: Path, store: MemoryStore) -> None:
    store.is_local = False
    with LLM(tiny_model, **OPTIONS) as llm:
        tier = tier_of(llm)
        tier.computing = None
        expected, _ = answer(llm, PROMPT)
        forget(llm)
    with LLM(tiny_model, **OPTIONS) as llm:
        tier = tier_of(llm)
        tier.computing = None
        tier.shelf._clock = lambda: 0.0
        found, cached = answer(llm, PROMPT)
        assert (found.token_ids, cached) == (expected.token_ids, 40)


def test_a_store_ends_with_its_engine(tiny_model: Path, store: MemoryStore) -> None:
    store.raises = {"close"}
    with LLM(tiny_model, **OPTIONS) as llm:
        answer(llm, PROMPT)
    del llm
    eventually(lambda: gc.collect() >= 0 and "close" in store.calls)  # a thread may have held it a moment ago
