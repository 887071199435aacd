"""Random lives notice mistakes that are planted in blocks of layers with a window; see `test_scheduler_mistakes.py`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvern.cache.radix import CachedPrefix
from kvern.cache.windows import WindowedBlocks
from kvern.request.request import Request
from tests.support.random_lives import consume, random_life, random_setup, with_window
from tests.support.simulated_device import Setup

Mistake = Callable[[pytest.MonkeyPatch], None]


def life_setup(seed: int) -> Setup:
    any_setup = replace(random_setup(seed), paged=True, prefix_cache=True, chunked=True, block_size=1 + seed % 3)
    return with_window(replace(any_setup, drafts=4), ((3, 1), (5, 2))[seed % 2], seed % 4 > 1)


@pytest.mark.nightly
def test_without_a_mistake_nothing_is_noticed() -> None:
    consume(random_life(life_setup(seed), seed, faults=0.3) for seed in range(12))


def windows_pass_by_what_drafts_may_need(monkeypatch: pytest.MonkeyPatch) -> None:
    def pass_by(self: WindowedBlocks, request: Request) -> None:
        self._pass(request, self.first_seen(request.num_computed_tokens))

    monkeypatch.setattr(WindowedBlocks, "pass_by", pass_by)


def windows_pass_by_too_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    first_seen = WindowedBlocks.first_seen
    monkeypatch.setattr(WindowedBlocks, "first_seen", lambda self, position: first_seen(self, position + 1))


def hits_where_the_window_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def match(self: WindowedBlocks, prefix: CachedPrefix, step: int | None) -> CachedPrefix:
        path, partial, shared, known = prefix
        while path and path[-1] not in self._nodes:
            path.pop()
        return CachedPrefix(path, partial if partial in self._nodes else None, shared, known)

    monkeypatch.setattr(WindowedBlocks, "match", match)


def windows_of_failed_steps_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WindowedBlocks, "undo", lambda self, step, waiting: None)


def windows_grow_untold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WindowedBlocks, "plan", lambda self, output: None)


def windows_of_forks_without_users(monkeypatch: pytest.MonkeyPatch) -> None:
    fork = WindowedBlocks.fork

    def fork_unnoticed(self: WindowedBlocks, parent: Request, child: Request, blocks: list[int]) -> Any:
        with pytest.MonkeyPatch.context() as within:
            within.setattr(WindowedBlocks, "_use", lambda self, node: None)
            return fork(self, parent, child, blocks)

    monkeypatch.setattr(WindowedBlocks, "fork", fork_unnoticed)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "mistake",
    [
        windows_pass_by_what_drafts_may_need,
        windows_pass_by_too_soon,
        hits_where_the_window_is_gone,
        windows_of_failed_steps_stay,
        windows_grow_untold,
        windows_of_forks_without_users,
    ],
)
def test_a_crowd_with_windows_notices(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch)
    with pytest.raises((AssertionError, ValueError, KeyError, IndexError)):
        consume(random_life(life_setup(seed), seed, faults=0.3) for seed in range(300))
