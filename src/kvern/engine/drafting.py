"""Drafts for requests, as many as are worth a step's time.

    step with drafts --ended--> what a row costs, how often drafts of a request are right --propose--> Proposer

A draft costs a row of the next step, and gives a token if it and all before it are right. Without drafts a step of N
requests gives N tokens. So the k-th draft is worth its row if its chance exceeds what a row costs, as a share of what a
token costs: `acceptance ** k > row * N / step`. Both are learnt as steps return.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from kvern.engine.draft_costs import DraftCosts
from kvern.engine.draft_room import Wanted
from kvern.engine.proposer import Proposer, takes_drafts
from kvern.errors import shown
from kvern.request import Request, State
from kvern.step import SchedulerOutput

logger = logging.getLogger("kvern")

MOST = 16
"""Drafts of a request in a step."""
KEPT = 0.98
"""Of the weight of what earlier steps took, by each that follows."""
KEPT_OF_REQUEST = 0.9
"""Of the weight of what became of a request's earlier drafts, by each step with others."""
FIRST_SHARE = 0.25
"""What a row is taken to cost, as a share of a step with one request, before steps of other sizes were seen."""
LONGEST = 5.0
"""Times the mean: a step that takes longer was held up by something else, unless `MOST_LONG` before it were, too."""
LEAST_VARIANCE, LEAST_SPREAD = 0.1, 0.1
"""Of the rows of steps, the latter as a share of their mean: among steps of one size nobody sees what a row costs."""
MOST_LONG = 4
PROBED = 64
"""Tokens after which a request whose drafts were not worth their rows gets one again."""


class StepTimes:
    """What steps without prompts take, as a line: `base + row * rows`, of which later steps count for more."""

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._squares = self._products = 0.0
        self._long = 0
        """Steps in a row that were held up."""
        self.row: float | None = None
        """What a row costs, as long as nobody knows it better; None: all steps were of one size."""

    def add(self, rows: float, seconds: float) -> None:
        """A step of so many tokens took so long."""
        most = math.inf
        if self._weight > 1:
            most = LONGEST * self._seconds / self._weight * max(1.0, rows / self._mean_rows)
        self._long = self._long + 1 if seconds > most else 0
        if 0 < self._long <= MOST_LONG:
            return
        for name, value in (
            ("_weight", 1.0),
            ("_rows", rows),
            ("_seconds", seconds),
            ("_squares", rows * rows),
            ("_products", rows * seconds),
        ):
            setattr(self, name, KEPT * getattr(self, name) + value)

    @property
    def _mean_rows(self) -> float:
        return self._rows / self._weight

    def seconds_of(self, rows: float) -> float:
        """What a step of so many rows takes; 0: there was none."""
        if self._weight == 0:
            return 0.0
        mean, seconds = self._mean_rows, self._seconds / self._weight
        variance = self._squares / self._weight - mean * mean
        if variance >= max(LEAST_VARIANCE, (LEAST_SPREAD * mean) ** 2):
            self.row = max(0.0, (self._products / self._weight - mean * seconds) / variance)
        row = self.row or 0.0
        return max(seconds + row * (rows - mean), row * rows)

    def share_of_row(self, requests: int) -> float:
        """What a row costs, as a share of what a token costs in a step of so many requests without drafts."""
        step = self.seconds_of(requests)
        return FIRST_SHARE if self.row is None or step == 0 else self.row * requests / step


class Drafting:
    """Has a `proposer` guess, or the device, and learns from steps, in the order in which they were submitted.

    A proposer that raises, or guesses anything but token ids below `vocab_size`, is not asked again.
    """

    def __init__(
        self,
        proposer: Proposer | None,
        vocab_size: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """None: the device guesses."""
        self._proposer, self._on_device = proposer, proposer is None
        self._vocab_size, self._clock = vocab_size, clock
        self._times = StepTimes()
        self._costs = DraftCosts(self._times, StepTimes())
        self._begun: deque[float] = deque()
        self._ended = 0.0

    def began(self) -> None:
        """A step was submitted."""
        self._begun.append(self._clock())

    def forget(self) -> None:
        """Steps in flight are abandoned."""
        self._begun.clear()

    def ended(
        self,
        output: SchedulerOutput,
        requests: Sequence[Request],
        kept: Sequence[Sequence[int]],
        drafting_seconds: float = 0.0,
    ) -> tuple[int, int]:
        """The oldest step returned, with these tokens for its requests: its drafts, and how many were right.

        `drafting_seconds`: what guessing behind it took on the device.
        """
        if not self._begun:
            return 0, 0  # it was submitted before anybody guessed
        begun, now = self._begun.popleft(), self._clock()
        seconds, self._ended = now - max(begun, self._ended), now
        if all(item.count == item.sampled for item in output.scheduled):
            self._times.add(output.token_count, seconds - drafting_seconds)
            self._costs.learn(output.scheduled, seconds, drafting_seconds)
        drafts = accepted = 0
        for item, request, token_ids in zip(output.scheduled, requests, kept, strict=True):
            if item.sampled > 1 and token_ids:
                right = len(token_ids) - 1
                drafts += item.sampled - 1
                accepted += right
                request.drafts_right = KEPT_OF_REQUEST * request.drafts_right + right
                request.drafts_wrong = KEPT_OF_REQUEST * request.drafts_wrong + (right < item.sampled - 1)
                self._costs.verified(right, right < item.sampled - 1)
        return drafts, accepted

    def propose(self, requests: Iterable[Request], running: int) -> None:
        """Guess how requests go on that got tokens, in an engine that runs so many."""
        if self._on_device:
            for request in requests:
                if request.state is State.FINISHED:
                    self._costs.answered(request.output_length)
            return
        going = [request for request in requests if request.state is not State.FINISHED and takes_drafts(request)]
        counts = self.most(going, running)
        most = [count and count + request.in_flight for request, count in zip(going, counts, strict=True)]
        for request, drafts in zip(going, self._guesses(going, most), strict=True):
            request.draft_token_ids = drafts

    def wanted(self, running: int) -> Wanted | None:
        """How many drafts the device should guess in an engine that runs so many; None: nobody does there."""
        return self._costs.wanted(max(1, running)) if self._on_device else None

    def _guesses(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        """What the proposer says: token ids alone, as kernels read rows of tables by them."""
        try:
            if self._proposer is not None:
                found = self._proposer.propose(requests, most)
                return [self._checked(drafts[:count]) for drafts, count in zip(found, most, strict=True)]
        except Exception:
            self._proposer = None
            logger.exception("the proposer fails and is not asked again; answers go on without drafts")
        return [[] for _ in requests]

    def _checked(self, drafts: Sequence[int]) -> list[int]:
        """A copy. Raises ValueError."""
        for token in drafts:
            if type(token) is not int or not 0 <= token < self._vocab_size:
                raise ValueError(
                    f"it guesses {shown(token)}: a token id is an integer from 0 to {self._vocab_size - 1}"
                )
        return list(drafts)

    def most(self, requests: Sequence[Request], running: int) -> list[int]:
        """How many drafts of each are worth their rows in the next step, beside so many requests that run."""
        share = self._times.share_of_row(running)
        return [self._of(request, share) for request in requests]

    @staticmethod
    def _of(request: Request, share: float) -> int:
        if share >= 1:
            return 0
        right, wrong = request.drafts_right, request.drafts_wrong
        acceptance = (right + 1) / (right + wrong + 2)
        if share <= acceptance**MOST:
            return MOST
        count = int(math.log(share) / math.log(acceptance))
        return count or int(request.output_length % PROBED == 0)
