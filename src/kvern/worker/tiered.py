"""The worker's side of a tier (`cache/tier.py`): bytes of blocks go to it before a step, and come back behind one."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from kvern.cache.tier import KVTier
from kvern.config import EngineConfig
from kvern.plugins import Plugins
from kvern.step import BlockLoad, BlockSave, ModelRunnerOutput, SchedulerOutput, StepResult
from kvern.worker.plan import Layout


class Tier(KVTier, Protocol):
    """Decides what is kept, and keeps it. `caches` are those of all layers, [2, blocks, block_size, heads, head_dim].

    What it starts on the device comes behind the steps that were started before, and before all later ones.
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
"""By the name that the option `kv_tier` gives."""


class TieredSteps:
    """Runs steps through `execute`, with what they have to say to a tier."""

    def __init__(
        self, execute: Callable[[SchedulerOutput], StepResult], tier: Tier, caches: Sequence[torch.Tensor]
    ) -> None:
        self._execute, self._tier, self._caches = execute, tier, caches

    def execute(self, output: SchedulerOutput) -> StepResult:
        """Start a step, which may have nothing to compute. Raises what `execute` raises."""
        if output.saves:
            self._tier.save(self._caches, output.saves)
        step = self._execute(output) if output.scheduled else _Nothing()
        return _Loaded(step, self._tier.load(self._caches, output.loads)) if output.loads else step


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
        output.loaded = self._loaded
        return output
