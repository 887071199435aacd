"""What the records of requests, or of steps, cost the engine's loop: microseconds, with and without, in turns.

    python benchmarks/records.py [--steps] [--rows 1 8 64 256] [--rounds 15]

The core, scheduler and cache are the real ones; the device answers at once. Each round times the same steps of decodes
with and without records of requests, or (`--steps`) of steps in the ring that `kvern top` reads; the difference is the
median over the rounds of the difference within a round.
"""

import argparse
import gc
import statistics
import tempfile
import time
from concurrent.futures import Future
from pathlib import Path

from kvern.cache.manager import KVCacheManager
from kvern.engine.core import EngineCore
from kvern.engine.core_timing import CoreTiming
from kvern.engine.queues import POLICIES
from kvern.engine.recorder import Recorder
from kvern.engine.scheduler import Scheduler, SchedulerLimits
from kvern.engine.step_ring import StepRing, ring_path
from kvern.engine.step_watch import RunningFile, StepWatch
from kvern.request.request import PromptInput, RequestSpec
from kvern.request.sampling_params import SamplingParams
from kvern.request.step import ModelRunnerOutput, SchedulerOutput

PROMPT, STEPS = 16, 400


class Executor:
    """Samples token 1 at once."""

    def submit(self, output: SchedulerOutput) -> "Future[ModelRunnerOutput]":
        """A result that is there."""
        future: Future[ModelRunnerOutput] = Future()
        nothing = [None] * len(output.scheduled)
        tokens = [[1] * item.sampled for item in output.scheduled]
        future.set_result(ModelRunnerOutput(tokens, [*nothing], [*nothing]))
        return future


def microseconds(rows: int, timing: CoreTiming) -> float:
    """A step's time in the core, while so many rows decode."""
    cache = KVCacheManager(rows * (STEPS // 16 + 4), 16)
    scheduler = Scheduler(SchedulerLimits(rows * PROMPT, rows, 200), cache, POLICIES["fcfs"])
    core = EngineCore(scheduler, Executor(), timing=timing)  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=STEPS).resolved()
    for number in range(rows):
        core.add(RequestSpec(str(number), PromptInput([number] * PROMPT), params, STEPS))
    core.step()
    gc.collect()
    began = time.process_time()
    for _ in range(STEPS - 2):
        core.step()
    return (time.process_time() - began) / (STEPS - 2) * 1e6


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 64, 256])
    parser.add_argument("--steps", action="store_true", help="time the ring of steps")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.steps:
            file, ring = RunningFile(Path(folder, "running")), StepRing(ring_path(folder))
            both = [CoreTiming(watch=StepWatch(file, lambda _: None, 1e6, ring=one)) for one in (None, ring)]
            ring.path.unlink()
        else:
            both = [CoreTiming(), CoreTiming(recorder=Recorder())]
        compare(options, both)


def compare(options: argparse.Namespace, both: list[CoreTiming]) -> None:
    """Print a row for each number of rows."""
    print(f"{'rows':>5}{'without':>10}{'with':>10}{'records':>10}  us a {'step' if options.steps else 'token'}")
    for rows in options.rows:
        tokens = 1 if options.steps else rows
        rounds = [[microseconds(rows, timing) / tokens for timing in both] for _ in range(options.rounds)]
        without, with_records = (statistics.median(times) for times in zip(*rounds, strict=True))
        cost = statistics.median(after - before for before, after in rounds)
        print(f"{rows:5}{without:10.2f}{with_records:10.2f}{cost:10.2f}", flush=True)


if __name__ == "__main__":
    main()
