"""The engine's side of traces: signs of life before what takes long, a limit, and nothing left behind."""

import contextlib
import ctypes
import gzip
import json
import os
import select
import signal
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from kvern.engine.loop import EngineLoop
from kvern.engine.step_watch import SHORTEST_SILENCE, RunningFile, StepWatch
from kvern.serving import engine_traces
from kvern.serving.engine_traces import StepTraces
from kvern.serving.wire import TakeTrace, TraceTaken


class Core:
    """Steps that multiply. What a trace tells is noted between them."""

    def __init__(self, folder: Path) -> None:
        self.noted: list[str] = []
        self.traces = StepTraces(cast("EngineLoop", self), lambda: self.noted.append("tell"), folder)

    def step(self) -> list[Any]:
        self.noted.append("step")
        torch.ones(2, 2) @ torch.ones(2, 2)
        return []

    def answer(self) -> TraceTaken:
        while not (answers := self.traces.answers()):
            pass
        assert not self.traces.busy
        return answers[0]


def test_it_says_that_it_lives_before_the_profiler_starts_ends_and_writes(tmp_path: Path) -> None:
    core = Core(tmp_path)
    core.traces.step()
    watch = StepWatch(RunningFile(tmp_path.parent / "running"), lambda seconds: None, 60.0)
    assert core.traces.silence(watch) == SHORTEST_SILENCE
    core.traces.begin(TakeTrace(2, 100.0))
    assert core.traces.silence(watch) == 0.0, "the longest"
    for _ in range(3):
        core.traces.step()
    assert core.noted == ["step", "tell", "step", "step", "tell", "tell", "step"]
    events = json.loads(gzip.decompress(core.answer().trace))["traceEvents"]
    assert {"step 1", "step 2"} <= {event.get("name") for event in events}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("bytes_of_event", [engine_traces.BYTES_OF_EVENT, 0], ids=["before", "written"])
def test_a_trace_that_is_too_large_is_refused_and_removed(
    bytes_of_event: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the number of its events, before it is written, or by its size."""
    monkeypatch.setattr(engine_traces, "MOST_BYTES", 1000)
    monkeypatch.setattr(engine_traces, "BYTES_OF_EVENT", bytes_of_event)
    core = Core(tmp_path / "folder" if bytes_of_event else tmp_path)  # without a folder nothing can be written
    core.traces.begin(TakeTrace(1, 100.0))
    core.traces.step()
    assert "ask for fewer steps" in (core.answer().error or "")
    assert not list(tmp_path.iterdir())


def test_steps_go_on_while_a_trace_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What writes it waits for steps in a call that holds Python's lock, as PyTorch's does."""
    fifo, export = tmp_path / "fifo", torch.profiler.profile.export_chrome_trace
    os.mkfifo(fifo)

    def after_steps(profiler: torch.profiler.profile, path: str) -> None:
        waiting = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        polled = (ctypes.c_int * 2)(waiting, select.POLLIN)
        assert ctypes.PyDLL(None).poll(polled, 1, 10_000) == 1, "no step runs meanwhile"
        export(profiler, path)

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", after_steps)
    core = Core(tmp_path)
    core.traces.begin(TakeTrace(1, 100.0))
    core.traces.step()
    before = core.noted.count("step")
    for _ in range(50):
        assert core.traces.answers() == [] and core.traces.busy
        core.traces.step()
    assert core.noted.count("step") == before + 50
    with fifo.open("w") as said:
        said.write("fifty steps have run")
        said.flush()
        assert b'"step 1"' in gzip.decompress(core.answer().trace)


def write_half(*given: object) -> bytes:
    """A part of a trace is in the file, of which this process, the child, knows the number alone."""
    for descriptor in map(int, os.listdir("/dev/fd")):
        if descriptor > 2:
            with contextlib.suppress(OSError):
                os.write(descriptor, gzip.compress(b"half of it")[:-3])
    os.kill(os.getpid(), signal.SIGKILL)
    return b""


def test_a_process_that_dies_or_hangs_while_it_writes_costs_the_trace_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_traces, "packed", lambda *given: os.kill(os.getpid(), signal.SIGKILL))
    core = Core(tmp_path)
    core.traces.begin(TakeTrace(1, 100.0))
    core.traces.step()
    assert core.answer().error == "the process that writes it ended (-9)"
    monkeypatch.setattr(engine_traces, "packed", write_half)
    core.traces.begin(TakeTrace(1, 100.0))
    core.traces.step()
    assert core.answer().error == "the process that writes it ended (-9)"
    monkeypatch.setattr(engine_traces, "packed", lambda *given: signal.pause())
    monkeypatch.setattr(engine_traces, "MOST_SECONDS", 0.0)
    core.traces.begin(TakeTrace(1, 100.0))
    core.traces.step()
    assert "ask for fewer steps" in (core.answer().error or "")
    monkeypatch.undo()
    core.traces.begin(TakeTrace(1, 100.0))
    core.traces.step()
    assert b'"step 1"' in gzip.decompress(core.answer().trace)


def test_a_trace_ceases_with_the_steps_that_ran(tmp_path: Path) -> None:
    core = Core(tmp_path)
    core.traces.cease()
    assert not core.traces.busy
    core.traces.begin(TakeTrace(5, 100.0))
    core.traces.cease()
    assert "falls asleep" in (core.answer().error or "")
    core.traces.begin(TakeTrace(5, 100.0))
    core.traces.step()
    core.traces.cease()
    assert b'"step 1"' in gzip.decompress(core.answer().trace)
