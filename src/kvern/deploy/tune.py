"""Options that are fastest on this machine, found by `tuner.py` from the plan's prediction on.

Kernels are chosen when an engine starts, as everywhere (`layers/tuning.py`, `attention/selection.py`), and stay in
kvern's cache folder: a bundle may come from anyone, and holds no code. The other options are measured on the workload,
an engine for each configuration. Each run is noted, so that a process that is killed repeats none.
"""

import json
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from kvern.config import EngineConfig
from kvern.deploy.description import device_names
from kvern.deploy.discover import FALLBACK, Discovered
from kvern.deploy.journal import key_of, write_whole
from kvern.deploy.plan import Planned, load_of
from kvern.deploy.quantize import Quantized
from kvern.deploy.report_plots import trials_plot
from kvern.deploy.shard import Sharded
from kvern.deploy.stage import Part, Work
from kvern.deploy.tuner import Configuration, Knob, Trial, Tuner
from kvern.deploy.workload import Run, Workload, run_workload
from kvern.engine.engine import Engine
from kvern.errors import KvernError
from kvern.runner.plan import BATCH_REQUESTS, BATCH_TOKENS

EXCESS = 10.0
"""A configuration that exceeds a target by 1 % counts as slower by so many percent."""


class Tried(msgspec.Struct):
    """A configuration that was measured, with the seconds of its runs."""

    options: dict[str, Any]
    runs: list[float]
    kept: bool


class Tuned(msgspec.Struct):
    """The options that were chosen, beside those of the plan, and all that was tried; the first is the plan's.

    `allowed`: the seconds after which no further configuration was begun.
    """

    options: dict[str, Any]
    seconds: float
    tried: list[Tried] = []
    knobs: list[str] = []
    ended_early: bool = False
    allowed: float = 0.0
    failed: list[str] = []


def engine_options(work: Work) -> dict[str, Any]:
    """Returns the options of engines that do not depend on tuning: model, split, memory."""
    quantized = work.of(Quantized)
    folder = Path(work.of(Sharded).folder)
    if quantized.folder is not None:
        folder = (work.folder / quantized.folder).absolute()
    options: dict[str, Any] = {"model": str(folder), **work.of(Sharded).options}
    if work.asked.memory is not None and (tokens := work.of(Planned).cache_tokens):
        options["kv_cache_tokens"] = tokens
    options |= as_options({name: value for name, value in work.asked.fixed.items() if name != "served_model_name"})
    return options


def one_engine(options: Mapping[str, Any]) -> tuple[EngineConfig, int]:
    """Returns the options of one of the engines, and how many there are: they are alike, and one is measured."""
    config = EngineConfig(**options)
    return replace(config, data_parallel_size=1), config.data_parallel_size


def knobs_of(plan: Planned, load: Workload, lossy: bool, limited: bool) -> tuple[dict[str, Any], list[Knob]]:
    """Returns the configuration to begin with, and what may be changed.

    `lossy`: a loss is allowed, and keys and values may have 8 bits. `limited`: the time between tokens has a limit.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens, requests = BATCH_TOKENS[device], BATCH_REQUESTS[device]
    usual = next((step for step in _doubled(8, requests) if step >= plan.batch), requests) if plan.batch else requests
    knobs = [
        Knob("max_batch_tokens", _doubled(tokens // 4, 4 * tokens), ladder=True),
        Knob("max_batch_requests", _doubled(max(usual // 4, 1), 2 * requests), ladder=True),
        Knob("proposer", (None, "ngram", "suffix")),
    ]
    if limited and device == "cuda":  # a CPU's prompts are not bounded by it
        knobs.append(Knob("target_itl", (None, "10ms", "20ms", "40ms")))
    if lossy:
        knobs.append(Knob("kv_cache_dtype", ("auto", "fp8" if device == "cuda" else "int8")))
    if load.shares:
        knobs.append(Knob("kv_tier", ([], ["host:4GB"], ["host:16GB"])))
    start = {knob.name: knob.values[0] for knob in knobs} | {"max_batch_tokens": tokens, "max_batch_requests": usual}
    return start, knobs


def _doubled(first: int, last: int) -> list[int]:
    found = [first]
    while found[-1] * 2 <= last:
        found.append(2 * found[-1])
    return found


class Measuring:
    """Runs of a workload by configuration; an engine is kept for as long as its configuration is asked for."""

    def __init__(self, base: Mapping[str, Any], load: Workload, target: Mapping[str, float]) -> None:
        self._base = base
        self._load = load
        self._target = target
        self._configuration: Configuration | None = None
        self._engine: Engine | None = None
        self.last: Run | None = None
        self.refused: dict[str, str] = {}
        """Configurations with which no engine started, as JSON, and why."""

    def __call__(self, configuration: Configuration) -> float:
        """Returns the cost of one run: its seconds, more where a target is missed, infinite where none starts."""
        try:
            if configuration != self._configuration:
                self._start(configuration)
            if self._engine is None:
                return math.inf
            self.last = run = run_workload(self._engine, self._part)
        except (KvernError, torch.OutOfMemoryError) as error:
            self.refused[json.dumps(configuration)] = str(error)
            self.close()
            return math.inf
        times = {"ttft": run.ttft, "itl": run.itl}
        excess = [times[name] / limit - 1 for name, limit in self._target.items() if times[name] > limit]
        return run.seconds * (1 + EXCESS * sum(excess))

    def _start(self, configuration: Configuration) -> None:
        self.close()
        self._configuration = configuration
        config, engines = one_engine({**self._base, **as_options(configuration)})
        self._part = self._load.part(engines)
        self._engine = Engine(config)
        run_workload(self._engine, self._part)  # the first is not measured

    def close(self) -> None:
        """Ends the engine."""
        if self._engine is not None:
            self._engine.close()
        self._engine = None


def as_options(configuration: Configuration) -> dict[str, Any]:
    """Returns a configuration, which is JSON, as options of `EngineConfig`."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in configuration.items()}


