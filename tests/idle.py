"""Whether an engine has nothing left to do, and nothing left behind."""

from kvern import LLM, AsyncLLM


def is_idle(llm: LLM | AsyncLLM) -> bool:
    """Nothing runs, and every block is free or in the prefix tree."""
    engine = llm._engine
    scheduler, cache = engine.core.scheduler, engine.core.scheduler.cache
    scheduler.check_integrity()
    if engine.has_work or scheduler.running or scheduler.waiting or engine._members or engine._outputs._answers:
        return False
    assert cache.pool.free_count + cache.tree.size == cache.pool.capacity
    return True
