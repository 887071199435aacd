"""A profile of a workload's steps: a Chrome trace, and a table by part of the model."""

import re
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._C._autograd import DeviceType

from kvern.bench.record import Case, figure
from kvern.bench.workloads import Workload
from kvern.engine.engine import Engine
from kvern.request.sampling_params import SamplingParams
from kvern.runner.step_profile import DEVICE, HOST, profiled

PARTS = (
    ("ranks", r"_peer_|nccl"),
    ("attention", r"attention|attend|flash|fmha|BatchDecode|BatchPrefill"),
    ("experts", r"grouped_|direct_|_route|_align|_count_kernel|_sum_kernel"),
    ("sampling", r"_sample|_constrain|_restrict|_logprobs|argmax|softmax|topk|sort"),
    (
        "linear",
        r"matvec|matmul|_product_|_stream_|gemm|gemv|cutlass|nvjet|splitK|mkldnn|aten::(mm|addmm|linear|mv)|kvern_[lm]",
    ),
    ("norm", r"norm"),
    ("rotation and cache write", r"rotate"),
    ("activation", r"activation|silu|gelu"),
    ("batch", r"read_tokens|read_decodes|write_sampled|write_runs|write_tokens|unpack_linear|index|gather|embedding"),
    ("copies", r"[Mm]emcpy|[Mm]emset|copy"),
)
"""Parts of a step, by the names of their kernels; the first match counts."""


@dataclass(frozen=True)
class Profile:
    """Seconds of device time by part and by kernel (with calls), of `steps` steps that took `seconds` in all."""

    steps: int
    seconds: float
    parts: dict[str, float]
    kernels: list[tuple[str, int, float]]
    on_gpu: bool

    @property
    def busy(self) -> float:
        """The device's share of the time; kernels that overlap count twice."""
        return sum(self.parts.values())

    def case(self, workload: Workload) -> Case:
        """Returns the milliseconds of a step for a record: by the clock, and of each part; kernels as details."""
        each = 1000 / max(self.steps, 1)
        figures = {"step_milliseconds": figure([each * self.seconds], "ms", main=True)}
        figures |= {f"{part}_milliseconds": figure([each * seconds], "ms") for part, seconds in self.parts.items()}
        kernels = [{"kernel": name, "calls": calls, "seconds": spent} for name, calls, spent in self.kernels]
        asked = {"steps": self.steps, "digest": workload.digest}
        return Case(workload.name, figures, asked, {"on_gpu": self.on_gpu, "kernels": kernels})


def part_of(kernel: str) -> str:
    """Returns the part of a step that a kernel belongs to."""
    return next((part for part, pattern in PARTS if re.search(pattern, kernel)), "other")


def profile_workload(engine: Engine, workload: Workload, steps: int, warmup: int, trace: Path | None) -> Profile:
    """Runs `warmup` steps of a workload, then profiles `steps` steps and writes the trace."""
    for index, (prompt, length) in enumerate(zip(workload.prompts, workload.lengths, strict=True)):
        params = SamplingParams(max_tokens=length, temperature=0.6, ignore_eos=True)
        engine.add(f"profile-{index}", prompt, params)
    on_gpu = torch.cuda.is_available() and engine.config.device != "cpu"
    try:
        for _ in range(warmup):
            if engine.has_work:
                engine.step()
        taken = 0
        with profiled([DEVICE if on_gpu else HOST]) as profiler:
            began = time.perf_counter()
            while taken < steps and engine.has_work:
                engine.step()
                taken += 1
            if on_gpu:
                torch.cuda.synchronize()
            seconds = time.perf_counter() - began
    finally:
        engine.abort(engine.request_ids)
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    totals: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for event in profiler.events() or ():  # type: ignore[no-untyped-call]
        if on_gpu and event.device_type == DeviceType.CUDA:
            microseconds = event.device_time
        elif not on_gpu and event.device_type == DeviceType.CPU:
            microseconds = event.self_cpu_time_total
        else:
            continue
        totals[event.name][0] += 1
        totals[event.name][1] += microseconds / 1e6
    parts: dict[str, float] = defaultdict(float)
    for name, (_, spent) in totals.items():
        parts[part_of(name)] += spent
    kernels = sorted(((name, int(calls), spent) for name, (calls, spent) in totals.items()), key=lambda item: -item[2])
    return Profile(taken, seconds, dict(sorted(parts.items(), key=lambda item: -item[1])), kernels, on_gpu)