class Noted:
    """Measurements that a process before this one has noted come first, in their order.

    An engine that did not start is not noted, as another process may have had the memory: the next run tries again.
    """

    def __init__(self, measure: Measuring, path: Path, key: str) -> None:
        self._measure = measure
        self._path = path
        self._key = key
        self._known: dict[str, list[float]] = {}
        self._given: dict[str, int] = {}
        try:
            stored = msgspec.json.decode(path.read_bytes())
            known = stored["runs"] if stored["key"] == key else {}
            self._known = {name: [run for run in runs if run < 1e300] for name, runs in known.items()}
        except (OSError, ValueError, KeyError):
            pass  # nothing is known yet

    def __call__(self, configuration: Configuration) -> float:
        """Returns the next run of a configuration."""
        name = json.dumps(configuration, sort_keys=True)
        number = self._given.get(name, 0)
        runs = self._known.setdefault(name, [])
        if number == len(runs):
            if math.isinf(cost := self._measure(configuration)):
                return cost
            runs.append(cost)
            write_whole(self._path, msgspec.json.encode({"key": self._key, "runs": self._known}))
        self._given[name] = number + 1
        return runs[number]


class Tune:
    """The fifth stage."""

    name = "tune"
    result = Tuned

    def inputs(self, work: Work) -> Mapping[str, Any]:
        """The machine, what is asked for, and options that are given."""
        asked = work.asked
        given = None if asked.options is None else dict(asked.options)
        return {
            "devices": device_names(),
            "given": given,
            "target": dict(asked.target),
            "memory": asked.memory,
            "lossy": asked.max_loss is not None,
            "fixed": dict(asked.fixed),
        }

    def run(self, work: Work) -> Tuned:
        """Measures, or takes the options of a bundle that is made again. Raises KvernError."""
        asked = work.asked
        if asked.options is not None:
            return Tuned(dict(asked.options), 0.0)
        load = load_of(work)
        plan = work.of(Planned)
        start, knobs = knobs_of(plan, load, asked.max_loss is not None, "itl" in asked.target)
        knobs = [knob for knob in knobs if knob.name not in asked.fixed]
        start = {name: value for name, value in start.items() if name not in asked.fixed}
        if work.of(Discovered).family == FALLBACK:
            knobs = [knob for knob in knobs if knob.ladder]
        base = engine_options(work)
        measuring = Measuring(base, load, asked.target)
        key = key_of(self.inputs(work), base, load.text, load.lengths)
        noted = Noted(measuring, work.journal.beside("runs.json"), key)

        def measure(configuration: Configuration) -> float:
            cost = noted(configuration)
            work.say(f"    {_changes(configuration, start)}: {cost:.4g} s")
            return cost

        tuner = Tuner(measure, time.monotonic, asked.repetitions, asked.tune_seconds)
        try:
            best = tuner.tune(start, knobs)
        finally:
            measuring.close()
        tried = [Tried(dict(trial.configuration), _finite(trial), trial.kept) for trial in tuner.trials.values()]
        result = Tuned(dict(best.configuration), best.mean, tried, [knob.name for knob in knobs], tuner.ended_early)
        result.allowed = asked.tune_seconds
        if math.isinf(best.mean):
            reasons = list(measuring.refused.values())
            result.failed.append(f"no engine ran the workload: {reasons[0] if reasons else 'see above'}")
            result.seconds = 0.0
        return result

    def stands(self, work: Work, result: Tuned) -> bool:
        """False if the time was over, and there is more of it now."""
        return not (result.ended_early and work.asked.tune_seconds > result.allowed)

    def report(self, result: Tuned) -> Part:
        """The choice, and a plot of what was tried."""
        chosen = ", ".join(f"{name} {_shown(value)}" for name, value in result.options.items())
        rows = [("options", chosen or "as usual")]
        if result.tried:
            first = result.tried[0]
            gain = _mean(first.runs) / result.seconds - 1 if result.seconds else 0.0
            rows.append(("workload", f"{result.seconds:.4g} s, {gain:+.1%} against the plan's options"))
            rows.append(("tried", f"{len(result.tried)} configurations, {sum(len(t.runs) for t in result.tried)} runs"))
        if result.ended_early:
            rows.append(("note", "the time was over before a round changed nothing (--tune-seconds)"))
        named = [
            (_changes(trial.options, result.tried[0].options), trial.runs, trial.kept)
            for trial in result.tried
            if trial.runs
        ]
        return Part(rows, trials_plot(named) if named else "")


def _finite(trial: Trial) -> list[float]:
    return [run for run in trial.runs if math.isfinite(run)]


def _mean(runs: list[float]) -> float:
    return sum(runs) / len(runs) if runs else 0.0


def _shown(value: Any) -> str:
    return "none" if value in (None, [], ()) else ",".join(value) if isinstance(value, list) else str(value)


def _changes(configuration: Configuration, start: Configuration) -> str:
    """Returns in which options a configuration differs from the first one."""
    apart = [f"{name} {_shown(value)}" for name, value in configuration.items() if start[name] != value]
    return ", ".join(apart) or "the plan's options"
