"""How long steps with decodes should take, and how long steps took: the clock beside the scheduler.

head of the queue --> Pace.time --> Scheduler.schedule --> began --> ended: what the step cost is learnt
"""

import time
from collections import deque
from collections.abc import Callable

from kvern.engine.step_budget import StepTime
from kvern.engine.step_costs import StepCosts, StepLoad, load_of
from kvern.request.request import Request
from kvern.request.step import SchedulerOutput

SHARE_OF_WAIT = 0.1
"""Of the time that the first in the queue has waited, which a step may take."""
LEAD_SECONDS = 0.0012
"""From the launch of a step to its first kernel, at most; planning comes before."""
LONGEST_REST = 0.02
"""Seconds: a step that is thought to take longer may have been the first of its kind."""
AT_ONCE = 0.0001
"""Seconds in which a result is had that was there already: nobody knows since when."""
REMEMBERED = 4
"""Steps of decodes alone, of which the shortest tells what the next will take."""


class Pace:
    """Keeps to `target`, the seconds between two tokens of a request. Without `costs` there is no target.

    A request is in every step, or of a model in `stages` in one of so many, each of which begins when another ends.

    With `yields` steps become longer as those that wait have waited longer: who has waited for a second gets steps of
    a tenth of that. So a crowd is served with large steps, which cost less for each token.

    Steps end in the order in which they began. How long one took is told by when the one before had ended. If another
    was launched meanwhile, and a result was there before it was awaited, it is not known when: the step took less, and
    of the next nothing is learnt.
    """

    def __init__(
        self,
        costs: StepCosts | None = None,
        target: float = 0.0,
        yields: bool = False,
        clock: Callable[[], float] = time.monotonic,
        stages: int = 1,
    ) -> None:
        self.costs, self.target, self._step_target = costs, target, target / stages
        self._yields, self._clock = yields, clock
        self._begun: deque[tuple[StepLoad | None, float]] = deque()
        """Loads of steps with prompts, None of others, and when they began."""
        self._asked = self._planning = self._awaited = self._ended = 0.0
        """When a step was planned last and how long that took, when a result was awaited, and when one ended."""
        self._launching = self._came = 0.0
        """How long it took to launch the last step with a prompt beside others, and when a result came."""
        self._rested, self._exact = False, True
        self._decoding: deque[float] = deque([0.0] * REMEMBERED, REMEMBERED)
        """How long the last steps of decodes alone took."""

    def time(self, head: Request | None) -> StepTime | None:
        """What the next step should take, given who waits for it first."""
        if self.costs is None:
            return None
        self._asked = self._clock()
        seconds = self._step_target
        if self._yields and head is not None and not head.queue.begun_at:
            seconds = max(seconds, SHARE_OF_WAIT * (self._asked - head.queue.arrived_at))
        return StepTime(self.costs, seconds)

    def began(self, output: SchedulerOutput) -> None:
        """A step was planned and is about to be given to the executor."""
        if self.costs is not None:
            now = self._clock()
            self._planning = now - self._asked
            prompts = any(item.count > (item.sampled or 1) for item in output.scheduled)
            self._begun.append((load_of(output.scheduled) if prompts else None, now))

    def awaits(self) -> None:
        """The result of the oldest step is about to be waited for, with the newest just launched."""
        self._awaited = self._clock()
        load, began = self._begun[-1] if len(self._begun) > 1 else (None, 0.0)
        if load is not None:
            self._launching = self._awaited - began

    def ended(self) -> None:
        """It has come."""
        if self.costs is None:
            return
        load, began = self._begun.popleft()
        now, known = self._clock(), self._exact
        self._exact = not self._begun or now - self._awaited > AT_ONCE
        start, expected = max(began, self._ended), self._expected(load)
        took = now - start
        self._ended, self._came = now if self._exact else min(now, start + expected), now
        if load is not None:
            if known and (self._exact or took < expected):
                self.costs.learn(load, took)
        elif known and self._exact:
            self._decoding.append(took)
        elif self._rested and self._begun and self._begun[0][0] is None:  # the rest was too long
            self._decoding.append(min(self._decoding) / 2)
        self._rested = False

    def _expected(self, load: StepLoad | None) -> float:
        return min(self._decoding) if load is None or self.costs is None else self.costs.seconds(load)

    def forget(self) -> None:
        """The steps on their way are lost."""
        self._begun.clear()

    def spare_seconds(self) -> float:
        """Until the one step on its way nears its end, and the next one must be planned and launched."""
        if self.costs is None or not self._begun:
            return 0.0
        load, began = self._begun[0]
        ends = max(began, self._ended) + min(self._expected(load), LONGEST_REST)
        # The result of the step on its way waits for the launch.
        latest = self._came + self._step_target - self._launching
        spare = max(0.0, min(ends - LEAD_SECONDS - 2 * self._planning, latest) - self._clock())
        self._rested = self._rested or spare > 0
        return spare
