"""Many steps of one engine at once, where all rows decode and nothing is decided.

While nobody arrives, ends or waits, and blocks suffice, each step adds a token to each row. Such steps have their times
one by one, with the same random numbers, and their tokens together: whatever is decided later is as if they had been
made singly. With two steps in flight one is in flight before and after, too: the first of the steps is that one, and
the last takes its place.

    look --> when the steps will end --settle(moment)--> those that ended before are made; the others are forgotten

Nobody who gives requests has to look at an engine between the two: no request begins or ends in such steps.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvern.engine.pace import AT_ONCE, Pace
from kvern.engine.scheduler import Scheduler
from kvern.engine.step_load import StepLoad
from kvern.request.request import Request
from kvern.simulate.executor import SimulatedExecutor, VirtualClock
from kvern.simulate.timeline import Timeline

if TYPE_CHECKING:
    from kvern.simulate.executor import Seconds

LEAST_STEPS = 2
"""Fewer are made singly."""
MOST_STEPS = 256
"""Steps that are looked at together, at most."""
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
        self.ends: Seconds = np.empty(0)
        """The ends of steps that were looked at and not made yet."""
        self.evicted = 0
        """The blocks that these take from what is only cached, at most."""
        self._running: list[Request] = []
        self._scheduler, self._executor = scheduler, executor
        self._timeline, self._clock = timeline, clock
        self._depth, self._pace = depth, pace

    def leap(self, until: float) -> bool:
        """Makes the steps that end before a moment, as far as nothing is decided; False: there are none."""
        return self.look() is not None and self.settle(until) > 0

    def look(self) -> float | None:
        """Returns when the last step will have ended before something is decided; None: something is now."""
        executor = self._executor
        running = list(self._scheduler.running)
        if not running or len(executor.flying) != self._depth - 1:
            return None
        if executor.flying and len(executor.flying[0].output.scheduled) != len(running):
            return None
        if executor.flying and executor.flying[0].is_launched:
            return None
        most = self._most(running)
        if most < LEAST_STEPS:
            return None
        computed = [request.num_computed_tokens for request in running]
        load = StepLoad(len(running), sum(computed) + len(running), reach=max(computed) + 1)
        self._running, self.ends = running, executor.look(load, most)
        return float(self.ends[-1])

    def settle(self, until: float) -> int:
        """Makes the steps that were looked at and end before a moment; returns how many these are."""
        executor, running = self._executor, self._running
        ends = self.ends
        count = int(np.searchsorted(ends, until))
        executor.take(count)
        self.ends = ends[:0]
        if count:
            moments, gaps = ends[:count].tolist(), ends[1:count] - ends[: count - 1]
            self.steps += count
            self._grow(running, count)
            if executor.flying:
                executor.flying[0].move(count, self._scheduler.step)
            if self._pace is not None:
                self._tell(self._pace, moments, gaps)
            self._clock.reach(moments[-1])
            self._timeline.leapt(moments[0], moments[-1], gaps, [request.request_id for request in running])
        return count

    def _most(self, running: Sequence[Request]) -> int:
        """Returns how many steps decide nothing, at most."""
        scheduler = self._scheduler
        rows, flying = len(running), self._depth - 1
        if scheduler.waiting or not scheduler.limits.continuous or rows > scheduler.limits.max_batch_tokens:
            return 0
        most = MOST_STEPS
        for request in running:
            known = len(request.token_ids)
            answered = known - request.prompt_length
            if request.in_flight != flying or not answered or known + flying - request.num_computed_tokens != 1:
                return 0
            most = min(most, request.max_tokens - answered - 1)
        # A request that lost its row may find the end of what it had cached, whose block becomes free in a step, and
        # one whose answer another prompt has already meets blocks that a step would not evict.
        free = scheduler.cache.pool.free_count
        meets = scheduler.preemption_count or any(not each.nodes or each.nodes[-1].children for each in running)
        room = free if meets else scheduler.cache.available_count
        while most >= LEAST_STEPS and (lacking := self._lacking(running, most)) > room:
            most //= 2
        self.evicted = 0 if most < LEAST_STEPS else max(0, lacking - free)
        return most

    def _lacking(self, running: Sequence[Request], steps: int) -> int:
        """Returns the blocks that requests lack for so many steps."""
        size = self._scheduler.cache.block_size
        return sum(max(0, -(-(each.num_computed_tokens + steps) // size) - len(each.block_ids)) for each in running)

    def _grow(self, running: Sequence[Request], steps: int) -> None:
        """Gives requests the tokens and blocks of so many steps."""
        scheduler = self._scheduler
        size = scheduler.cache.block_size
        scheduler.step += steps
        for request in running:
            tokens = request.num_computed_tokens + steps
            if tokens > len(request.block_ids) * size:
                blocks = scheduler.cache.extend(request, tokens)
                assert blocks, "a leap begins with blocks for all its steps"
                scheduler.running.grew(request)
            request.num_computed_tokens = tokens
            request.token_ids.extend([request.spec.seed] * steps)
            if tokens // size > len(request.nodes):
                scheduler.cache.publish(request, scheduler.step)
        scheduler.cache.completed(scheduler.step - self._depth + 1)

    def _tell(self, pace: Pace, moments: Sequence[float], gaps: "Seconds") -> None:
        """Tells the pace of each step what the core would."""
        known = len(moments) > self._depth and gaps.min() > AT_ONCE
        told = moments[: self._depth] if known else moments
        for moment in told:
            pace.time(None)
            pace.began(StepLoad())
            pace.awaits()
            self._clock.reach(moment)
            pace.ended()
        if len(told) < len(moments):
            pace.decoded(moments[len(told) - 1 :])
