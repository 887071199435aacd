"""The machine of cache properties notices mistakes that are planted in states and windows."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kvern.cache.manager import KVCacheManager
from kvern.cache.radix import Node
from kvern.cache.states import StatePool
from kvern.cache.windows import WindowedBlocks
from kvern.request.request import Request
from tests.support.cache_machines import CacheMachine


def resumed_without_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StatePool, "match", lambda self, prefix, step: prefix)


def states_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StatePool, "plan", lambda self, output: None)


def states_of_removed_nodes_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StatePool, "lose", lambda self, node: self._kept.pop(node, None))


def states_kept_at_other_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = StatePool.keep

    def keep_before(self: StatePool, node: Node, state_index: int, step: int) -> None:
        assert node.parent is not None
        keep(self, node.parent if node.parent.parent is not None else node, state_index, step)

    monkeypatch.setattr(StatePool, "keep", keep_before)


def windows_of_used_nodes_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WindowedBlocks, "_use", lambda self, node: None)


def windows_of_removed_nodes_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(self: WindowedBlocks, node: Node) -> None:
        window = self._nodes.pop(node, None)
        if window is not None:
            self._idle(window).pop(node, None)

    monkeypatch.setattr(WindowedBlocks, "lose", forget)


def windows_of_others_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    publish = WindowedBlocks.publish

    def publish_neighbour(self: WindowedBlocks, request: Request, index: int, node: Node, step: int) -> None:
        publish(self, request, max(self.window_of(request).start, index - 1), node, step)

    monkeypatch.setattr(WindowedBlocks, "publish", publish_neighbour)


def copies_of_one_table_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    admit = KVCacheManager.admit

    def admit_with_one_copy(self: KVCacheManager, request: Request, step: int, reserve: int = 0) -> Any:
        copies = admit(self, request, step, reserve)
        return copies and copies[:1]

    monkeypatch.setattr(KVCacheManager, "admit", admit_with_one_copy)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "mistake",
    [
        resumed_without_a_state,
        windows_of_used_nodes_dropped,
        *(
            pytest.param(mistake, marks=pytest.mark.nightly)
            for mistake in (
                states_not_copied,
                states_of_removed_nodes_lost,
                states_kept_at_other_nodes,
                windows_of_removed_nodes_lost,
                windows_of_others_attached,
                copies_of_one_table_alone,
            )
        ),
    ],
)
def test_the_machine_notices(mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch)
    few = settings(max_examples=1000, stateful_step_count=40, report_multiple_bugs=False, phases=[Phase.generate])
    with pytest.raises((AssertionError, ValueError, KeyError)):
        run_state_machine_as_test(CacheMachine, settings=few)
