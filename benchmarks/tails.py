"""What users wait for under a target of the time between tokens, by the real core and scheduler on a simulated GPU.

    python benchmarks/tails.py [--rates 16 40 inf] [--targets none 15 auto]

The clock is moved by the steps, which take what they take of Llama-3.1-8B on an H200; the costs that the core begins
with are wrong by `--error`, and it has to correct them. `--launch` is what the host takes, in milliseconds, to launch
the kernels of a step that is no CUDA graph. TTFT and ITL in milliseconds, without what HTTP adds.
"""

import argparse
import random
from collections import deque
from collections.abc import Iterator
from typing import Any

from kvern.bench.percentile import percentile
from kvern.bench.serving import arrival_times
from kvern.cache.manager import KVCacheManager
from kvern.engine.core import EngineCore
from kvern.engine.core_timing import CoreTiming
from kvern.engine.pace import Pace
from kvern.engine.queues import POLICIES
from kvern.engine.scheduler import Scheduler, SchedulerLimits
from kvern.engine.step_costs import StepCosts
from kvern.engine.step_load import load_of
from kvern.request.request import PromptInput, RequestSpec
from kvern.request.sampling_params import SamplingParams
from kvern.request.step import ModelRunnerOutput, SchedulerOutput

ROWS = [1, 64, 128, 256, 512, 1024, 2048, 4096, 8192]
MILLISECONDS = [5.0, 5.3, 6.3, 8.0, 13.0, 25.5, 50.5, 101.0, 203.0]
"""Of steps with prompts, by rows."""
PER_KEY, PER_PAIR = 3.1e-8, 5e-10
DECODE = (0.0044, 1.5e-5)
"""Of steps without: seconds, and seconds for each row more."""
HOST = 0.0004
"""Seconds to plan a step and to launch it."""
AUTO = 3 * 0.0048


