"""Many steps of one engine at once, where all rows decode and nothing is decided.

While nobody arrives, ends or waits, and blocks suffice, each step adds a token to each row. Such steps have their times
one by one, with the same random numbers, and their tokens together: whatever is decided later is as if they had been
made singly. With two steps in flight one is in flight before and after, too: the first of the steps is that one, and
the last takes its place.
"""

from collections.abc import Sequence

from kvern.engine.pace import Pace
from kvern.engine.scheduler import Scheduler
from kvern.engine.step_load import StepLoad
from kvern.request.request import Request
from kvern.simulate.executor import SimulatedExecutor, VirtualClock
from kvern.simulate.timeline import Timeline

LEAST_STEPS = 2
"""Fewer are made singly."""
MOST_FLYING = 2
"""Steps in flight of an engine that leaps."""


class Leaps:
    """Makes the leaps of an engine with `depth` steps in flight, 1 or 2. `pace`: None without a target."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: SimulatedExecutor,
        timeline: Timeline,
        clock: VirtualClock,
        depth: int = 1,
        pace: Pace | None = None,
    ) -> None:
        self.steps = 0
        """The steps of all leaps."""
        self._scheduler, self._executor = scheduler, executor
        self._timeline, self._clock = timeline, clock
        self._depth, self._pace = depth, pace

    def leap(self, until: float) -> bool:
        """Makes the steps that end before a moment, as far as nothing is decided; False: there are none."""
        executor = self._executor
        if len(executor.flying) != self._depth - 1:
            return False
        running = list(self._scheduler.running)
        flying = executor.flying[0] if executor.flying else None
        if flying is not None and len(flying.output.scheduled) != len(running):
            return False
        most = self._most(running)
        if most < LEAST_STEPS:
            return False
        keys = sum(request.num_computed_tokens + 1 for request in running)
        reach = max(request.num_computed_tokens for request in running) + 1
        moments = executor.decode(StepLoad(len(running), keys, reach=reach), most, until)
        if moments:
            self.steps += len(moments)
            self._grow(running, len(moments))
            if flying is not None:
                flying.move(len(moments), self._scheduler.step)
            if self._pace is not None:
                self._tell(self._pace, moments)
            self._clock.reach(moments[-1])
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
            if request.in_flight != self._depth - 1 or not request.output_length or request.remaining_tokens != 1:
                return 0
            most = min(most, request.max_tokens - request.output_length - 1)
        # A request that lost its row may find the end of what it had cached, whose block becomes free in a step.
        room = scheduler.cache.pool.free_count if scheduler.preemption_count else scheduler.cache.available_count
        while most >= LEAST_STEPS and self._lacking(running, most) > room:
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
        scheduler.cache.completed(scheduler.step - self._depth + 1)

    def _tell(self, pace: Pace, moments: Sequence[float]) -> None:
        """Tells the pace of each step what the core would."""
        for moment in moments:
            pace.time(None)
            pace.began(StepLoad())
            pace.awaits()
            self._clock.reach(moment)
            pace.ended()
