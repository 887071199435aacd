"""Second captures with an event at each mark: replayed in measured steps, where answers are those of the plain ones."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import kvern.runner.verify_graphs
from kvern import LLM, SamplingParams
from kvern.device import marks
from kvern.request.layer_times import LayerTimes
from kvern.runner import timed_graphs
from kvern.runner.decode_graphs import DecodeKind, DecodeShape
from kvern.runner.device_runner import DeviceRunner
from kvern.runner.step_graphs import CaptureMemory
from kvern.runner.timed_graphs import MOST_GRAPHS, DeviceClock
from kvern.runner.verify_graphs import VerifyKind
from tests.support.families import make_checkpoint
from tests.support.internals import core_of, runner_of, worker_of
from tests.support.kernels.device_engines import OPTIONS
from tests.support.kernels.repeated_graphs import RecordedGraphs, RepeatedSteps
from tests.support.outputs import token_ids
from tests.support.speculation import speculating

pytestmark = [
    pytest.mark.usefixtures("few_products"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="simulates events"),
]
PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=9, ignore_eos=True)
PROMPTS = [[5, 9, 17, 33, 2, 81], [7, 8]]


class Tick:
    """An event of a device on which each record is a millisecond later than the last, and which may be behind."""

    ticks = itertools.count()
    has_come = True

    def record(self) -> None:
        self.time = next(Tick.ticks)

    def query(self) -> bool:
        return Tick.has_come

    def elapsed_time(self, other: "Tick") -> float:
        return float(other.time - self.time)


@pytest.fixture(autouse=True)
def events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed_graphs, "new_event", lambda *, external: Tick())
    monkeypatch.setattr(Tick, "has_come", True)


def times_of(llm: LLM) -> LayerTimes:
    core = core_of(llm)
    core._layers.ended(core.executor.measured())
    core._layers._is_told = False
    times: LayerTimes = core.layer_times()
    return times


def captured(llm: LLM, *kinds: Any) -> tuple[DeviceClock, RepeatedSteps]:
    """Lets an engine replay steps of these kinds, of which it has captured those of most steps with events, too."""
    runner, clock, memory = runner_of(llm), worker_of(llm).times, RepeatedSteps()
    assert isinstance(runner, DeviceRunner) and isinstance(clock, DeviceClock)
    runner.graphs = [RecordedGraphs(kind) for kind in kinds]
    clock.memory = cast("CaptureMemory", memory)
    clock.expect(runner.graphs[0])
    while runner.idle():
        pass
    return clock, memory


@pytest.mark.nightly
def test_a_graph_with_events_takes_the_place_of_a_plain_one(tmp_path: Path, on_device: Callable[..., LLM]) -> None:
    folder = make_checkpoint("llama", tmp_path, num_hidden_layers=2)
    expected = token_ids(on_device(folder, **OPTIONS).generate(PROMPTS, PARAMS))
    alone = token_ids(on_device(folder, **OPTIONS).generate(PROMPTS[:1], PARAMS))
    llm = on_device(folder, **OPTIONS, trace_layers=2)
    clock, memory = captured(llm, DecodeKind(runner_of(llm).model, 0))
    sizes = (
        DecodeShape(4, False, False, False),
        DecodeShape(1, False, False, False),
        DecodeShape(2, False, False, False),
    )
    assert [shape for _, shape in clock._timed] == [*sizes[:2]]
    plain = runner_of(llm).graphs[0].memory.replayed
    assert token_ids(llm.generate(PROMPTS[:1], PARAMS)) == alone
    assert set(memory.replayed) == {sizes[1]} and set(plain) == {sizes[1]}
    decode = times_of(llm)["decode"]
    assert decode.steps == len(memory.replayed) >= 3
    assert decode.layers == pytest.approx([0.002 * decode.steps] * 2), "a mark at its mixer, and one at its MLP"
    parts = {part: seconds / decode.steps for part, (seconds, _) in decode.parts.items()}
    within = {"embedding": 0.001, "attention": 0.002, "mlp": 0.002, "head": 0.001, "sampling": 0.001}
    assert {part: parts[part] for part in within} == pytest.approx(within)
    assert not clock.missing
    before = len(memory.replayed)
    assert token_ids(llm.generate(PROMPTS, PARAMS)) == expected, "of two requests there is no graph with events"
    assert len(memory.replayed) == before and [shape for _, shape in clock.missing] == [sizes[2]]
    assert not runner_of(llm).idle()
    assert [shape for _, shape in clock._timed] == [sizes[1], sizes[2]] and len(clock._timed) == MOST_GRAPHS
    assert token_ids(llm.generate(PROMPTS, PARAMS)) == expected
    assert memory.replayed[before:] and set(memory.replayed[before:]) == {sizes[2]}


@pytest.mark.sample(1)
@pytest.mark.parametrize("trouble", ["CUDA error: out of memory", "operation not permitted when stream is capturing"])
def test_an_engine_does_without_graphs_with_events(tmp_path: Path, on_device: Callable[..., LLM], trouble: str) -> None:
    class Failing:
        def capture(self, step: Any) -> Any:
            raise RuntimeError(trouble)

    folder = make_checkpoint("llama", tmp_path, num_hidden_layers=2)
    expected = token_ids(on_device(folder, **OPTIONS).generate(PROMPTS, PARAMS))
    llm = on_device(folder, **OPTIONS, trace_layers=2)
    runner, clock = runner_of(llm), worker_of(llm).times
    assert isinstance(runner, DeviceRunner) and isinstance(clock, DeviceClock) and core_of(llm).prepares_again
    runner.graphs = [RecordedGraphs(DecodeKind(runner.model, 0))]
    clock.memory = cast("CaptureMemory", Failing())
    clock.expect(runner.graphs[0])
    assert len(clock.missing) == 2
    assert not runner.idle()
    found: tuple[object, int, int] = (clock.memory, len(clock.missing), len(clock._timed))
    assert found == (None, 0, 0)
    assert token_ids(llm.generate(PROMPTS, PARAMS)) == expected


def test_ranks_replay_the_same_graphs_though_one_of_them_is_profiled(
    tmp_path: Path, on_device: Callable[..., LLM]
) -> None:
    """What it measures meanwhile is forgotten, and the profile hears the marks."""
    folder = make_checkpoint("llama", tmp_path, num_hidden_layers=2)
    heard: list[int] = []
    replayed, measured = [], []
    for listener in (None, marks.Marks(heard.append)):
        llm = on_device(folder, **OPTIONS, trace_layers=2)
        clock, memory = captured(llm, DecodeKind(runner_of(llm).model, 0))
        llm.generate(PROMPTS[:1], PARAMS)
        with marks.listened(listener):
            llm.generate(PROMPTS, PARAMS)
            llm.generate(PROMPTS[1:], PARAMS)
        replayed.append(
            (memory.replayed, [shape for _, shape in clock.missing], [*clock._timed.values()][-1].graph.shape)
        )
        measured.append(times_of(llm)["decode"].steps)
    assert replayed[0] == replayed[1] and all(replayed[0])
    assert measured == [len(memory.replayed), len(memory.replayed) // 2]
    assert {marks.HEAD, marks.SAMPLING} <= set(heard)


def test_where_one_rank_has_no_graph_with_events_none_replays_one(
    tmp_path: Path, on_device: Callable[..., LLM]
) -> None:
    folder = make_checkpoint("llama", tmp_path, num_hidden_layers=2)
    llm = on_device(folder, **OPTIONS, trace_layers=2)
    clock = worker_of(llm).times
    assert isinstance(clock, DeviceClock)
    asked: list[bool] = []

    def on_all(here: bool) -> bool:
        asked.append(here)
        return False

    clock.on_all = on_all
    captured(llm, DecodeKind(runner_of(llm).model, 0))
    assert asked == [True] and clock.memory is None and not clock._timed and not clock.missing


def test_steps_without_a_graph_are_measured_as_they_are_launched(tmp_path: Path, on_device: Callable[..., LLM]) -> None:
    folder = make_checkpoint("qwen3_moe", tmp_path, num_hidden_layers=2)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1)
    expected = token_ids(on_device(folder, **OPTIONS).generate(PROMPTS, params))
    llm = on_device(folder, **OPTIONS, trace_layers=1)
    assert token_ids(llm.generate(PROMPTS, params)) == expected
    times = times_of(llm)
    assert sum(kind.steps for kind in times.values()) == llm.statistics().steps
    for kind in times.values():
        assert {"embedding", "attention", "experts", "head", "sampling"} <= kind.parts.keys()
        assert kind.layers == pytest.approx([0.002 * kind.steps] * 2)


@pytest.mark.nightly
def test_steps_that_verify_drafts_are_measured_in_their_graphs(
    tmp_path: Path, on_device: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvern.runner.verify_graphs, "ROWS", (2,))
    monkeypatch.setattr(kvern.runner.verify_graphs, "TOKENS", (8,))
    folder = make_checkpoint("llama", tmp_path, num_hidden_layers=2)
    expected = on_device(folder, **OPTIONS).generate(PROMPTS, PARAMS)
    llm = on_device(folder, **OPTIONS, trace_layers=1)
    _, memory = captured(llm, VerifyKind(runner_of(llm).model, 100))
    for _ in range(2):
        with speculating(llm, expected, 0.7, most=3, on_device=False):
            assert token_ids(llm.generate(PROMPTS, PARAMS)) == token_ids(expected)
        while runner_of(llm).idle():
            pass
    assert memory.replayed and all(shape.tokens == 8 for shape in memory.replayed)
    assert times_of(llm)["decode"].layers[0] > 0


def test_events_are_read_when_the_device_has_come_to_them(tmp_path: Path, on_device: Callable[..., LLM]) -> None:
    folder = make_checkpoint("llama", tmp_path, num_hidden_layers=2)
    llm = on_device(folder, **OPTIONS, trace_layers=2)
    _, memory = captured(llm, DecodeKind(runner_of(llm).model, 0))
    Tick.has_come = False
    llm.generate(PROMPTS[:1], PARAMS)
    assert times_of(llm) == {} and len(memory.replayed) > 1
    Tick.has_come = True
    replays = times_of(llm)["decode"].steps
    assert replays == 1, "of a graph that was replayed again the events are those of the last time"


def test_a_step_is_its_parts_within_a_graph_and_around_it() -> None:
    around, within = (timed_graphs.EventMarks(external=external) for external in (False, True))
    around.begin(marks.OTHER)
    within.begin(marks.EMBEDDING)
    within.begin(marks.HEAD)
    within.begin(marks.OTHER)
    around.begin(marks.SAMPLING)
    around.begin(marks.OTHER)
    seconds = timed_graphs._Pending(1, around, within).seconds()
    assert seconds == pytest.approx(
        {marks.OTHER: 0.002, marks.EMBEDDING: 0.001, marks.HEAD: 0.001, marks.SAMPLING: 0.001}
    )
    assert sum(seconds.values()) == pytest.approx(around.seconds()[marks.OTHER] + 0.001)
