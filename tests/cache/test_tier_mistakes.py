"""Random lives notice mistakes that are planted in the traffic to a tier; see `test_scheduler_mistakes.py`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from kvern.cache.messages import NO_STATE, PageSave, Part, TierMessage
from kvern.cache.tier import TierTraffic
from kvern.request.request import Request
from kvern.request.step import SchedulerOutput
from tests.support.random_lives import consume, random_life, random_setup, with_states, with_window
from tests.support.simulated_device import Setup

Mistake = Callable[[pytest.MonkeyPatch], None]


def life_setup(seed: int, kind: str) -> Setup:
    setup = replace(random_setup(seed), paged=True, prefix_cache=True, kept_states=None, windowed=None)
    setup = replace(setup, all_windowed=False, tier_pages=60, tier_faults=2, depth=setup.depth + 1)
    if kind == "states":
        return with_states(replace(setup, tier_lies=0.0), (1, 8)[seed % 2])
    return setup if kind == "blocks" else with_window(setup, ((3, 1), (5, 2))[seed % 2], kind == "windows")


KINDS = ("blocks", "some windows", "windows", "states")


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_mistake_nothing_is_noticed(kind: str) -> None:
    lives = [random_life(life_setup(seed, kind), seed, faults=0.3 * (seed % 2)) for seed in range(8)]
    assert sum(life.tier.loaded for life in lives if life.tier is not None) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_that_shrinks_saves_nothing_of_what_it_gave_back(kind: str) -> None:
    """Pages whose steps have returned are saved by the next step: memory may go before it runs."""
    setup = Setup(tier_pages=30, chunk=1, spare_blocks=12, slots=4, spare_budget=10, drafts=4, on_device=True)
    if kind == "states":
        setup = with_states(setup, 8)
    elif kind != "blocks":
        setup = with_window(setup, (3, 1), kind == "windows")
    lives = [random_life(setup, seed, faults=0) for seed in range(2)]
    assert sum(life.tier.loaded for life in lives if life.tier is not None) > 0


def saved_late(monkeypatch: pytest.MonkeyPatch, is_late: Callable[[PageSave], bool]) -> None:
    plan = TierTraffic.plan
    late: list[PageSave] = []

    def plan_late(self: TierTraffic, output: SchedulerOutput) -> Any:
        message = plan(self, output)
        if isinstance(message, TierMessage):
            saves = [*late, *(save for save in message.saves if not is_late(save))]
            late[:] = [save for save in message.saves if is_late(save)]
            message = TierMessage(saves, message.loads, message.ended, written=message.written)
        return message

    monkeypatch.setattr(TierTraffic, "plan", plan_late)


def pages_saved_a_step_late(monkeypatch: pytest.MonkeyPatch) -> None:
    saved_late(monkeypatch, lambda save: any(save.tables))


def states_saved_when_others_have_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    saved_late(monkeypatch, lambda save: save.state != NO_STATE)


def windows_saved_a_step_early(monkeypatch: pytest.MonkeyPatch) -> None:
    completed = TierTraffic.completed

    def completed_early(self: TierTraffic, step: int) -> None:
        self._tree.completed = step + 1
        completed(self, step + 1)
        self._tree.completed = self._completed = step

    monkeypatch.setattr(TierTraffic, "completed", completed_early)


def states_saved_before_they_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvern.cache.states.StatePool.is_written", lambda self, node: True)


def pages_begin_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page are written to those behind the ones that the tree has."""
    begin = TierTraffic._begin

    def begin_at_first(self: TierTraffic, *args: Any) -> None:
        begin(self, *args)
        for place, load in enumerate(self._loads):
            blocks = [block for block in load.tables[0] if block >= 0]
            first = blocks + [-1] * (len(load.tables[0]) - len(blocks))
            self._loads[place] = msgspec.structs.replace(load, tables=[first, *load.tables[1:]])

    monkeypatch.setattr(TierTraffic, "_begin", begin_at_first)


def pages_known_in_part_count_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = TierTraffic.loaded

    def loaded_from_the_start(self: TierTraffic, number: int, count: int) -> list[Request]:
        if (load := self._loading.get(number)) is not None:
            part = load.known % self._page_blocks
            load.blocks = load.blocks[part:] + load.blocks[:part]
        return loaded(self, number, count)

    monkeypatch.setattr(TierTraffic, "loaded", loaded_from_the_start)


def believed(monkeypatch: pytest.MonkeyPatch, part: Part) -> None:
    """What did not come of a part counts as if it had."""
    loaded = TierTraffic.loaded

    def loaded_all(self: TierTraffic, number: int, count: int) -> list[Request]:
        if (load := self._loading.get(number)) is not None:
            load.pages = [*load.pages[:count], *(page for page in load.pages[count:] if page.part is part)]
        return loaded(self, number, 10**9)

    monkeypatch.setattr(TierTraffic, "loaded", loaded_all)
    monkeypatch.setattr(TierTraffic, "_end", end_of_any)


def end_of_any(self: TierTraffic, load: Any) -> None:
    """The end of a load that was cut."""
    self._tree.release(load.path)
    self._pool.release(load.blocks)
    for blocks in load.windows.values():
        self._memory.release(blocks)
    if self._states is not None and load.state != NO_STATE:
        self._states.settle(load.state, None, load.step)
    self._arriving = {key: other for key, other in self._arriving.items() if other is not load}


def blocks_that_did_not_come_count(monkeypatch: pytest.MonkeyPatch) -> None:
    believed(monkeypatch, Part.BLOCKS)


def windows_that_did_not_come_count(monkeypatch: pytest.MonkeyPatch) -> None:
    believed(monkeypatch, Part.WINDOWS)


def states_that_did_not_come_count(monkeypatch: pytest.MonkeyPatch) -> None:
    believed(monkeypatch, Part.STATE)


def loading_blocks_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    lookup = TierTraffic.lookup

    def lookup_and_free(self: TierTraffic, *args: Any) -> bool:
        waits = lookup(self, *args)
        self._pool.release([block for load in self._loading.values() for block in load.blocks])
        return waits

    monkeypatch.setattr(TierTraffic, "lookup", lookup_and_free)


MISTAKES: list[tuple[Mistake, str]] = [
    (pages_saved_a_step_late, "blocks"),
    (pages_saved_a_step_late, "windows"),
    (windows_that_did_not_come_count, "some windows"),
    (windows_that_did_not_come_count, "windows"),
    (states_saved_when_others_have_their_places, "states"),
    (states_saved_before_they_are_copied, "states"),
    (states_that_did_not_come_count, "states"),
    (pages_begin_anywhere, "blocks"),
    (pages_known_in_part_count_whole, "blocks"),
    (blocks_that_did_not_come_count, "blocks"),
    (loading_blocks_freed, "blocks"),
]


FOUND_LATE = pytest.param(windows_saved_a_step_early, "windows", marks=pytest.mark.nightly)
"""The device saves behind the steps that it was given before: only a step that fails shows this."""


@pytest.mark.parametrize(("mistake", "kind"), [*MISTAKES, FOUND_LATE])
def test_a_crowd_notices(mistake: Mistake, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch)
    lives = 1000 if mistake is windows_saved_a_step_early else 300
    with pytest.raises((AssertionError, ValueError, KeyError)):
        consume(random_life(life_setup(seed, kind), seed, faults=0.3) for seed in range(lives))
