"""Counts of what a step of the scheduler and a token on the wire take, which are the same on any machine.

python -m tests.support.counts           # prints them as JSON
python -m tests.support.counts --write   # makes them the baseline, tests/bench/counts.json, for this version of Python
python -m tests.support.counts --check   # ten clean runs of the scheduler, and one with 5 % more work

    calls           Python functions of this checkout that a step calls: the same for all versions of Python
    bytecodes       instructions in them, by version
    peak_bytes      memory that a step takes for a while, by version
    left_bytes      memory that is still taken after it, by version
    messages, bytes from the engine to the server, for a token; bytes of a request to the engine

A process of its own measures, so that nothing that ran before makes a difference.
"""

from __future__ import annotations

import gc
import json
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from kvern.cache.manager import KVCacheManager
from kvern.engine.queues import POLICIES
from kvern.engine.scheduler import Scheduler, SchedulerLimits
from kvern.request.request import PromptInput, Request, RequestSpec
from kvern.request.sampling_params import SamplingParams
from kvern.serving.wire import AddRequest, Events, encode
from tests.support.counted_core import counted
from tests.support.simulated_device import Setup
from tests.support.simulated_engine import SimulatedEngine

ROOT = Path(__file__).parents[2]
BASELINE = ROOT / "tests/bench/counts.json"
OF_VERSION = ("bytecodes", "peak_bytes", "left_bytes")
"""Counts that differ between versions of Python."""
ROWS, PROMPT, ANSWER, BLOCK_SIZE = 64, 48, 256, 16
WARMUP, STEPS = 20, 32
"""Steps: two blocks of each row are filled in those that count."""
INLINED = ("<listcomp>", "<setcomp>", "<dictcomp>")
"""Functions before Python 3.12 alone."""
Counts = dict[str, float]
Step = Callable[[], object]


class Decodes:
    """A scheduler whose rows all decode; with `turnover` one ends in each step and another begins."""

    def __init__(self, turnover: bool) -> None:
        self.scheduler = Scheduler(
            SchedulerLimits(ROWS * PROMPT, ROWS, aging_steps=200),
            KVCacheManager(ROWS * 32, BLOCK_SIZE),
            POLICIES["fcfs"],
            1,
        )
        self.turnover = turnover
        self.count = 0
        for _ in range(ROWS):
            self.add()

    def add(self) -> None:
        number = self.count
        self.count += 1
        prompt = PromptInput([number // 100, number % 100] * (PROMPT // 2))
        params = SamplingParams(max_tokens=ANSWER).resolved()
        request = Request(RequestSpec(f"{number:05}", prompt, params, ANSWER))
        self.scheduler.register(request)
        self.scheduler.waiting.add(request, self.scheduler.step)

    def step(self) -> None:
        output = self.scheduler.schedule()
        for index, (name, item) in enumerate(zip(output.request_ids, output.scheduled, strict=True)):
            if item.sampled:
                self.scheduler.update(self.scheduler.by_id[name], [index], 1)
        if self.turnover:
            self.scheduler.finish(self.scheduler.by_id[output.request_ids[0]], "abort")
            self.add()


def instructions(step: Step, count: int) -> Counts:
    """Calls and bytecodes of a step, on average over `count`."""
    found = {"calls": 0, "bytecodes": 0}
    root = str(ROOT)

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if event == "opcode":
            found["bytecodes"] += 1
        elif event == "call":
            if not frame.f_code.co_filename.startswith(root):
                return None
            found["calls"] += frame.f_code.co_name not in INLINED
            frame.f_trace_opcodes = True
            frame.f_trace_lines = False
        return trace

    try:
        for steps in (1, count):  # Python 3.12 and later count what a function does from its second step on
            found.update(calls=0, bytecodes=0)
            sys.settrace(trace)
            for _ in range(steps):
                step()
            sys.settrace(None)
    finally:
        sys.settrace(None)
    return {name: number / count for name, number in found.items()}


def memory(step: Step, count: int) -> Counts:
    """Bytes that a step takes for a while and for longer, on average over `count`."""
    peak = left = 0
    tracemalloc.start()
    try:
        for _ in range(count):
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            step()
            after, most = tracemalloc.get_traced_memory()
            peak += most - before
            left += after - before
    finally:
        tracemalloc.stop()
    return {"peak_bytes": peak / count, "left_bytes": left / count}


def scheduler_counts(turnover: bool) -> Counts:
    """Counts of a scheduler's step."""
    step = scheduler_steps(turnover)
    return instructions(step, STEPS) | memory(step, STEPS)


def scheduler_steps(turnover: bool, more: Counts | None = None) -> Step:
    """A scheduler's step, after some. `more`: work that is planted in `Scheduler.schedule`, in calls and bytecodes."""
    load = Decodes(turnover)
    step: Step = load.step
    if more is not None:
        schedule, calls, each = load.scheduler.schedule, round(more["calls"]), more["bytecodes"] / more["calls"]

        def planted(*given: Any) -> Any:
            for _ in range(calls):
                spend(max(0, round((each - 28) / 3)))
            return schedule(*given)

        load.scheduler.schedule = planted  # type: ignore[method-assign]
    for _ in range(WARMUP):
        step()
    gc.collect()
    gc.disable()
    return step


def spend(count: int) -> None:
    """Run about 28 bytecodes, and three so many times."""
    for _ in range(count):
        pass


def wire_counts() -> Counts:
    """Messages and bytes for a token, of 16 requests that decode together."""
    engine = SimulatedEngine(Setup(slots=16, max_model_len=96, spare_blocks=200, spare_budget=400))
    asked = sum(
        len(encode(AddRequest(request.spec)))
        for number in range(16)
        for request in engine.add([number % 7 + 1] * 32, 64)
    )
    messages = size = tokens = 0
    while engine.core.has_work:
        if events := engine.core.step():
            messages += 1
            size += len(encode(Events(events, engine.core.statistics(), 0.001)))
            tokens += sum(len(event.token_ids) for event in events)
    return {"messages": messages / tokens, "bytes": size / tokens, "bytes_of_a_request": asked / 16}


def observed_counts() -> dict[str, Counts]:
    """Counts of a core that observes its steps and requests, and of one that does not."""
    gc.collect()
    gc.disable()
    return counted(0, instructions) | counted(1, instructions) | counted(64, instructions)


def version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def measure() -> dict[str, Counts]:
    return {
        "decodes": scheduler_counts(turnover=False),
        "turnover": scheduler_counts(turnover=True),
        "wire": wire_counts(),
        **observed_counts(),
    }


def checked() -> dict[str, list[Counts]]:
    """Counts of ten clean runs of the scheduler, and of one that does 5 % more calls and bytecodes."""
    clean = [instructions(scheduler_steps(turnover=False), 8) for _ in range(10)]
    more = {name: 0.05 * count for name, count in clean[0].items()}
    return {"clean": clean, "planted": [instructions(scheduler_steps(turnover=False, more=more), 8)]}


def split(found: dict[str, Counts]) -> tuple[dict[str, Counts], dict[str, Counts]]:
    """What is the same for all versions of Python, and what is of this one."""
    same = {case: {name: n for name, n in counts.items() if name not in OF_VERSION} for case, counts in found.items()}
    own = {case: {name: n for name, n in counts.items() if name in OF_VERSION} for case, counts in found.items()}
    return same, own


def main() -> None:
    if sys.argv[1:] == ["--check"]:
        print(json.dumps(checked()))
        return
    found = measure()
    if sys.argv[1:] == ["--write"]:
        kept = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
        same, own = split(found)
        BASELINE.write_text(json.dumps({**kept, "all": same, version(): own}, indent=1) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
