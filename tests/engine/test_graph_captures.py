"""Which decode steps are captured, and in which order; and when an engine finds time for it."""

import os
from typing import Any

import pytest

from kvern.request.events import EngineStatistics
from kvern.runner.decode_graphs import DecodeShape, decode_shapes, padded_size, smallest
from kvern.serving.process import serve
from kvern.serving.wire import FinishRequests, Shutdown, encode


def test_few_sizes_serve_all_and_pad_little() -> None:
    sizes = {padded_size(requests) for requests in range(1, 513)}
    assert len(sizes) < 24
    for requests in range(1, 513):
        size = padded_size(requests)
        assert size == min(other for other in sizes if other >= requests)
        assert size - requests < max(8, requests / 4)


@pytest.mark.parametrize("prefixes", [True, False])
@pytest.mark.parametrize("adapters", [True, False])
def test_every_step_has_its_graph_and_the_likeliest_come_first(prefixes: bool, adapters: bool) -> None:
    order = list(decode_shapes(100, prefixes, adapters))
    sizes = {padded_size(requests) for requests in range(1, 101)}
    assert len(order) == len(set(order))
    for adapted in (False, True):
        for options in (False, True):
            plain = {item.size for item in order if item[1:] == (options, False, adapted)}
            behind_prefixes = {item.size for item in order if item[1:] == (options, True, adapted)}
            assert plain == (sizes if adapters or not adapted else set())
            assert behind_prefixes == ({size for size in plain if size >= 4} if prefixes else set())
    assert order[: len(sizes)] == [DecodeShape(size, False, False, False) for size in sorted(sizes, reverse=True)]


def test_stages_before_the_last_have_no_graphs_that_only_sample_otherwise() -> None:
    """So they have made theirs when the last has, which says when all are done."""
    last, first = (list(decode_shapes(100, True, True, samples)) for samples in (True, False))
    assert first == [item for item in last if not item.options]


def test_a_step_whose_graph_is_missing_takes_the_next_larger_of_its_kind() -> None:
    there = [
        DecodeShape(64, False, False, False),
        DecodeShape(32, False, False, False),
        DecodeShape(4, False, True, False),
    ]
    assert smallest(there, 3, False, False) == there[1]
    assert smallest(there, 30, False, False) == there[1]
    assert smallest(there, 33, False, False) == there[0]
    assert smallest(there, 65, False, False) is None
    assert smallest(there, 3, True, False) is None
    assert smallest(there, 3, False, True) is None


class Core:
    """Some graphs are missing, and every message makes work for two steps."""

    cached_names = None

    def __init__(self, missing: int, prepares_again: bool) -> None:
        self.done: list[str] = []
        self.missing, self.steps = missing, 0
        self.prepares_again = prepares_again

    @property
    def has_work(self) -> bool:
        return self.steps > 0

    @property
    def executor(self) -> "Core":
        return self

    def spare_seconds(self) -> float:
        return 0.0

    def layer_times(self) -> dict[str, Any]:
        return {}

    def idle(self) -> bool:
        self.missing -= 1
        self.done.append("captures")
        return self.missing > 0

    def step(self) -> list[Any]:
        self.steps -= 1
        self.done.append("step")
        return []

    def finish(self, request_ids: list[str], reason: str, stop_reason: str | None) -> list[Any]:
        self.steps += 2
        return []

    def statistics(self) -> EngineStatistics:
        return EngineStatistics()


class Socket:
    """Has a message after the first capture, and the last one when the engine has waited for one before, in vain."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._is_quiet = True
        self._messages: list[Any] = [FinishRequests(["a"]), Shutdown()]

    def poll(self, milliseconds: int) -> bool:
        if milliseconds:
            self._core.done.append("waits")
            if self._is_quiet and len(self._messages) == 1:
                self._is_quiet = False
                return False
        return bool(milliseconds) or (self._core.done == ["captures"] and len(self._messages) == 2)

    def recv(self) -> bytes:
        return encode(self._messages.pop(0))

    def send(self, data: bytes) -> None:
        pass


@pytest.mark.parametrize(
    ("missing", "again", "done"),
    [
        (3, False, ["captures", "step", "step", "captures", "captures", "waits", "waits"]),
        (1, False, ["captures", "waits", "step", "step", "waits", "waits"]),
        (1, True, ["captures", "waits", "step", "step", "waits", "captures", "waits"]),
    ],
)
def test_an_engine_captures_one_graph_at_a_time_while_nothing_runs(missing: int, again: bool, done: list[str]) -> None:
    """One that measures layers looks again when nobody has asked for a while: steps before may have lacked some."""
    core = Core(missing, again)
    serve(Socket(core), core, os.getppid(), None, False, "")  # type: ignore[arg-type]
    assert core.done == done
