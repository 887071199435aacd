"""Blocks that nobody has, filled with NaN before every step: whoever reads them cannot answer."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from kvern import LLM
from kvern.attention.memory import zero_caches
from kvern.cache.block_pool import BlockPool
from kvern.request.step import SchedulerOutput
from tests.support.internals import core_of


def spoiled_engine(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], LLM], runner: type[Any], backends: list[ModuleType]
) -> tuple[LLM, list[int]]:
    """An engine that `make` makes, and the blocks that were filled, which grow in number while it runs.

    Its steps are the `runner`'s, and its caches those of one of the `backends`. Blocks that a step copies before it
    computes are left as they are.
    """
    memory: list[torch.Tensor] = []
    pools: list[BlockPool] = []
    spoiled: list[int] = []
    execute = runner.execute

    def caches(*given: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        made = zero_caches(*given)
        memory.extend(made[0])
        return made

    def spoil_and_execute(self: Any, output: SchedulerOutput) -> Any:
        sources = {copy.source for copy in output.copies}
        for pool in pools:
            free = [block for block in range(pool.capacity) if not pool.references(block) and block not in sources]
            for blocks in memory:
                blocks[:, free] = float("nan")
            spoiled.extend(free)
        return execute(self, output)

    for backend in backends:
        monkeypatch.setattr(backend, "zero_caches", caches)
    monkeypatch.setattr(runner, "execute", spoil_and_execute)
    llm = make()
    pools.append(core_of(llm).scheduler.cache.pool)
    assert memory, "no backend asked for caches"
    return llm, spoiled
