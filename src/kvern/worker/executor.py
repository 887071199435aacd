"""Where steps run: on one device or several, that do the same. The engine core knows nothing below this."""

from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

from kvern.adapters.peft import Adapter
from kvern.config import EngineConfig
from kvern.model_spec import ModelSpec
from kvern.step import ModelRunnerOutput, SchedulerOutput, StepResult
from kvern.worker.device import resolve_device
from kvern.worker.plan import Layout, agree, lay_out
from kvern.worker.startup import Startup
from kvern.worker.step_parts import StepParts
from kvern.worker.tiered import TIERS, Tier, TieredSteps
from kvern.worker.worker import Worker


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


def start(
    config: EngineConfig, folder: Path, spec: ModelSpec, startup: Startup, draft: Path | None = None
) -> tuple[InProcessExecutor, Layout]:
    """The executor of a configuration, with the model in `folder` loaded and its draft, and what it has room for.

    Raises KvernError subclasses.
    """
    worker = Worker(config, folder, spec, resolve_device(config), startup, draft)
    plan = agree([worker.probe()], config, spec)
    layout = lay_out([worker.load(plan)], plan, config)
    worker.build(layout)
    tier = None if config.kv_tier is None else TIERS.find(config.kv_tier)(config, layout)
    return InProcessExecutor(worker, tier), layout
