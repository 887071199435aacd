"""The target and the measured time of steps with decodes.

head of the queue --> Pace.time --> Scheduler.schedule --> began --> ended: the cost of the step is learnt
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from operator import sub
from typing import TYPE_CHECKING

from kvern.engine.step_budget import StepTime
from kvern.engine.step_drift import Bucket, StepDrift
from kvern.engine.step_load import StepLoad
from kvern.request.request import Request

if TYPE_CHECKING:
    from kvern.engine.step_costs import StepCosts

SHARE_OF_WAIT = 0.1
"""The share of the first request's waiting time that a step may take."""
LEAD_SECONDS = 0.0012
"""The most seconds from the launch of a step to its first kernel; planning comes before."""
LONGEST_REST = 0.02
"""A limit in seconds: a step with a longer prediction may have been the first of its kind."""
AT_ONCE = 0.0001
"""The seconds in which a result is returned that was ready before; the time when it became ready is unknown."""
REMEMBERED = 4
"""The number of steps with only decodes of which the shortest predicts the next."""
Begun = tuple[StepLoad | None, float, Bucket | None]
UNTIMED: Begun = (None, 0.0, None)
"""A step whose time nobody wants to know, nor when it ends."""


class Pace:
    """Keeps to `target`, the seconds between two tokens of a request; 0 is no target. Costs are learnt in any case.

    A request is in every step or, with pipeline `stages`, in one of so many steps, each of which begins when another
    ends.

    With `yields` steps become longer the longer requests wait: after a second of waiting steps may take a tenth of it.
    So many requests are served with large steps, which cost less for each token.

    Steps end in the order in which they began, so the time of one starts at the end of the one before. If another was
    launched meanwhile and a result was ready before it was awaited, its end is unknown: the step took less, and nothing
    is learnt from the next. `drift` is told of times that are known.
    """

    def __init__(
        self,
        costs: "StepCosts | None" = None,
        target: float = 0.0,
        yields: bool = False,
        clock: Callable[[], float] = time.monotonic,
        stages: int = 1,
        drift: StepDrift | None = None,
    ) -> None:
        self.costs = costs
        self.drift = drift
        self.target = target
        self._step_target = target / stages
        self._yields, self._clock = yields, clock
        self._begun: deque[Begun] = deque()
        """The loads of steps with prompts (None for others), the times when they began, and what `drift` is told."""
        self._asked = self._planning = self._awaited = self._ended = 0.0
        """The time of the last planning and its duration, of the last wait, and of the last end of a step."""
        self._launching = self._came = 0.0
        """The duration of the last launch of a step with a prompt in addition to others, and the time of the last
        result."""
        self._rested, self._exact = False, True
        self._until = 0
        """The number of steps before the next one that `drift` is told of; the end of the one before must be known."""
        self._decoding: deque[float] = deque([0.0] * REMEMBERED, REMEMBERED)
        """The durations of the last steps with only decodes."""

    def time(self, head: Request | None) -> StepTime | None:
        """Returns the target of the next step; `head` is the first waiting request."""
        if self.costs is None:
            return None
        self._asked = self._clock()
        if not self.target:
            return None
        seconds = self._step_target
        if self._yields and head is not None and not head.queue.begun_at:
            seconds = max(seconds, SHARE_OF_WAIT * (self._asked - head.queue.arrived_at))
        return StepTime(self.costs, seconds)

    def began(self, load: StepLoad, requests: Sequence[Request] = ()) -> None:
        """Notes that a step of these requests was planned and is about to be submitted."""
        bucket = None
        if self.drift is not None:
            self._until -= 1
            if self._until > 1 and self.costs is None:
                self._begun.append(UNTIMED)
                return
            if self._until <= 0:
                bucket = Bucket.of(load, requests)
                self._until = self.drift.interval(len(requests))
        elif self.costs is None:
            return
        now = self._clock()
        self._planning = now - self._asked
        self._begun.append((load if load.prompt or load.encoding else None, now, bucket))

    def awaits(self) -> None:
        """Notes that the result of the oldest step is about to be awaited, with the newest just launched."""
        if not self._begun or self._begun[0] is UNTIMED:
            return
        self._awaited = self._clock()
        load, began, _ = self._begun[-1] if len(self._begun) > 1 else UNTIMED
        if load is not None:
            self._launching = self._awaited - began

    def ended(self) -> None:
        """Learns from the step whose result has come."""
        if not self._begun:
            return
        step = self._begun.popleft()
        if step is UNTIMED:
            self._exact = False
            return
        load, began, bucket = step
        now, known = self._clock(), self._exact
        self._exact = not self._begun or now - self._awaited > AT_ONCE
        start, expected = max(began, self._ended), self._expected(load)
        took = now - start
        self._ended, self._came = now if self._exact else min(now, start + expected), now
        if bucket is not None and self.drift is not None and known and self._exact:
            self.drift.took(bucket, took, now)
        if load is not None and self.costs is not None:
            if known and (self._exact or took < expected):
                self.costs.learn(load, took)
        elif known and self._exact:
            self._decoding.append(took)
        elif self._rested and self._begun and self._begun[0][0] is None:  # the rest was too long
            self._decoding.append(min(self._decoding) / 2)
        self._rested = False

    def decoded(self, moments: Sequence[float]) -> None:
        """Notes what steps with only decodes have left behind that ended at known moments, from the second one on.

        The first moment is the end of the step before; each step began when the one before it ended.
        """
        if self.costs is None:
            return
        last = moments[-1 - REMEMBERED :]
        self._decoding.extend(map(sub, last[1:], last))
        self._asked = self._awaited = moments[-2]
        self._ended = self._came = moments[-1]
        if self._begun:
            self._begun[0] = None, moments[-2], None

    def _expected(self, load: StepLoad | None) -> float:
        return min(self._decoding) if load is None or self.costs is None else self.costs.seconds(load)

    def forget(self) -> None:
        """Forgets the steps in flight, which are lost."""
        self._begun.clear()

    def spare_seconds(self) -> float:
        """Returns the seconds until the next step must be planned and launched, near the end of the one in flight."""
        if self.costs is None or not self.target or not self._begun:
            return 0.0
        load, began, _ = self._begun[0]
        ends = max(began, self._ended) + min(self._expected(load), LONGEST_REST)
        # the result of the step in flight waits for the launch
        latest = self._came + self._step_target - self._launching
        spare = max(0.0, min(ends - LEAD_SECONDS - 2 * self._planning, latest) - self._clock())
        self._rested = self._rested or spare > 0
        return spare
