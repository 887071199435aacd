"""A check that an engine has nothing left to do and has freed everything."""

from typing import Any

from kvern import LLM
from kvern.engine.core import EngineCore
from kvern.serving.dp_attention import DPAttentionCore
from tests.support.internals import core_of


def core_here(llm: LLM) -> EngineCore:
    """The engine's, or of ranks with requests of their own the first one's."""
    core: Any = core_of(llm)
    found: EngineCore = core._core if isinstance(core, DPAttentionCore) else core
    return found


def is_idle(llm: LLM) -> bool:
    """Nothing runs, and every block is free or can be made so."""
    engine, scheduler = llm._engine, core_here(llm).scheduler
    cache = scheduler.cache
    scheduler.check_integrity()
    if engine.has_work or scheduler.running or scheduler.waiting or engine._members or engine._outputs._answers:
        return False
    assert cache.available_count == cache.pool.capacity
    return True
