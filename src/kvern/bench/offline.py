"""Measurements of workloads on an engine."""

import copy
import dataclasses
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from msgspec.structs import replace

from kvern.bench.percentile import percentile
from kvern.bench.record import Case, Record, figure, make_record
from kvern.bench.workloads import Workload
from kvern.config import EngineConfig
from kvern.engine.core import EngineCore
from kvern.engine.encoder_core import EncoderCore
from kvern.engine.engine import Engine
from kvern.errors import ConfigError, without_passwords
from kvern.observe.metrics import DraftFigures
from kvern.observe.verdict import Verdict, judge
from kvern.request.sampling_params import SamplingParams

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class OfflineRun:
    """One run of a workload: seconds in all, to each request's first token, and between its tokens."""

    seconds: float
    first_token: list[float]
    between_tokens: list[float]
    prefix_cache_hit_rate: float
    drafts: DraftFigures
    verdict: Verdict | None = None


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

    def case(self, temperature: float, predicted: float | None) -> Case:
        """Returns the figures of the runs for a record; `predicted`: the seconds that kvern plan estimates."""
        seconds = [run.seconds for run in self.runs]
        figures = {
            "seconds": figure(seconds, "s", main=True),
            "generated_tokens_per_second": figure(
                [self.generated_tokens / each for each in seconds], "tokens/s", "higher"
            ),
            "step_milliseconds": figure([1000 * each / max(self.workload.lengths) for each in seconds], "ms"),
            **{
                f"{label}_p{percent}_milliseconds": figure(
                    [1000 * percentile(getattr(run, name), percent) for run in self.runs], "ms"
                )
                for label, name in (("ttft", "first_token"), ("itl", "between_tokens"))
                for percent in PERCENTILES
            },
            "prefix_cache_hit_rate": figure([run.prefix_cache_hit_rate for run in self.runs], "share", "higher"),
        }
        asked = {
            "requests": len(self.workload.prompts),
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens,
            "longest_answer": max(self.workload.lengths),
            "temperature": temperature,
            "digest": self.workload.digest,
        }
        drafts = dataclasses.asdict(self.drafts) | {"tokens_a_step": self.drafts.tokens_a_step}
        return Case(self.workload.name, figures, asked, {"drafts": drafts, "predicted_seconds": predicted})


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
    middle = before
    began = time.perf_counter()
    for index, (prompt, length) in enumerate(zip(workload.prompts, workload.lengths, strict=True)):
        engine.add(str(index), prompt, params[length])
    while engine.has_work:
        changed = engine.step()
        now = time.perf_counter()
        for output in changed:
            if output.finished:
                output.check()
                if middle is before:
                    middle = copy.copy(core.statistics())
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
    crowded = replace(after, kv_cache_usage=middle.kv_cache_usage, running=middle.running, waiting=middle.waiting)
    verdict, drafts = judge(before, crowded), DraftFigures.between(before, after)
    return OfflineRun(seconds, first_token, between_tokens, hits, drafts, verdict)


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


def record_of(benchmark: str, engine: Engine, cases: Sequence[Case]) -> Record:
    """Returns the record of what was measured with an engine: with its options, plan and start."""
    plan = msgspec.to_builtins(engine.layout, order="deterministic")
    del plan["gpus"]
    conditions = {
        "threads": torch.get_num_threads(),
        "startup_seconds": engine.startup.stages,
        "startup_reports": engine.startup.reports,
    }
    options = shown_config(engine.config)
    model = engine.config.model
    return make_record(benchmark, model, cases, options=options, plan=plan, conditions=conditions)


def shown_config(config: EngineConfig) -> dict[str, Any]:
    """Returns the options of an engine for a file that others read: without passwords."""
    return dataclasses.asdict(config) | {"kv_tier": [without_passwords(option) for option in config.kv_tier]}
