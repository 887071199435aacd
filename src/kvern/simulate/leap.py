"""Many steps of one engine at once, where all rows decode and nothing is decided.

While nobody arrives, ends or waits, and free blocks suffice, each step adds a token to each row. Such steps have their
times one by one, with the same random numbers, and their tokens together: whatever is decided later is as if they had
been made singly.
"""

from collections.abc import Sequence

from kvern.engine.scheduler import Scheduler
from kvern.engine.step_load import StepLoad
from kvern.request.request import Request
from kvern.simulate.executor import SimulatedExecutor
from kvern.simulate.timeline import Timeline

LEAST_STEPS = 2
"""Fewer are made singly."""


class Leaps:
    """Makes the leaps of an engine with one step in flight and no target of the time between tokens."""

    def __init__(self, scheduler: Scheduler, executor: SimulatedExecutor, timeline: Timeline) -> None:
        self.steps = 0
        """The steps of all leaps."""
        self._scheduler, self._executor = scheduler, executor
        self._timeline = timeline

    def leap(self, until: float) -> bool:
        """Makes the steps that end before a moment, as far as nothing is decided; False: there are none."""
        running = list(self._scheduler.running)
        most = self._most(running)
        if most < LEAST_STEPS:
            return False
        keys = sum(request.num_computed_tokens + 1 for request in running)
        reach = max(request.num_computed_tokens for request in running) + 1
        moments = self._executor.decode(StepLoad(len(running), keys, reach=reach), most, until)
        if moments:
            self.steps += len(moments)
            self._grow(running, len(moments))
            self._timeline.leapt(moments, [request.request_id for request in running])
        return bool(moments)

    def _most(self, running: Sequence[Request]) -> int:
        """Returns how many steps decide nothing, at most."""
        scheduler = self._scheduler
        rows = len(running)
        if not rows or scheduler.waiting or not scheduler.limits.continuous or rows > scheduler.limits.max_batch_tokens:
            return 0
        most = 1 << 30
        for request in running:
            if request.in_flight or not request.output_length or request.remaining_tokens != 1:
                return 0
            most = min(most, request.max_tokens - request.output_length - 1)
        while most >= LEAST_STEPS and self._lacking(running, most) > scheduler.cache.pool.free_count:
            most //= 2
        return most

    def _lacking(self, running: Sequence[Request], steps: int) -> int:
        """Returns the blocks that requests lack for so many steps."""
        needed = self._scheduler.cache.blocks_for
        return sum(max(0, needed(each.num_computed_tokens + steps) - len(each.block_ids)) for each in running)

    def _grow(self, running: Sequence[Request], steps: int) -> None:
        """Gives requests the tokens and blocks of so many steps."""
        scheduler = self._scheduler
        scheduler.step += steps
        for request in running:
            if scheduler.cache.extend(request, request.num_computed_tokens + steps):
                scheduler.running.grew(request)
            request.num_computed_tokens += steps
            request.token_ids.extend([request.spec.seed] * steps)
            scheduler.cache.publish(request, scheduler.step)
        scheduler.cache.completed(scheduler.step)
