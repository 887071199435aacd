"""What the scheduler costs a step: 256 requests decode, and others wait.

    python benchmarks/scheduler.py [--policies fcfs prefix] [--waiting 0 1000 20000] [--target]

    rows full    every row decodes: nobody else could run
    no blocks    rows are free, but not enough blocks for the first of those that wait
    mixed        as before, and of those that wait a third are samples of prompts that have not begun, and a third use
                 adapters of which none has a place
    turnover     a request ends at every step, and the first of those that wait takes its row; another one arrives

Microseconds of `schedule()`, of `update()` of all that decode, and for turnover of the end, the arrival and both
together: the median over the steps. With `--target` steps keep to a time that holds a part of a prompt.
"""

import argparse
import statistics
import time
from collections.abc import Iterator

from kvern.cache.manager import KVCacheManager
from kvern.engine.queues import POLICIES
from kvern.engine.scheduler import Scheduler, SchedulerLimits
from kvern.engine.step_budget import StepTime
from kvern.engine.step_costs import StepCosts
from kvern.request.request import PromptInput, Request, RequestSpec
from kvern.request.sampling_params import SamplingParams

ROWS, BLOCK_SIZE, PROMPT, ANSWER = 256, 16, 48, 1024
CASES = ("rows full", "no blocks", "mixed", "turnover")


class Load:
    """A scheduler with 256 decoding requests, and `waiting` others that wait."""

    def __init__(self, case: str, policy: str, waiting: int, target: bool = False) -> None:
        self.case = case
        costs = StepCosts([64, 256, 512, 1024], [0.005, 0.008, 0.013, 0.025], 3e-8, 5e-10)
        self.time = StepTime(costs, 0.01) if target else None
        self.hoard: list[int] = []
        free_rows = 8 if case in ("no blocks", "mixed") else 0
        limits = SchedulerLimits(ROWS * 64, ROWS + free_rows, aging_steps=200)
        self.cache = KVCacheManager(ROWS * 128, BLOCK_SIZE)
        self.scheduler = Scheduler(limits, self.cache, POLICIES[policy], adapter_places=1)
        self.count = 0
        for index in range(ROWS):
            self.add(adapter=1 if case == "mixed" and index == 0 else None)
        self.step()
        for index in range(waiting):
            if case == "mixed" and index % 3 == 1:
                self.add(leader=self.last)
            else:
                self.add(adapter=2 if case == "mixed" and index % 3 == 2 else None)

    def add(self, adapter: int | None = None, leader: Request | None = None) -> None:
        """Queue a request with a prompt of its own, or another sample of a leader's."""
        number = self.count
        self.count += 1
        if leader is None:
            prompt = PromptInput([number // 1000, number % 1000] * (PROMPT // 2) + [0] * (number % 16))
            params = SamplingParams(max_tokens=ANSWER).resolved()
            self.last = Request(RequestSpec(str(number), prompt, params, ANSWER, adapter=adapter, priority=number % 3))
        else:
            self.last = Request(leader.spec, number, leader.leader or leader)
        self.scheduler.register(self.last)
        self.scheduler.waiting.add(self.last, self.scheduler.step)

    def keep_few_blocks(self) -> None:
        """Leave enough for those that run, and too few for another."""
        pool = self.cache.pool
        missing = ROWS // 2 - pool.free_count
        if missing > 0:
            pool.release([self.hoard.pop() for _ in range(missing)])
        else:
            self.hoard += pool.allocate(-missing)

    def step(self) -> tuple[float, float]:
        """One step; seconds of schedule and of the rest."""
        if self.case in ("no blocks", "mixed") and self.scheduler.running:
            self.keep_few_blocks()
        start = time.perf_counter()
        output = self.scheduler.schedule(self.time)
        planned = time.perf_counter()
        for index, (request_id, item) in enumerate(zip(output.request_ids, output.scheduled, strict=True)):
            if item.sampled:
                self.scheduler.update(self.scheduler.by_id[request_id], [index], 1)
        if self.case == "turnover":
            self.scheduler.finish(self.scheduler.by_id[output.request_ids[0]], "abort")
            self.add()
        return planned - start, time.perf_counter() - planned

    def steps(self, count: int) -> Iterator[tuple[float, float]]:
        """Many of them, after a few that are not counted."""
        for index in range(count + 10):
            times = self.step()
            if index >= 10:
                yield times


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=["fcfs", "priority", "prefix"], choices=sorted(POLICIES))
    parser.add_argument("--waiting", nargs="+", type=int, default=[0, 1000, 20000])
    parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--target", action="store_true")
    options = parser.parse_args()
    print(f"{'policy':10}{'case':12}{'waiting':>8}{'schedule':>10}{'update':>10}  us")
    for policy in options.policies:
        for case in options.cases:
            for waiting in options.waiting:
                schedule, update = zip(*Load(case, policy, waiting, options.target).steps(options.steps), strict=True)
                medians = [statistics.median(times) * 1e6 for times in (schedule, update)]
                print(f"{policy:10}{case:12}{waiting:8}{medians[0]:10.0f}{medians[1]:10.0f}", flush=True)


if __name__ == "__main__":
    main()
