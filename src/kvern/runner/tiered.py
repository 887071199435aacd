"""The worker's side of a tier (`cache/tier.py`): bytes of blocks go to it before a step, and come back after one."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from msgspec.structs import replace

from kvern.cache.tier import BlockLoad, BlockSave, KVTier, TierMessage
from kvern.config import EngineConfig
from kvern.plugins import Plugins
from kvern.ranks.ranks import ALONE, Ranks
from kvern.request.step import ModelRunnerOutput, SchedulerOutput, StepResult
from kvern.runner.loaded_model import Runner
from kvern.runner.plan import Layout


class Tier(KVTier, Protocol):
    """Decides what is kept, and keeps it. `caches` are those of all layers, [2, blocks, block_size, heads, head_dim].

    What it starts on the device comes behind the steps that were started before, and before all later ones. Each of
    several ranks has one, for its part of the blocks: they are asked the same in the same order, the first one decides,
    and the others' keys are longer. In DP attention each has one of its own, with whole blocks.
    """

    def save(self, caches: Sequence[torch.Tensor], saves: Sequence[BlockSave]) -> None:
        """Begin to copy blocks out; the copies read what the next step may change, so they come before it."""
        ...

    def load(self, caches: Sequence[torch.Tensor], loads: Sequence[BlockLoad]) -> None:
        """Begin to copy blocks in, after the steps that were started."""
        ...

    def finished(self) -> list[tuple[int, int]]:
        """Loads that have ended since the last call: (number of a load, how many of its leading blocks have arrived).

        Whatever fails is a lower number, never an exception: a step that raises has a request to blame.
        """
        ...

    def abandon(self) -> None:
        """Steps have failed: when this returns, no load writes to blocks any more."""
        ...


NOT_ENDED = -1
"""In the place of the count of a load that is on its way."""

TIERS: Plugins[Callable[[EngineConfig, Layout], Tier]] = Plugins("tier of the KV cache", "kvern.kv_tiers")
"""The tiers, by the name that the option `kv_tier` gives."""


def make_tier(config: EngineConfig, layout: Layout) -> Tier | None:
    """The tier of the configuration. Raises ConfigError."""
    return None if config.kv_tier is None else TIERS.find(config.kv_tier)(config, layout)


def tiered(
    execute: Callable[[SchedulerOutput], StepResult],
    tier: Tier | None,
    runner: Runner,
    ranks: Ranks = ALONE,
) -> Callable[[SchedulerOutput], StepResult]:
    """`execute`, beside a tier of the runner's cache if there is one."""
    return execute if tier is None else TieredSteps(execute, tier, runner.caches, ranks).execute


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
        step = self._execute(output) if output.scheduled else _Nothing()
        if message is not None and message.loads:
            self._counts |= {load.load: NOT_ENDED for load in message.loads}
            self._tier.load(self._caches, [replace(load, key=self._ranks.own(load.key)) for load in message.loads])
        return _Reported(step, self._finished()) if self._counts else step

    def _finished(self) -> list[tuple[int, int]]:
        """The loads that have ended on all ranks, with the least of their counts."""
        self._counts |= {number: count for number, count in self._tier.finished() if number in self._counts}
        counts = list(self._counts.values())
        if self._ranks.processes > 1:
            counts = self._ranks.least(torch.tensor(counts, device=self._caches[0].device)).tolist()
        return [pair for pair in zip(self._counts, counts, strict=True) if pair[1] != NOT_ENDED]


class _Nothing:
    """The result of a step that computed nothing."""

    def result(self) -> ModelRunnerOutput:
        return ModelRunnerOutput([], [], [])


class _Reported:
    """A step's result, with the loads that have ended."""

    def __init__(self, step: StepResult, ended: list[tuple[int, int]]) -> None:
        self._step, self._ended = step, ended

    def result(self) -> ModelRunnerOutput:
        output = self._step.result()
        if self._ended:
            output.reports[TierMessage.extension] = self._ended
        return output
