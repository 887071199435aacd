"""Where steps run: on one device or several, that do the same. The engine core knows nothing below this."""

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

from kvern.adapters.peft import Adapter
from kvern.config import EngineConfig
from kvern.device.ranks import Ranks
from kvern.errors import EngineDied
from kvern.model_spec import ModelSpec
from kvern.step import ModelRunnerOutput, SchedulerOutput, StepResult
from kvern.worker.device import resolve_device
from kvern.worker.plan import Layout, agree, lay_out
from kvern.worker.rank_processes import RankProcesses
from kvern.worker.rank_wire import Found, HasRoom, IsReady, LoadWeights, RunStep, TakeMemory, UseIdleTime
from kvern.worker.startup import Startup
from kvern.worker.step_parts import StepParts
from kvern.worker.tiered import TIERS, Tier, TieredSteps
from kvern.worker.worker import Worker

ENDING_SECONDS = 2.0
"""So long after a failed step the end of a rank, which may be its cause, may take to be noticed."""


class Executor(Protocol):
    """Runs steps in the order of their submission, and holds what steps need of adapters and grammars."""

    def submit(self, output: SchedulerOutput) -> StepResult:
        """Start a step; the result may arrive later, an exception is the result's."""
        ...

    def abandon(self) -> None:
        """Forget all steps, one of which failed: every request joins anew. Raises if no other step can run."""
        ...

    def idle(self) -> bool:
        """Make one thing that steps would run faster with, while none runs; whether there are more."""
        ...

    def prepare(self, grammar: str) -> "Future[None] | None":
        """Begin to make what following this grammar needs; None: it is there."""
        ...

    def read_adapter(self, path: str) -> Adapter:
        """The adapter in a folder, checked; any thread may call this. Raises InvalidAdapter."""
        ...

    def add_adapter(self, key: int, adapter: Adapter) -> None:
        """Keep an adapter that was read, for steps to load."""
        ...

    def drop_adapter(self, key: int) -> None:
        """Forget an adapter."""
        ...


class InProcessExecutor:
    """Starts each step at once, in the calling thread; none after one that could not be started, until `abandon`.

    It would run on rows that lack what that one was to bring, and write to blocks of others.
    """

    def __init__(self, worker: Worker, tier: Tier | None = None) -> None:
        """`tier` keeps blocks that leave the KV cache; None: they are forgotten."""
        self._worker = worker
        self.tier = tier
        self._execute = StepParts(worker.runner.execute).execute
        if tier is not None:
            self._execute = TieredSteps(self._execute, tier, worker.runner.caches).execute
        self._error: BaseException | None = None

    def submit(self, output: SchedulerOutput) -> StepResult:
        if self._error is None:
            try:
                return self._execute(output)
            except BaseException as error:
                self._error = error
        failed: Future[ModelRunnerOutput] = Future()
        failed.set_exception(self._error)
        return failed

    def abandon(self) -> None:
        self._error = None
        self._worker.runner.abandon()

    def idle(self) -> bool:
        return self._worker.runner.idle()

    def prepare(self, grammar: str) -> "Future[None] | None":
        return self._worker.prepare(grammar)

    def read_adapter(self, path: str) -> Adapter:
        return self._worker.read_adapter(path)

    def add_adapter(self, key: int, adapter: Adapter) -> None:
        self._worker.add_adapter(key, adapter)

    def drop_adapter(self, key: int) -> None:
        self._worker.drop_adapter(key)


class RankedExecutor(InProcessExecutor):
    """The first of several ranks, in this process, which sends each step to the others and alone answers.

    A step that fails leaves the ranks in different states, so no other can run.
    """

    def __init__(self, worker: Worker, others: RankProcesses) -> None:
        super().__init__(worker)
        self._execute = worker.runner.execute  # whole: ranks would cut steps in different places
        self._others = others

    def submit(self, output: SchedulerOutput) -> StepResult:
        if self._error is None:
            self._others.send(RunStep(output))
        return super().submit(output)

    def abandon(self) -> None:
        ended = self._others.ended(ENDING_SECONDS)
        self._others.end()
        reason = f"it lost {ended}" if ended else "its ranks do not agree any more"
        cause, self._error = self._error, EngineDied(f"a step failed, and the engine cannot go on: {reason}")
        raise self._error from cause

    def idle(self) -> bool:
        self._others.send(UseIdleTime())
        return super().idle()


def start(
    config: EngineConfig,
    folder: Path,
    spec: ModelSpec,
    startup: Startup,
    draft: Path | None = None,
    lost: Callable[[int], None] | None = None,
) -> tuple[InProcessExecutor, Layout]:
    """The executor of a configuration, with the model in `folder` loaded and its draft, and what it has room for.

    `lost` as in `RankProcesses`. Raises KvernError subclasses.
    """
    if config.tensor_parallel_size > 1:
        return _start_ranks(config, folder, spec, startup, lost)
    worker = Worker(config, folder, spec, resolve_device(config), startup, draft)
    plan = agree([worker.probe()], config, spec)
    layout = lay_out([worker.load(plan)], plan, config)
    worker.build(layout)
    tier = None if config.kv_tier is None else TIERS.find(config.kv_tier)(config, layout)
    return InProcessExecutor(worker, tier), layout


def _start_ranks(
    config: EngineConfig, folder: Path, spec: ModelSpec, startup: Startup, lost: Callable[[int], None] | None
) -> tuple[RankedExecutor, Layout]:
    device = resolve_device(config)
    ranks = Ranks(0, config.tensor_parallel_size)
    worker = Worker(config, folder, spec, device, startup, ranks=ranks)
    others = RankProcesses(config, folder, lost)
    try:
        findings = worker.probe()
        with startup.stage("ranks"):
            plan = agree([findings, *(answer.findings for answer in others.answers(Found))], config, spec)
            others.send(LoadWeights(plan, others.meeting))
            ranks.connect(others.meeting, device, config.rank_timeout, others.listener)
        room = worker.load(plan)
        layout = lay_out([room, *(answer.room for answer in others.answers(HasRoom))], plan, config)
        others.send(TakeMemory(layout))
        worker.build(layout)
        others.answers(IsReady)
    except BaseException:
        others.end()
        raise
    return RankedExecutor(worker, others), layout
