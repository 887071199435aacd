"""A load on an engine in this process, with the work, the time and the decisions of every step."""

import dataclasses
import gc
import sys
import time
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from kvern.bench.machine import hardware
from kvern.cache.messages import TierMessage
from kvern.cache.tier import TierTraffic
from kvern.config import EngineConfig
from kvern.engine.core import EngineCore
from kvern.engine.factory import build_core, make_pace
from kvern.errors import ConfigError
from kvern.io.interpreter import settle
from kvern.loads.request import LoadRequest
from kvern.models.folder import model_folder
from kvern.planning.hardware import kind_of_gpu
from kvern.request.step import ModelRunnerOutput, SchedulerOutput, StepResult
from kvern.request.store_figures import StoreFigures
from kvern.runner.plan import Layout
from kvern.runner.startup import Startup
from kvern.simulate.engine import DrivenEngine, EngineSizes, PaceSizes, Prompts, check_load
from kvern.simulate.records import RecordedRequest, RecordedStep, RecordHeader, StepRecord, recorded_step
from kvern.simulate.tier_answers import NotedTier
from kvern.simulate.tiers import SIMULATED, StoreSizes, TierSizes
from kvern.simulate.timeline import Timeline
from kvern.tiers.store import read_bytes
from kvern.version import __version__

if TYPE_CHECKING:
    from kvern.runner.executor import Executor
    from kvern.runner.tier import Tier

WARM_REQUESTS = 8
"""Requests of `MeasuredEngine.warm`."""


class SteppedClock:
    """The real time, as it was when a step ended or a wait did: so a record says all that the core has seen of it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.rests: list[float] = []
        """The ends of waits since they were taken last."""
        self._began = time.perf_counter()

    def __call__(self) -> float:
        return self.now

    def tick(self) -> None:
        """A step has ended."""
        self.now = time.perf_counter() - self._began

    def sleep(self, seconds: float) -> None:
        """Waits."""
        time.sleep(seconds)
        self.tick()
        self.rests.append(self.now)

    def reach(self, moment: float) -> None:
        """Waits until a moment, unless that is over; what the system is late counts as the next step's."""
        time.sleep(max(0.0, moment - (time.perf_counter() - self._began)))
        self.now = max(self.now, moment)


class RecordedExecutor:
    """Notes what an executor's steps were."""

    def __init__(self, executor: "Executor", clock: SteppedClock, timeline: Timeline) -> None:
        self.tier = None if executor.tier is None else NotedTier(executor.tier)
        self.loads: set[int] = set()
        """The numbers of what was loaded."""
        self.steps: list[RecordedStep] = []
        self.answers: dict[str, list[int]] = {}
        self.ended = self.busy = 0.0
        self.clock, self.timeline = clock, timeline
        self.idle = executor.idle
        self.measured = executor.measured
        self.abandon = executor.abandon
        self._executor = executor

    def submit(self, output: SchedulerOutput) -> StepResult:
        """Starts a step."""
        if (pages := output.message(TierMessage)) is not None:
            self.loads |= {load.load for load in pages.loads}
        return _RecordedResult(self, self._executor.submit(output), output, self.clock.now)

    def take(self, output: SchedulerOutput, result: ModelRunnerOutput, submitted: float) -> None:
        """Notes a step that has ended."""
        self.clock.tick()
        now, begun = self.clock.now, max(self.ended, submitted)
        step = recorded_step(output, begun, now)
        if self.tier is not None:
            report: Any = result.reports.get(TierMessage.extension)
            step = msgspec.structs.replace(step, answers=self.tier.answers, rests=self.clock.rests, report=report)
            self.tier.answers, self.clock.rests = [], []
        self.steps.append(step)
        self.busy += now - begun
        self.ended = now
        self.timeline.ended(now, output.scheduled, output.request_ids)
        for name, tokens in zip(output.request_ids, result.token_ids, strict=True):
            self.answers.setdefault(name, []).extend(tokens)


class _RecordedResult:
    def __init__(
        self, executor: RecordedExecutor, result: StepResult, output: SchedulerOutput, submitted: float
    ) -> None:
        self._executor, self._result = executor, result
        self._output, self._submitted = output, submitted

    def done(self) -> bool:
        return self._result.done()

    def result(self) -> ModelRunnerOutput:
        found = self._result.result()
        self._executor.take(self._output, found, self._submitted)
        return found


