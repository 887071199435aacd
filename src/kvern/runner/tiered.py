"""The worker's side of a tier (`cache/tier.py`): bytes of blocks go to it before a step, and come back behind one."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from msgspec.structs import replace

from kvern.cache.tier import BlockLoad, BlockSave, KVTier, TierMessage
from kvern.config import EngineConfig
from kvern.plugins import Plugins
from kvern.ranks.ranks import ALONE, Ranks
from kvern.request.step import ModelRunnerOutput, SchedulerOutput, StepResult
from kvern.runner.contents import Runner
from kvern.runner.plan import Layout


class Tier(KVTier, Protocol):
    """Decides what is kept, and keeps it. `caches` are those of all layers, [2, blocks, block_size, heads, head_dim].

    What it starts on the device comes behind the steps that were started before, and before all later ones. Each of
    several ranks has one, for its part of the blocks: they are asked the same in the same order, the first one decides,
    and the others' keys are longer. In DP attention each has one of its own, with whole blocks.
    """

    def save(self, caches: Sequence[torch.Tensor], saves: Sequence[BlockSave]) -> None:
        """Copy blocks out, which the next step may overwrite."""
        ...

    def load(self, caches: Sequence[torch.Tensor], loads: Sequence[BlockLoad]) -> list[tuple[int, int]]:
        """Copy blocks in: (number of a load, how many of its blocks, from the first on, could be had).

        Whatever fails is a lower number, never an exception: a step that raises has a request to blame.
        """
        ...


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
    """Runs steps through `execute`, with what they have to say to a tier."""

    def __init__(
        self, execute: Callable[[SchedulerOutput], StepResult], tier: Tier, caches: Sequence[torch.Tensor], ranks: Ranks
    ) -> None:
        self._execute, self._tier, self._caches, self._ranks = execute, tier, caches, ranks

    def execute(self, output: SchedulerOutput) -> StepResult:
        """Start a step, which may have nothing to compute. Raises what `execute` raises."""
        message = output.message(TierMessage)
        if message is not None and message.saves:
            self._tier.save(self._caches, [replace(save, key=self._ranks.own(save.key)) for save in message.saves])
        step = self._execute(output) if output.scheduled else _Nothing()
        return step if message is None or not message.loads else _Loaded(step, self._load(message.loads))

    def _load(self, loads: Sequence[BlockLoad]) -> list[tuple[int, int]]:
        """Load blocks; returns (number of a load, how many of its first blocks all ranks could have)."""
        loaded = self._tier.load(self._caches, [replace(load, key=self._ranks.own(load.key)) for load in loads])
        if self._ranks.processes == 1:
            return loaded
        counts = {load.load: 0 for load in loads} | dict(loaded)
        found = self._ranks.least(torch.tensor([*counts.values()], device=self._caches[0].device))
        return [*zip(counts, found.tolist(), strict=True)]


class _Nothing:
    """The result of a step that computed nothing."""

    def result(self) -> ModelRunnerOutput:
        return ModelRunnerOutput([], [], [])


class _Loaded:
    """A step's result, and what was loaded behind it."""

    def __init__(self, step: StepResult, loaded: list[tuple[int, int]]) -> None:
        self._step, self._loaded = step, loaded

    def result(self) -> ModelRunnerOutput:
        output = self._step.result()
        output.reports[TierMessage.extension] = self._loaded
        return output
