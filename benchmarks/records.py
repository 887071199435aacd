"""What the records of requests cost the engine's loop: microseconds a token, with and without, in turns.

    python benchmarks/records.py [--rows 1 8 64 256] [--rounds 15]

The core, scheduler and cache are the real ones; the device answers at once. Each round times the same steps of decodes
with and without records; the difference is the median over the rounds of the difference within a round.
"""

import argparse
import gc
import statistics
import time
from concurrent.futures import Future

from kvern.cache.manager import KVCacheManager
from kvern.engine.core import CoreTiming, EngineCore
from kvern.engine.queues import POLICIES
from kvern.engine.recorder import Recorder
from kvern.engine.scheduler import Scheduler, SchedulerLimits
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


def microseconds(rows: int, records: bool) -> float:
    """A token's time in the core, while so many rows decode."""
    cache = KVCacheManager(rows * (STEPS // 16 + 4), 16)
    scheduler = Scheduler(SchedulerLimits(rows * PROMPT, rows, 200), cache, POLICIES["fcfs"])
    core = EngineCore(scheduler, Executor(), timing=CoreTiming(recorder=Recorder() if records else None))  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=STEPS).resolved()
    for number in range(rows):
        core.add(RequestSpec(str(number), PromptInput([number] * PROMPT), params, STEPS))
    core.step()
    gc.collect()
    began = time.process_time()
    for _ in range(STEPS - 2):
        core.step()
    return (time.process_time() - began) / rows / (STEPS - 2) * 1e6


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 64, 256])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    print(f"{'rows':>5}{'without':>10}{'with':>10}{'records':>10}  us a token")
    for rows in options.rows:
        rounds = [(microseconds(rows, False), microseconds(rows, True)) for _ in range(options.rounds)]
        without, with_records = (statistics.median(times) for times in zip(*rounds, strict=True))
        cost = statistics.median(after - before for before, after in rounds)
        print(f"{rows:5}{without:10.2f}{with_records:10.2f}{cost:10.2f}", flush=True)


if __name__ == "__main__":
    main()