class Clock:
    """Moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class SimulatedGpu:
    """An executor whose steps take time, and sample zeros."""

    tier = None

    def __init__(self, clock: Clock, noise: random.Random, launch: float) -> None:
        self.clock, self._noise, self._launch = clock, noise, launch
        self._free_at = 0.0
        self.costs = StepCosts(ROWS, [value / 1000 for value in MILLISECONDS], PER_KEY, PER_PAIR)
        self.steps = 0

    def submit(self, output: SchedulerOutput) -> "SimulatedStep":
        """Begin when what is on its way has ended."""
        self.clock.now += HOST
        load = load_of(output.scheduled)
        decoding = DECODE[0] + DECODE[1] * load.rows + PER_KEY * load.keys
        seconds = self.costs.seconds(load) if load.pairs else decoding
        self._free_at = max(self._free_at, self.clock.now) + seconds * self._noise.uniform(0.99, 1.03)
        if load.pairs:
            self.clock.now += self._launch * self._noise.uniform(0.99, 1.1)
            self._free_at = max(self._free_at, self.clock.now)
        self.steps += 1
        return SimulatedStep(self.clock, self._free_at, output)


class SimulatedStep:
    """Ends at a time."""

    def __init__(self, clock: Clock, ends: float, output: SchedulerOutput) -> None:
        self._clock, self._ends, self._output = clock, ends, output

    def result(self) -> ModelRunnerOutput:
        """Let the time pass."""
        self._clock.now = max(self._clock.now, self._ends)
        places = len(self._output.scheduled)
        tokens = [[0] * bool(item.sampled) for item in self._output.scheduled]
        return ModelRunnerOutput(tokens, [None] * places, [None] * places)


def simulate(
    arrivals: list[float],
    inputs: list[int],
    outputs: list[int],
    target: float | None,
    yields: bool,
    error: float = 1.0,
    launch: float = 0.0,
) -> dict[str, Any]:
    """Times to the first token and between tokens, in seconds, and the rate at which requests were answered."""
    clock = Clock()
    gpu: Any = SimulatedGpu(clock, random.Random(1), launch)
    seconds = [error * max(value / 1000, launch) for value in MILLISECONDS]
    costs = StepCosts(ROWS, seconds, error * PER_KEY, error * PER_PAIR)
    pace = None if target is None else Pace(costs, target, yields, clock)
    cache = KVCacheManager(40_000, 16)
    scheduler = Scheduler(SchedulerLimits(8192, 512, 1000), cache, POLICIES["fcfs"])
    core = EngineCore(scheduler, gpu, 2, timing=CoreTiming(pace, clock=clock))
    todo = deque(enumerate(zip(arrivals, inputs, outputs, strict=True)))
    last: dict[str, float] = {}
    arrived: dict[str, float] = {}
    first, gaps = [], []
    while todo or core.has_work:
        while todo and todo[0][1][0] <= clock.now:
            number, (at, length, answer) = todo.popleft()
            params = SamplingParams(max_tokens=answer).resolved()
            core.add(RequestSpec(str(number), PromptInput([number] * length), params, answer))
            arrived[f"{number}#0"] = at
        rest = clock.now + core.spare_seconds() if core.has_work else float("inf")
        if todo and todo[0][1][0] <= rest:
            clock.now = max(clock.now, todo[0][1][0])
            continue
        clock.now = rest
        for event in core.step():
            if event.request_id in last:
                gaps.append(clock.now - last[event.request_id])
            else:
                first.append(clock.now - arrived[event.request_id])
            last[event.request_id] = clock.now
    return {"ttft": first, "itl": gaps, "rate": len(first) / clock.now, "steps": gpu.steps}


def workloads(rates: list[float], seed: int) -> Iterator[tuple[str, list[float], list[int], list[int]]]:
    """512 tokens in and 128 out at each rate, and a mixture of lengths at once."""
    for rate in rates:
        count = 512 if rate == float("inf") else max(256, int(20 * rate))
        yield f"{rate:g}/s", arrival_times(count, rate, 1.0, random.Random(seed)), [512] * count, [128] * count
    dice = random.Random(seed)
    lengths = [int(dice.lognormvariate(6.0, 1.0)) + 8 for _ in range(512)]
    answers = [int(dice.lognormvariate(4.8, 0.8)) + 8 for _ in range(512)]
    yield "mixed 16/s", arrival_times(512, 16, 1.0, dice), lengths, answers
    yield "mixed inf", [0.0] * 512, lengths, answers
    yield (
        "one long",
        [0.0] * 8 + [1.0] + [1.2 + i / 10 for i in range(10)],
        [512] * 8 + [60_000] + [512] * 10,
        [600] * 19,
    )


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", type=float, default=[16.0, 40.0, float("inf")])
    parser.add_argument("--targets", nargs="+", default=["none", "auto", "15", "10"], help="none, auto or milliseconds")
    parser.add_argument("--error", type=float, default=1.0)
    parser.add_argument("--launch", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(f"{'':12}{'target':>8}{'req/s':>8}{'steps':>7}{'TTFT p50':>10}{'p99':>9}{'ITL p50':>9}{'p99':>8}{'p99.9':>8}")
    for name, arrivals, inputs, outputs in workloads(options.rates, options.seed):
        for text in options.targets:
            target = None if text == "none" else AUTO if text == "auto" else float(text) / 1000
            found = simulate(arrivals, inputs, outputs, target, text == "auto", options.error, options.launch / 1000)
            first, gaps = ([1000 * value for value in found[key]] for key in ("ttft", "itl"))
            print(
                f"{name:12}{text:>8}{found['rate']:8.1f}{found['steps']:7}{percentile(first, 50):10.1f}"
                f"{percentile(first, 99):9.1f}{percentile(gaps, 50):9.2f}{percentile(gaps, 99):8.2f}"
                f"{percentile(gaps, 99.9):8.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
