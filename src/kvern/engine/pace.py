"""How long steps with decodes should take, and how long steps took: the clock beside the scheduler.

    head of the queue --> Pace.time --> Scheduler.schedule --> began --> ended: what the step cost is learnt
"""

import time
from collections import deque
from collections.abc import Callable

from kvern.engine.step_budget import StepTime
from kvern.engine.step_costs import StepCosts, load_of
from kvern.request import Request
from kvern.step import SchedulerOutput

SHARE_OF_WAIT = 0.1
"""Of the time that the first in the queue has waited, which a step may take."""


class Pace:
    """Keeps to `target`, the seconds that a step with decodes should take.

    With `yields` steps become longer as those that wait have waited longer: who has waited for a second gets steps of
    a tenth of that. So a crowd is served with large steps, which cost less for each token.

    Steps end in the order in which they began. How long one took is told by when the one before had ended.
    """

    def __init__(
        self, costs: StepCosts, target: float, yields: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.costs, self.target = costs, target
        self._yields, self._clock = yields, clock
        self._begun: deque[tuple[SchedulerOutput, float]] = deque()
        self._ended = 0.0

    def time(self, head: Request | None) -> StepTime:
        """What the next step should take, given who waits for it first."""
        seconds = self.target
        if self._yields and head is not None and not head.begun_at:
            seconds = max(seconds, SHARE_OF_WAIT * (self._clock() - head.arrived_at))
        return StepTime(self.costs, seconds)

    def began(self, output: SchedulerOutput) -> None:
        """A step was given to the executor, or is just about to be."""
        self._begun.append((output, self._clock()))

    def ended(self) -> None:
        """The result of the oldest step has come."""
        output, began = self._begun.popleft()
        began, self._ended = max(began, self._ended), self._clock()
        if any(item.count > (item.sampled or 1) for item in output.scheduled):
            self.costs.learn(load_of(output.scheduled), self._ended - began)

    def forget(self) -> None:
        """The steps on their way are lost."""
        self._begun.clear()
