"""Whether an engine has nothing left to do, and nothing left behind."""

from kvern import LLM, AsyncLLM


def is_idle(llm: LLM | AsyncLLM) -> bool:
    """Nothing runs, and every block is free or can be made so."""
    engine = llm._engine
    scheduler, cache = engine.core.scheduler, engine.core.scheduler.cache
    scheduler.check_integrity()
    if engine.has_work or scheduler.running or scheduler.waiting or engine._members or engine._outputs._answers:
        return False
    assert cache.available_count == cache.pool.capacity
    return True
