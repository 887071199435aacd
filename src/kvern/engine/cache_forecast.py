"""The memory of a KV cache that changes: what requests hold of it, and what they will probably need."""

import statistics
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING

from kvern.engine.scheduler import Scheduler
from kvern.request.events import EngineStatistics
from kvern.request.request import Request

if TYPE_CHECKING:
    from kvern.runner.executor import Executor

INTERVAL = 0.25
"""The least seconds between two forecasts."""


class CacheForecast:
    """Counts in chunks what a server has to know to divide memory among its models."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._next = clock()

    def report(self, counted: EngineStatistics) -> None:
        """Write how many chunks the cache has, how many requests hold, and how many they will need."""
        memory = self._scheduler.cache.memory
        counted.cache_chunks, counted.cache_touched = memory.chunks, memory.touched_chunks
        if (now := self._clock()) < self._next:
            return
        self._next = now + INTERVAL
        held = round(self._scheduler.cache.usage * memory.capacity)
        counted.cache_held = -(-held // memory.chunk)
        blocks = held + forecast_blocks(self._scheduler)
        counted.cache_wanted = min(-(-blocks // memory.chunk), memory.most_chunks)


def resize_cache(scheduler: Scheduler, executor: "Executor", chunks: int) -> int:
    """Have so many chunks, or more if others are in use; no step runs. Returns `chunks` if a GPU had no memory for as
    many, else 0."""
    memory = scheduler.cache.memory
    if chunks <= memory.chunks:
        scheduler.resize(chunks)
        executor.map_cache(memory.capacity)
    else:
        scheduler.resize(-(-executor.map_cache(memory.blocks_in(chunks)) // memory.chunk))
    return chunks if memory.chunks < chunks else 0


def forecast_blocks(scheduler: Scheduler) -> int:
    """Returns the blocks that requests lack to their ends: the number that runs times the median of what remains.

    An answer is taken to be as long as half of the last ones were, or as it may be, if that is less.
    """
    running = list(scheduler.running)
    waiting = list(islice(scheduler.waiting, max(0, scheduler.limits.max_batch_requests - len(running))))
    if not running and not waiting:
        return 0
    usual = statistics.median(scheduler.lengths) if scheduler.lengths else None

    def remaining(request: Request) -> float:
        most = request.max_tokens - request.output_length
        return most if usual is None else min(most, usual)

    each = statistics.median(map(remaining, [*running, *waiting]))
    tokens = sum(len(request.token_ids) for request in waiting) + (len(running) + len(waiting)) * each
    return scheduler.cache.blocks_for(round(tokens)) * sum(scheduler.cache.tables)
