"""Measurements of workloads on an engine."""

import copy
import dataclasses
import platform
import statistics
import time
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from kvern.bench.percentile import percentile
from kvern.bench.workloads import Workload
from kvern.config import EngineConfig
from kvern.engine.core import EngineCore
from kvern.engine.encoder_core import EncoderCore
from kvern.engine.engine import Engine
from kvern.errors import ConfigError, without_passwords
from kvern.observe.metrics import DraftFigures
from kvern.request.sampling_params import SamplingParams
from kvern.version import __version__

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class OfflineRun:
    """One run of a workload: seconds in all, to each request's first token, and between its tokens."""

    seconds: float
    first_token: list[float]
    between_tokens: list[float]
    prefix_cache_hit_rate: float
    drafts: DraftFigures


@dataclass(frozen=True)
class Result:
    """All runs of one workload; figures are medians over the runs."""

    workload: Workload
    runs: list[OfflineRun]

    @property
    def seconds(self) -> float:
        return statistics.median(run.seconds for run in self.runs)

    @property
    def spread(self) -> tuple[float, float]:
        seconds = [run.seconds for run in self.runs]
        return min(seconds), max(seconds)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.workload.prompts)

    @property
    def generated_tokens(self) -> int:
        return sum(self.workload.lengths)

    @property
    def step_milliseconds(self) -> float:
        """The total time divided by the tokens of the longest answer: one step, prefill included."""
        return 1000 * self.seconds / max(self.workload.lengths)

    @property
    def drafts(self) -> DraftFigures:
        """The drafts of the last run."""
        return self.runs[-1].drafts

    def percentile(self, name: str, percent: int) -> float:
        """Returns a percentile of `first_token` or `between_tokens` of the median run, in milliseconds."""
        values = [percentile(getattr(run, name), percent) for run in self.runs]
        return 1000 * statistics.median(values)

    def report(self) -> dict[str, Any]:
        """Returns the figures as JSON."""
        return {
            "workload": self.workload.name,
            "requests": len(self.workload.prompts),
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens,
            "seconds": self.seconds,
            "seconds_of_runs": [run.seconds for run in self.runs],
            "prefix_cache_hit_rate": statistics.median(run.prefix_cache_hit_rate for run in self.runs),
            "prompt_tokens_per_second": self.prompt_tokens / self.seconds,
            "generated_tokens_per_second": self.generated_tokens / self.seconds,
            "step_milliseconds": self.step_milliseconds,
            "drafts": dataclasses.asdict(self.drafts) | {"tokens_a_step": self.drafts.tokens_a_step},
            **{
                f"{label}_milliseconds": {f"p{percent}": self.percentile(name, percent) for percent in PERCENTILES}
                for label, name in (("ttft", "first_token"), ("itl", "between_tokens"))
            },
        }


def check(workload: Workload, engine: Engine) -> None:
    """Raises ConfigError if the engine cannot hold the workload's longest request."""
    longest = engine.layout.max_model_len
    if workload.longest > longest:
        raise ConfigError(
            f"workload {workload.name} has requests of {workload.longest} tokens, above max_model_len {longest}: "
            "raise max_model_len or choose another workload"
        )


def run_once(engine: Engine, workload: Workload, temperature: float) -> OfflineRun:
    """Runs all requests at once, with a prefix cache that is empty at the start."""
    core = engine.core
    _forget_prefixes(engine)
    before = copy.copy(core.statistics())
    params = {
        length: SamplingParams(max_tokens=length, temperature=temperature, ignore_eos=True)
        for length in set(workload.lengths)
    }
    seen = [0] * len(workload.prompts)
    last = [0.0] * len(workload.prompts)
    first_token: list[float] = []
    between_tokens: list[float] = []
    began = time.perf_counter()
    for index, (prompt, length) in enumerate(zip(workload.prompts, workload.lengths, strict=True)):
        engine.add(str(index), prompt, params[length])
    while engine.has_work:
        changed = engine.step()
        now = time.perf_counter()
        for output in changed:
            if output.finished:
                output.check()
            index, count = int(output.request_id), len(output.outputs[0].token_ids)
            if count > seen[index]:
                if seen[index]:
                    between_tokens.append(now - last[index])
                else:
                    first_token.append(now - began)
                seen[index], last[index] = count, now
    seconds = time.perf_counter() - began
    after = core.statistics()
    queried = after.queried_tokens - before.queried_tokens
    hits = (after.cached_tokens - before.cached_tokens) / queried if queried else 0.0
    return OfflineRun(seconds, first_token, between_tokens, hits, DraftFigures.between(before, after))


def _forget_prefixes(engine: Engine) -> None:
    """Empties the prefix cache. Raises ConfigError if the engine cannot run workloads, or keeps prefixes between
    runs."""
    core = engine.core
    if isinstance(core, EncoderCore):
        raise ConfigError(f"{engine.spec.model_type} is an encoder: workloads are for models that generate")
    if isinstance(core, EngineCore):
        core.scheduler.cache.tree.clear()
    elif engine.config.prefix_cache:
        raise ConfigError("ranks in DP attention keep prefixes from run to run: give --no-prefix-cache")


def describe(engine: Engine) -> dict[str, Any]:
    """Returns the conditions of the measurement: versions, hardware, options and plan, as JSON."""
    return {
        "kvern": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": _device(torch.device(engine.layout.device)),
        "config": shown_config(engine.config),
        "plan": {name: value for name, value in msgspec.structs.asdict(engine.layout).items() if name != "gpus"},
        "startup_seconds": engine.startup.stages,
        "startup_reports": engine.startup.reports,
    }


def shown_config(config: EngineConfig) -> dict[str, Any]:
    """Returns the options of an engine for a file that others read: without passwords."""
    return dataclasses.asdict(config) | {"kv_tier": [without_passwords(option) for option in config.kv_tier]}


def _device(device: torch.device) -> dict[str, Any]:
    if device.type == "cpu":
        return {"name": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
        "triton": _triton_version(),
    }


def _triton_version() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    version: str = triton.__version__
    return version
