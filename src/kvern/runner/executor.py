"""The executor of steps on a single device. The engine core knows nothing below this."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvern.config import EngineConfig
from kvern.plugins import imported
from kvern.ranks.ranks import ALONE, Ranks
from kvern.request.layer_times import MeasuredStep
from kvern.request.step import ModelRunnerOutput, SchedulerOutput, StepResult, StepTooLarge
from kvern.request.weights import WeightsFound, WeightSource
from kvern.runner.cache_memory import map_blocks
from kvern.runner.device import resolve_device
from kvern.runner.loaded_model import Runner
from kvern.runner.plan import Layout, agree, lay_out
from kvern.runner.startup import Startup
from kvern.runner.weight_reader import WeightReader
from kvern.runner.worker import Worker
from kvern.spec.model import ModelSpec

if TYPE_CHECKING:
    from kvern.adapters.peft import Adapter
    from kvern.runner.ranks.experts import LayerCounts
    from kvern.runner.step_parts import StepParts
    from kvern.runner.tier import Tier

Execute = Callable[[SchedulerOutput], StepResult]


class Executor:
    """Runs steps in the order of their submission, and holds what steps need of adapters and grammars.

    Each begins at once, in the calling thread; none after one that could not be started, until `abandon`: it would run
    on rows that lack what that one was to bring, and write to blocks of others.
    """

    def __init__(self, worker: Worker, tier: "Tier | None" = None) -> None:
        """`tier` keeps pages of the KV cache; None: there is none."""
        self._worker = worker
        self.tier = tier
        self._parts: StepParts | None = None
        self._execute = tiered(self._whole_or_parts, tier, worker.runner)
        self._error: BaseException | None = None
        self.weights = WeightReader(worker)

    def submit(self, output: SchedulerOutput) -> StepResult:
        """Start a step; the result may arrive later, an exception is the result's."""
        return self._start(output)

    def _start(self, output: SchedulerOutput) -> StepResult:
        """Start a step; an exception, and that of an earlier step, is the result's."""
        if self._error is None:
            try:
                return self._execute(output)
            except BaseException as error:
                self._error = error
        failed: Future[ModelRunnerOutput] = Future()
        failed.set_exception(self._error)
        return failed

    def _whole_or_parts(self, output: SchedulerOutput) -> StepResult:
        """Start a step; in parts if it, or one before, was too large for the device's memory."""
        if self._parts is not None:
            return self._parts.execute(output)
        try:
            return self._worker.runner.execute(output)
        except StepTooLarge as error:
            parts: StepParts = imported("kvern.runner.step_parts:StepParts")(self._worker.runner.execute)
            self._parts = parts
            return parts.execute_again(output, error)

    def abandon(self) -> None:
        """Forget all steps, one of which failed: every request joins anew. Raises if no other step can run."""
        self._error = None
        if self.tier is not None:
            self.tier.abandon()
        self.forget()

    def forget(self) -> None:
        """Forget all steps, none of which failed: rows and blocks are free again."""
        self._worker.runner.abandon()

    def idle(self) -> bool:
        """Make one thing that steps would run faster with, while none runs; whether there are more."""
        return self._worker.runner.idle()

    def sleep(self) -> int:
        """Give back the memory of weights and caches until `wake`; what is cached is lost. Raises OSError.

        Returns the bytes that this process still takes of its GPU; 0 on a CPU.
        """
        self.weights.settle()
        if (chunked := self._worker.memory.chunked) is not None:
            map_blocks(self._worker.runner, chunked, chunked.least)
        return self._worker.sleeping.leave()

    def wake(self) -> None:
        """Take the memory again."""
        self._worker.sleeping.enter()
        self.release_pages(0)

    def map_cache(self, blocks: int) -> int:
        """Have memory behind the first blocks of the KV cache alone; returns how many have some. No step runs."""
        return map_blocks(self._worker.runner, self._worker.memory.chunked, blocks)

    def release_pages(self, size: int) -> None:
        """Give memory of so many bytes of the host back, of pages in a tier, and take no more until that is 0."""
        if self.tier is not None and self._worker.device.type == "cpu":  # a GPU's is pinned
            self.tier.release(size)

    def begin_counting(self) -> None:
        """The steps so far, which were for measurements, are no part of `count_experts`."""
        self._worker.begin_counting()

    def count_experts(self) -> "Callable[[], LayerCounts]":
        """Begin to read how many tokens each expert has had in all steps so far; what is returned may wait for them."""
        return self._worker.count_experts()

    @property
    def graph_tokens(self) -> int:
        """The most tokens of prompts of a step that a CUDA graph has; 0: no graph has any."""
        return self._worker.runner.graph_tokens

    def measured(self) -> list[MeasuredStep]:
        """The times of steps that were measured since the last call."""
        return [] if self._worker.times is None else self._worker.times.take()

    def prepare(self, grammar: str) -> "Future[None] | None":
        """Begin to make what following this grammar needs; None: it is there."""
        return self._worker.grammars.prepare(grammar)

    def read_adapter(self, path: str) -> "Adapter":
        """The adapter in a folder, checked; any thread may call this. Raises InvalidAdapter."""
        return self._worker.adapters.read(path)

    def add_adapter(self, key: int, adapter: "Adapter") -> None:
        """Keep an adapter that was read, for steps to load."""
        self._worker.adapters.add(key, adapter)

    def drop_adapter(self, key: int) -> None:
        """Forget an adapter."""
        self._worker.adapters.drop(key)

    def read_weights(self, version: str, sources: Sequence[WeightSource]) -> None:
        """Begin to read new weights beside those of steps; what was read before is dropped."""
        self.weights.begin(version, sources)

    def weights_found(self) -> WeightsFound | None:
        """The result of reading new weights, once; None: nothing new."""
        return self.weights.answer()

    def take_weights(self) -> None:
        """Let all later steps use the weights that were read; none is on its way."""
        self.weights.take()

    def drop_weights(self) -> None:
        """Forget the weights that are being read, or were read last."""
        self.weights.drop()


def start(
    config: EngineConfig, folder: Path, spec: ModelSpec, startup: Startup, draft: Path | None
) -> tuple[Executor, Layout]:
    """The executor of a single rank, with the model in `folder` loaded and its draft, and what it has room for.

    Raises KvernError subclasses.
    """
    worker = Worker(config, folder, spec, resolve_device(config), startup, draft)
    plan = agree([worker.probe()], config, spec)
    layout = lay_out([worker.load(plan)], plan, config)
    worker.build(layout)
    return Executor(worker, worker.make_tier(layout)), layout


def tiered(execute: Execute, tier: "Tier | None", runner: Runner, ranks: Ranks = ALONE) -> Execute:
    """`execute`, beside a tier of the runner's cache and its encoder of images, if there are any."""
    if tier is None and runner.embeddings is None:
        return execute
    from kvern.runner.tiered import EncodedSteps, TieredSteps, computing

    execute = computing(execute)
    if tier is not None:
        agree = None if ranks.processes == 1 else partial(least_of, ranks, runner)
        execute = TieredSteps(execute, tier, agree).execute
    return execute if runner.embeddings is None else EncodedSteps(execute, runner.embeddings, ranks).execute


def least_of(ranks: Ranks, runner: Runner, counts: list[int]) -> list[int]:
    """Returns the least of what all ranks have at each place."""
    found: list[int] = ranks.least(torch.tensor(counts, device=runner.caches[0].device)).tolist()
    return found
