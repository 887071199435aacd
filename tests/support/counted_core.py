"""Counts of what a core does to observe its steps and requests, beside those of a core that observes nothing.

    bare     neither causes of seconds, nor the watch on the time of steps, nor the ring of steps, nor records
    always   what no option turns off: all but records
    records  what is on by default

A step of the device takes no instruction here: it has its result at once.
"""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from kvern.cache.manager import KVCacheManager
from kvern.engine.core import EngineCore
from kvern.engine.core_timing import CoreTiming
from kvern.engine.pace import Pace
from kvern.engine.queues import POLICIES
from kvern.engine.recorder import Recorder
from kvern.engine.scheduler import Scheduler, SchedulerLimits
from kvern.engine.step_drift import Bucket, StepDrift
from kvern.engine.step_ring import StepRing
from kvern.engine.step_seconds import StepSeconds
from kvern.engine.step_watch import RunningFile, StepWatch
from kvern.request.request import PromptInput, RequestSpec
from kvern.request.sampling_params import SamplingParams
from kvern.request.step import ModelRunnerOutput, SchedulerOutput
from tests.support.simulated_engine import FACTORS

KINDS = ("bare", "always", "records")
PROMPT, ANSWER, BLOCK_SIZE = 48, 400, 16
WARMUP, STEPS = 20, 32
Counts = dict[str, float]


class Baseline:
    """A memory of nothing."""

    def __init__(self) -> None:
        self.seconds: dict[Bucket, float] = {}
        self.earlier: Mapping[Bucket, float] = {}
        self.earlier_name = ""

    def save(self) -> None:
        pass


class Look:
    def begin(self) -> None:
        pass

    def __call__(self) -> str:
        return ""


class Unobserved(StepSeconds):
    """Seconds without causes."""

    def began(self, *given: Any) -> None:
        pass

    def awaits(self) -> None:
        pass

    def ended(self, now: float) -> None:
        pass


class AtOnce:
    """An executor whose steps have sampled a token for each request as soon as they begin."""

    tier = None

    def submit(self, output: SchedulerOutput) -> "AtOnce":
        self.tokens = [[7] if item.sampled else [] for item in output.scheduled]
        self.nothing: list[None] = [None] * len(self.tokens)
        return self

    def result(self) -> ModelRunnerOutput:
        return ModelRunnerOutput(self.tokens, list(self.nothing), list(self.nothing))


class CountedCore:
    """A core with so many rows that observes what `kind` says. Its ring goes with `close`."""

    def __init__(self, rows: int, kind: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        folder, self.observes = Path(self._folder.name), kind != "bare"
        limits = SchedulerLimits(rows * PROMPT, rows, aging_steps=200)
        scheduler = Scheduler(limits, KVCacheManager(rows * 32, BLOCK_SIZE), POLICIES["fcfs"])
        ring = StepRing(folder / "steps") if self.observes else None
        watch = StepWatch(RunningFile(folder / "running"), lambda seconds: None, 60.0, ring=ring)
        pace = Pace(drift=StepDrift(Baseline(), Look()) if self.observes else None)
        recorder = Recorder() if kind == "records" else None
        timing = CoreTiming(pace, watch, factors=lambda: FACTORS, recorder=recorder)
        self.core = EngineCore(scheduler, cast("Any", AtOnce()), timing=timing)
        if self.observes:
            self.core._divide_steps()
        else:
            self.core._seconds = Unobserved()
        self._count = 0

    def add(self, length: int = ANSWER) -> None:
        self._count += 1
        prompt = PromptInput([self._count // 100, self._count % 100] * (PROMPT // 2))
        params = SamplingParams(max_tokens=length, ignore_eos=True).resolved()
        self.core.add(RequestSpec(f"{self._count:05}", prompt, params, length))

    def request(self) -> None:
        """One request of 16 tokens, from its arrival to its last event."""
        self.add(16)
        while self.core.has_work:
            self.core.step()
        self.core.statistics()

    def step(self) -> None:
        self.core.step()
        self.core.statistics()

    def close(self) -> None:
        self._folder.cleanup()


def counted(rows: int, instructions: Callable[[Callable[[], object], int], Counts]) -> dict[str, Counts]:
    """The instructions of a step of `rows` decodes for each kind, or of a request if there are no rows."""
    found = {}
    for kind in KINDS:
        counted = CountedCore(max(rows, 1), kind)
        for _ in range(rows):
            counted.add()
        work = counted.step if rows else counted.request
        for _ in range(WARMUP):
            work()
        found[f"{f'step of {rows}' if rows else 'request'}, {kind}"] = instructions(work, STEPS)
        counted.close()
    return found
