"""How long steps with decodes should take, and how long steps took: the clock beside the scheduler.

head of the queue --> Pace.time --> Scheduler.schedule --> began --> ended: what the step cost is learnt
"""

import time
from collections import deque
from collections.abc import Callable

from kvern.engine.step_budget import StepTime
from kvern.engine.step_costs import StepCosts, StepLoad, load_of
from kvern.request import Request
from kvern.step import SchedulerOutput

SHARE_OF_WAIT = 0.1
"""Of the time that the first in the queue has waited, which a step may take."""
LEAD_SECONDS = 0.0012
"""From the launch of a step to its first kernel, at most; planning comes before."""


class Pace:
    """Keeps to `target`, the seconds that a step with decodes should take. Without `costs` there is no target.

    With `yields` steps become longer as those that wait have waited longer: who has waited for a second gets steps of
    a tenth of that. So a crowd is served with large steps, which cost less for each token.

    Steps end in the order in which they began. How long one took is told by when the one before had ended.
    """

    def __init__(
        self,
        costs: StepCosts | None = None,
        target: float = 0.0,
        yields: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.costs, self.target = costs, target
        self._yields, self._clock = yields, clock
        self._begun: deque[tuple[StepLoad | None, float]] = deque()
        """Loads of steps with prompts, None of others, and when they began."""
        self._asked = self._planning = self._ended = self._decoding = 0.0
        """When a step was planned last, how long that took, when a step ended, how long the last of decodes took."""

    def time(self, head: Request | None) -> StepTime | None:
        """What the next step should take, given who waits for it first."""
        if self.costs is None:
            return None
        self._asked = self._clock()
        seconds = self.target
        if self._yields and head is not None and not head.begun_at:
            seconds = max(seconds, SHARE_OF_WAIT * (self._asked - head.arrived_at))
        return StepTime(self.costs, seconds)

    def began(self, output: SchedulerOutput) -> None:
        """A step was planned and is about to be given to the executor."""
        if self.costs is not None:
            now = self._clock()
            self._planning = now - self._asked
            prompts = any(item.count > (item.sampled or 1) for item in output.scheduled)
            self._begun.append((load_of(output.scheduled) if prompts else None, now))

    def ended(self) -> None:
        """The result of the oldest step has come."""
        if self.costs is None:
            return
        load, began = self._begun.popleft()
        began, self._ended = max(began, self._ended), self._clock()
        if load is None:
            self._decoding = self._ended - began
        else:
            self.costs.learn(load, self._ended - began)

    def forget(self) -> None:
        """The steps on their way are lost."""
        self._begun.clear()

    @property
    def spare_seconds(self) -> float:
        """Until the one step on its way nears its end, and the next one must be planned and launched."""
        if self.costs is None or not self._begun:
            return 0.0
        load, began = self._begun[0]
        took = self._decoding if load is None else self.costs.seconds(load)
        ends = max(began, self._ended) + took
        return max(0.0, ends - LEAD_SECONDS - 2 * self._planning - self._clock())