class MeasuredEngine:
    """The engine of a model, ready to be driven by loads. Raises KvernError."""

    def __init__(self, config: EngineConfig) -> None:
        config = dataclasses.replace(config, speculation="off")
        self._folder = model_folder(config)
        core, spec, self._layout = build_core(config, self._folder, Startup(own_process=False))
        if not isinstance(core, EngineCore) or config.pipeline_parallel_size > 1 or _is_extended(core):
            raise ConfigError(
                f"{config.model} cannot be recorded: only models without windows, states and images are, without DP "
                "attention and pipeline stages"
            )
        self._config, self._core = config, core
        self._before: tuple[tuple[int, int, int], float] | None = None
        """The collector's thresholds and the switch interval of this process."""
        self._frozen = 0
        self.vocabulary = spec.vocab_size
        self.sizes = sizes_of(config, self._layout)
        if (tier := self.tier) is not None:
            found = zip(tier.figures().items(), config.kv_tier, strict=True)
            stores = tuple(_measured(name, _size(option), figures) for (name, figures), option in found)
            self.sizes = msgspec.structs.replace(self.sizes, tier=TierSizes(stores, tier.identity.hex()))
        self.pace = self._paced()

    @property
    def tier(self) -> "Tier | None":
        """The stores of its KV cache, if it has some."""
        return self._core.executor.tier

    def warm(self) -> None:
        """Runs some requests, for what is made at the first steps, and sets Python up as an engine's process does."""
        load = [LoadRequest(0.0, min(64, self.sizes.max_model_len // 2), 8) for _ in range(WARM_REQUESTS)]
        self.run(load, Prompts(self.vocabulary, "warm"))
        if self._before is None:
            self._before = gc.get_threshold(), sys.getswitchinterval()
            self._frozen = gc.get_freeze_count()
            settle()

    def driven(self) -> tuple[DrivenEngine, RecordedExecutor]:
        """Returns the engine with an empty cache and the present `sizes`, and what notes its steps."""
        clock, timeline = SteppedClock(), Timeline()
        recorded = RecordedExecutor(self._core.executor, clock, timeline)
        return DrivenEngine(self.sizes, clock, recorded, timeline, self.pace), recorded

    def run(self, load: list[LoadRequest], prompts: Prompts | None = None) -> tuple[StepRecord, DrivenEngine]:
        """Runs a load with the present `sizes`. Raises ConfigError if it does not fit."""
        check_load(load, self.sizes)
        executor = self._core.executor
        engine, recorded = self.driven()
        engine.run(load, prompts or Prompts(self.vocabulary))
        if recorded.loads:  # the next run numbers its own from the first on
            executor.submit(SchedulerOutput(0, extensions=TierMessage([], [], [*recorded.loads]).by_name())).result()
        executor.forget()
        found = [RecordedRequest(each, recorded.answers[f"{number}#0"]) for number, each in enumerate(load)]
        return StepRecord(self._header, found, recorded.steps), engine

    def close(self) -> None:
        """Ends the engine; Python is as it was before `warm`."""
        self._core.close()
        if self._before is not None:
            if not self._frozen:
                gc.unfreeze()
            gc.set_threshold(*self._before[0])
            sys.setswitchinterval(self._before[1])

    @property
    def _header(self) -> RecordHeader:
        return RecordHeader(
            version=__version__,
            model=str(self._config.model),
            hardware=hardware_name(self._layout),
            vocabulary=self.vocabulary,
            sizes=self._measured_sizes,
            pace=self.pace,
            graph_tokens=self._core.executor.graph_tokens,
        )

    @property
    def _measured_sizes(self) -> EngineSizes:
        """The sizes, with what the stores' transfers have taken."""
        tier = self.sizes.tier
        if tier is None or self.tier is None:
            return self.sizes
        figures = self.tier.figures()
        stores = tuple(_measured(store.name, store.size, figures[store.name]) for store in tier.stores)
        return msgspec.structs.replace(self.sizes, tier=TierSizes(stores, tier.identity))

    def _paced(self) -> PaceSizes | None:
        executor = self._core.executor
        pace = make_pace(self._config, self._folder, executor, self._layout, streams=True)
        if pace.costs is None:
            return None
        rows, seconds, per_key, per_pair = pace.costs.told
        yields = self._config.target_itl_seconds is None
        return PaceSizes(pace.target, yields, tuple(rows), tuple(seconds), per_key, per_pair)


def _is_extended(core: EngineCore) -> bool:
    """True if an engine caches other things than keys and values, or tells others of them."""
    return any(not isinstance(each, TierTraffic) for each in core.scheduler.cache.extensions)


def _size(option: str) -> int:
    """Returns the bytes of a store that can be recorded. Raises ConfigError."""
    kind, _, rest = option.partition(":")
    try:
        if kind in SIMULATED:
            return read_bytes(rest.rpartition(":")[2])
    except ValueError:
        pass
    raise ConfigError(f"kv_tier is {option!r:.60}: recorded are {' and '.join(SIMULATED)} with a size, as in host:4GB")


def _measured(name: str, size: int, figures: StoreFigures) -> StoreSizes:
    basis = (
        "as it was measured with these steps" if figures.read_bytes else "as an engine expects that has read nothing"
    )
    return StoreSizes(name, size, figures.latency_seconds, figures.bandwidth, basis)


def sizes_of(config: EngineConfig, layout: Layout) -> EngineSizes:
    """Returns what decides of an engine."""
    return EngineSizes(
        blocks=layout.blocks,
        block_size=layout.block_size,
        max_model_len=layout.max_model_len,
        max_batch_requests=layout.max_batch_requests,
        max_batch_tokens=layout.max_batch_tokens,
        depth=layout.depth,
        policy=config.policy,
        aging_steps=config.aging_steps,
        chunked_prefill=config.chunked_prefill,
        continuous=config.batching == "continuous",
        prefix_cache=config.prefix_cache,
        token_bytes=layout.token_bytes,
        on_device=layout.device != "cpu",
    )


def hardware_name(layout: Layout) -> str:
    """Returns an engine's GPUs as `kvern simulate --hardware` reads them, or the processor with its cores."""
    if layout.gpus:
        name = torch.cuda.get_device_name()
        kind = kind_of_gpu(name)
        return f"{len(layout.gpus)}x {kind.name if kind else name}"
    found = hardware()
    return f"{found.processor or 'CPU'}, {found.cores} cores"
