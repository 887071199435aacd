"""Tiers of the KV cache (`cache/tier.py`) in the worker: blocks are saved before a step and loaded after it."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from msgspec.structs import replace

from kvern.cache.messages import BlockLoad, BlockSave, ImageMessage, TierIndex, TierMessage
from kvern.config import EngineConfig
from kvern.plugins import Plugins
from kvern.ranks.ranks import Ranks
from kvern.request.step import ModelRunnerOutput, SchedulerOutput, StepResult
from kvern.runner.cached_model import EmbeddingSource
from kvern.runner.plan import Layout


class Tier(TierIndex, Protocol):
    """Decides which blocks are kept, and keeps their bytes.

    `caches` are those of this rank's layers, each [stored, blocks, block_size, heads, head_dim] with `stored` 2 (keys
    and values), or 1 for latents. Layers that share a cache are listed with the same tensor. The thread that runs the
    steps calls all methods, and none may raise: a step that raises has a request to blame. There is no call at the end
    of an engine. Settings come from the environment, by names that do not begin with KVERN_.

    A key has 16 bytes and already depends on the model, its number formats, the block size and the number of ranks.
    With several ranks each has a tier for its part of a block. The first rank's index decides for all; keys of the
    other ranks end in two bytes more, the rank. With DP attention each rank has a tier of whole blocks.
    """

    def save(self, caches: Sequence[torch.Tensor], saves: Sequence[BlockSave]) -> None:
        """Copies blocks out before the next step may change them.

        When this returns the copies have ended (CPU) or are on the current stream (GPU); what is done with the copy may
        take longer. If it fails later, the tier drops the key from its index: `lose` is called after failed steps only.
        """
        ...

    def load(self, caches: Sequence[torch.Tensor], loads: Sequence[BlockLoad]) -> None:
        """Begins to copy blocks in. The blocks of one load come together, in order.

        Another thread may go on with it: nobody reads the blocks until `finished` names the load. On a GPU the copies
        wait for the current stream, since steps in flight may read what the blocks had before.
        """
        ...

    def finished(self) -> list[tuple[int, int]]:
        """Returns the loads that have ended since the last call: (number, how many of its leading blocks have arrived).

        Each load is returned once, with 0 if nothing came. It is asked after each step, or about every millisecond
        without steps, while loads are on their way.
        """
        ...

    def abandon(self) -> None:
        """Gives up all loads, since steps have failed: when this returns, no load writes to blocks any more.

        Their keys were released before, and their numbers are not asked for again.
        """
        ...


NOT_ENDED = -1
"""In the place of the count of a load that is on its way."""

TIERS: Plugins[Callable[[EngineConfig, Layout], Tier]] = Plugins("tier of the KV cache", "kvern.kv_tiers", own={})
"""The tiers by the name that the option `kv_tier` gives; `own` has kvern's as `module:object`."""


class TieredSteps:
    """Runs steps through `execute`, with their messages to a tier and its reports."""

    def __init__(
        self, execute: Callable[[SchedulerOutput], StepResult], tier: Tier, caches: Sequence[torch.Tensor], ranks: Ranks
    ) -> None:
        self._execute = execute
        self._tier = tier
        self._caches = caches
        self._ranks = ranks
        self._counts: dict[int, int] = {}
        """How many leading blocks of each load have arrived; NOT_ENDED while it is on its way.

        The loads and their order are the same on all ranks, since steps alone change them.
        """

    def execute(self, output: SchedulerOutput) -> StepResult:
        """Start a step, which may have nothing to compute. Raises what `execute` raises."""
        message = output.message(TierMessage)
        if message is None and not self._counts:
            return self._execute(output)
        for number in () if message is None else message.ended:
            self._counts.pop(number, None)
        if message is not None and message.saves:
            self._tier.save(self._caches, [replace(save, key=self._ranks.own(save.key)) for save in message.saves])
        step = self._execute(output)
        if message is not None and message.loads:
            self._counts |= {load.load: NOT_ENDED for load in message.loads}
            self._tier.load(self._caches, [replace(load, key=self._ranks.own(load.key)) for load in message.loads])
        return Reported(step, TierMessage.extension, self._finished()) if self._counts else step

    def _finished(self) -> list[tuple[int, int]]:
        """The loads that have ended on all ranks, with the least of their counts."""
        self._counts |= {number: count for number, count in self._tier.finished() if number in self._counts}
        counts = list(self._counts.values())
        if self._ranks.processes > 1:
            counts = self._ranks.least(torch.tensor(counts, device=self._caches[0].device)).tolist()
        return [pair for pair in zip(self._counts, counts, strict=True) if pair[1] != NOT_ENDED]


class EncodedSteps:
    """Runs steps through `execute`, after what they encode, and reports what has been."""

    def __init__(self, execute: Callable[[SchedulerOutput], StepResult], source: EmbeddingSource, ranks: Ranks) -> None:
        self._execute = execute
        self._source = source
        self._ranks = ranks

    def execute(self, output: SchedulerOutput) -> StepResult:
        """Start a step, which may have nothing to compute. Raises what `execute` raises."""
        message = output.message(ImageMessage)
        if message is None:
            return self._execute(output)
        ended = self._source.prepare(message)
        if self._ranks.rank and (failed := [error for _, error in ended if error]):
            raise RuntimeError(failed[0])  # the first rank, which reports, does not know of it
        return Reported(self._execute(output), ImageMessage.extension, ended)


class Reported:
    """A step's result, with the report of an extension."""

    def __init__(self, step: StepResult, extension: str, report: object) -> None:
        self._step = step
        self._extension = extension
        self._report = report

    def result(self) -> ModelRunnerOutput:
        output = self._step.result()
        output.reports[self._extension] = self._report
        return output


def computing(execute: Callable[[SchedulerOutput], StepResult]) -> Callable[[SchedulerOutput], StepResult]:
    """`execute`, unless there is nothing to compute."""

    def compute(output: SchedulerOutput) -> StepResult:
        return execute(output) if output.scheduled else _Nothing()

    return compute


class _Nothing:
    """The result of a step that computed nothing."""

    def result(self) -> ModelRunnerOutput:
        return ModelRunnerOutput([], [], [])
