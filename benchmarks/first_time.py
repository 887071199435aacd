"""What happens for the first time while users wait: workloads in a fresh process, their first runs beside later ones.

    python benchmarks/first_time.py --model Qwen/Qwen3-0.6B --load-format dummy mixed256 shared2048x256

Every workload runs `--runs` times. For each run: seconds, and the steps that took most beyond the median of their kind,
with what was compiled by Triton, captured as a graph and allocated in them. A kind is what a step computes: decodes by
the number of rows, others by the power of two above its tokens.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from kvern import LLM
from kvern.bench.offline import run_once
from kvern.bench.workloads import resolve
from kvern.engine.core import EngineCore
from kvern.engine.engine import Engine
from kvern.request.step import SchedulerOutput, StepResult

SHOWN = 12
"""Slow steps of a run."""


@dataclass
class Step:
    """One call of the engine's loop: what it submitted, milliseconds of the call and of the submission in it."""

    kind: str
    rows: int
    milliseconds: float = 0.0
    host_milliseconds: float = 0.0
    happened: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        happened = f": {', '.join(self.happened)}" if self.happened else ""
        return f"{self.kind}, {self.milliseconds:.1f} ms, of it {self.host_milliseconds:.1f} to submit{happened}"


def kind_of(output: SchedulerOutput) -> str:
    """What is comparable: decodes of as many rows, other steps of about as many tokens."""
    rows, tokens = len(output.scheduled), output.token_count
    if all(item.count == 1 for item in output.scheduled):
        return f"decode {rows}"
    return f"mixed {1 << (tokens - 1).bit_length()}"


def allocations() -> dict[str, int]:
    """How often PyTorch asked the driver for memory of the device, and for pinned memory of the host."""
    if not torch.cuda.is_available():
        return {}
    device, host = torch.cuda.memory_stats(), torch.cuda.host_memory_stats()
    return {"cudaMalloc": device.get("num_device_alloc", 0), "cudaHostAlloc": host.get("num_host_alloc", 0)}


class StepWatch:
    """Records the steps of an engine's core, and what is compiled, captured and allocated in them."""

    def __init__(self, core: EngineCore) -> None:
        self.steps: list[Step] = []
        self.compiled: list[str] = []
        """Kernels that Triton compiled, or read from its cache."""
        self._core: Any = core
        self._step, self._submit = core.step, core.executor.submit
        self._happened: list[str] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record what happens inside."""
        import triton

        hooks, graphs = triton.knobs.runtime, cast("Any", torch.cuda.CUDAGraph)
        before, capture = hooks.jit_post_compile_hook, graphs.capture_begin

        def capture_begin(*arguments: Any, **options: Any) -> None:
            self._happened.append("captures a graph")
            capture(*arguments, **options)

        hooks.jit_post_compile_hook, graphs.capture_begin = self._compile, capture_begin
        self._core.step, self._core.executor.submit = self._timed_step, self._timed_submit
        try:
            yield
        finally:
            hooks.jit_post_compile_hook, graphs.capture_begin = before, capture
            del self._core.step, self._core.executor.submit

    def _compile(self, **found: Any) -> None:
        self.compiled.append(f"{found['fn'].name} {found['key']}")
        self._happened.append(f"compiles {found['fn'].name}")

    def _timed_submit(self, output: SchedulerOutput) -> StepResult:
        self._happened = []
        before, began = allocations(), time.perf_counter()
        result = self._submit(output)
        milliseconds = 1000 * (time.perf_counter() - began)
        more = {name: count - before[name] for name, count in allocations().items()}
        self._happened += [f"{count} x {name}" for name, count in more.items() if count]
        self.steps.append(Step(kind_of(output), len(output.scheduled), 0.0, milliseconds, self._happened))
        return result

    def _timed_step(self) -> Any:
        count, began = len(self.steps), time.perf_counter()
        events = self._step()
        for step in self.steps[count:]:
            step.milliseconds = 1000 * (time.perf_counter() - began)
        return events


def medians(runs: Sequence[Sequence[Step]], of: Callable[[Step], float]) -> dict[str, float]:
    """Of each kind, over the steps of all runs."""
    by_kind: dict[str, list[float]] = {}
    for step in (step for run in runs for step in run):
        by_kind.setdefault(step.kind, []).append(of(step))
    return {kind: statistics.median(values) for kind, values in by_kind.items()}


def report(name: str, runs: list[tuple[float, list[Step]]]) -> None:
    """Print what every run took, and where it took more than steps of the kind do."""
    usual = medians([steps for _, steps in runs], lambda step: step.milliseconds)
    host = medians([steps for _, steps in runs], lambda step: step.host_milliseconds)
    for number, (seconds, steps) in enumerate(runs, 1):
        excess = {index: step.milliseconds - usual[step.kind] for index, step in enumerate(steps)}
        submitting = sum(step.host_milliseconds - host[step.kind] for step in steps)
        far = sum(step.milliseconds > 5 * usual[step.kind] for step in steps)
        print(
            f"{name}, run {number}: {seconds:.3f} s, {len(steps)} steps; beyond their kinds' medians "
            f"{sum(excess.values()):.0f} ms, {submitting:.0f} of submitting; {far} steps above 5 medians"
        )
        for index in sorted(sorted(excess, key=lambda index: -excess[index])[:SHOWN]):
            if excess[index] > 1:
                print(f"    {index:5} +{excess[index]:.1f} ms  {steps[index]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="+")
    parser.add_argument("--model", help="folder or Hugging Face id; the embedded model if left out")
    parser.add_argument("--load-format", default="auto", choices=["auto", "dummy"])
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=1.0)
    arguments = parser.parse_args()
    with LLM(arguments.model, load_format=arguments.load_format, max_model_len=arguments.max_model_len) as llm:
        engine = llm._engine
        assert isinstance(engine, Engine)
        assert isinstance(engine.core, EngineCore), "an encoder has no first token"
        print(f"ready after {engine.startup}")
        for workload in resolve(tuple(arguments.workloads), llm.spec.vocab_size):
            runs = []
            for _ in range(arguments.runs):
                watch = StepWatch(engine.core)
                with watch.watching():
                    seconds = run_once(engine, workload, arguments.temperature).seconds
                runs.append((seconds, watch.steps))
            report(workload.name, runs)


if __name__ == "__main__":
    main()
