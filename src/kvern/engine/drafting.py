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
from weakref import WeakSet

from kvern.engine.draft_costs import MOST_ROWS, DraftCosts
from kvern.engine.draft_room import Wanted
from kvern.engine.prediction import PredictionProposer
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
KEPT_OF_ALL = 0.98
"""The same of all requests, by each step: from them a request is judged that had few drafts."""
FIRST_SHARE = 0.25
"""What a row is taken to cost, as a share of a step with one request, before steps of other sizes were seen."""
LONGEST = 5.0
"""Times the mean: a step that takes longer was held up by something else, unless `MOST_LONG` before it were, too."""
MOST_LONG = 4
PROBED = 64
"""Tokens after which a request whose drafts were not worth their rows gets one again."""


class StepTimes:
    """What steps without prompts take, as a line: `base + row * rows`, of which later steps count for more."""

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._squares = self._products = 0.0
        self._long = 0
        """Steps in a row that were held up."""

    def add(self, rows: int, seconds: float) -> None:
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

    def share_of_row(self, requests: int) -> float:
        """What a row costs, as a share of what a token costs in a step of so many requests without drafts."""
        if self._weight == 0:
            return FIRST_SHARE
        mean, seconds = self._mean_rows, self._seconds / self._weight
        variance = self._squares / self._weight - mean * mean
        if variance < 0.1:
            return FIRST_SHARE
        row = max(0.0, (self._products / self._weight - mean * seconds) / variance)
        step = max(seconds + row * (requests - mean), row * requests)
        return row * requests / step if step > 0 else FIRST_SHARE


class Positions:
    """How many drafts were the 1st, 2nd, ... behind a known token, and how many of these were right."""

    def __init__(self) -> None:
        self.drafts: list[int] = []
        self.accepted: list[int] = []

    def add(self, drafts: int, accepted: int) -> None:
        """So many were verified together, of which the first were right."""
        missing = [0] * (drafts - len(self.drafts))
        self.drafts += missing
        self.accepted += missing
        for place in range(drafts):
            self.drafts[place] += 1
        for place in range(accepted):
            self.accepted[place] += 1


class Drafting:
    """Has a `proposer` guess, or the device, and learns from steps, in the order in which they were submitted.

    Where a client has predicted an answer, that is what is guessed; the proposer is asked where the answer is another.
    A proposer that raises, or guesses anything but token ids below `vocab_size`, is not asked again.
    """

    def __init__(
        self,
        proposer: Proposer | None,
        vocab_size: int,
        clock: Callable[[], float] = time.perf_counter,
        *,
        device: str | None = None,
        most: int | None = None,
    ) -> None:
        """`device`: "cpu" or "cuda", where it guesses, and no proposer, but for what clients have predicted.

        `most`: drafts of a request that it makes there in a step; None: any number.
        """
        self._proposer = proposer
        self._costs = (
            None if device is None else DraftCosts(MOST_ROWS[device], MOST if most is None else min(MOST, most))
        )
        self._predictions = PredictionProposer()
        self._predicted: WeakSet[Request] = WeakSet()
        """Requests whose drafts are of their predictions."""
        self.verified_predictions: frozenset[str] = frozenset()
        """The same by their ids, of those whose drafts the last step to return had verified."""
        self._vocab_size, self._clock = vocab_size, clock
        self._times = StepTimes()
        self._sizes: set[int] = set()
        """Of the steps that there were: the first one of its size takes longer, as it is captured or compiled."""
        self.positions = Positions()
        self._right = self._wrong = 0.0
        """What became of drafts of all requests, of which the later ones count for more."""
        self._begun: deque[tuple[float, frozenset[str]]] = deque()
        self._ended = 0.0

    def began(self, output: SchedulerOutput, requests: Sequence[Request]) -> None:
        """A step of these requests was submitted."""
        predicted: frozenset[str] = frozenset()
        if output.drafts and self._predicted:
            slots = {slot for slot, _, _ in output.drafts}
            predicted = frozenset(
                request.request_id for request in requests if request.slot in slots and request in self._predicted
            )
        self._begun.append((self._clock(), predicted))

    def forget(self) -> None:
        """Steps in flight are abandoned."""
        self._begun.clear()

    def ended(
        self,
        output: SchedulerOutput,
        requests: Sequence[Request],
        kept: Sequence[Sequence[int]],
        drafting_seconds: float = 0.0,
    ) -> None:
        """The oldest step returned, with these tokens for its requests.

        `drafting_seconds`: what guessing behind it took on the device.
        """
        if not self._begun:
            self.verified_predictions = frozenset()
            return  # it was submitted before anybody guessed
        (begun, self.verified_predictions), now = self._begun.popleft(), self._clock()
        seconds, self._ended = now - max(begun, self._ended), now
        tokens, count = output.token_count, len(output.scheduled)
        if tokens == count and not self._would_guess(count):
            return
        if all(item.count == item.sampled for item in output.scheduled):
            if tokens in self._sizes:
                self._times.add(tokens, seconds - drafting_seconds)
            self._sizes.add(tokens)
            if self._costs is not None:
                self._costs.learn(output.scheduled, seconds, drafting_seconds)
        self._right, self._wrong = KEPT_OF_ALL * self._right, KEPT_OF_ALL * self._wrong
        if tokens == count:
            return  # there were no drafts
        for item, request, token_ids in zip(output.scheduled, requests, kept, strict=True):
            if item.sampled > 1 and token_ids:
                right = len(token_ids) - 1
                self.positions.add(item.sampled - 1, right)
                request.drafts_right = KEPT_OF_REQUEST * request.drafts_right + right
                request.drafts_wrong = KEPT_OF_REQUEST * request.drafts_wrong + (right < item.sampled - 1)
                self._right += right
                self._wrong += right < item.sampled - 1
                if self._costs is not None:
                    self._costs.verified(right, right < item.sampled - 1)

    def _would_guess(self, running: int) -> bool:
        """Whether anybody guesses where so many run."""
        if self._costs is not None:
            return self._costs.has_rows(running)
        return self._proposer is not None or bool(self._predicted)

    def propose(self, requests: Iterable[Request], running: int) -> None:
        """Guess how requests go on that got tokens, in an engine that runs so many."""
        going = []
        for request in requests:
            if request.state is State.FINISHED:
                if self._costs is not None:
                    self._costs.answered(request.output_length)
            elif (self._proposer is not None or request.spec.prediction) and takes_drafts(request):
                going.append(request)
        if not going:
            return
        counts = self.most(going, running)
        most = {request: count and count + request.in_flight for request, count in zip(going, counts, strict=True)}
        predicted = [request for request in going if request.spec.prediction]
        found = self._predictions.propose(predicted, [most[request] for request in predicted])
        for request, drafts in zip(predicted, found, strict=True):
            request.draft_token_ids = drafts
            if drafts:
                self._predicted.add(request)
                del most[request]
            else:
                self._predicted.discard(request)
        for request, drafts in zip(most, self._guesses([*most], [*most.values()]), strict=True):
            request.draft_token_ids = drafts

    def wanted(self, running: int) -> Wanted | None:
        """How many drafts the device should guess where so many run, or are about to; None: nobody does there."""
        if self._costs is None or not self._costs.has_rows(running):
            return None
        wanted = self._costs.wanted(max(1, running))
        return lambda request: 0 if request in self._predicted else wanted(request)

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

    def _of(self, request: Request, share: float) -> int:
        if share >= 1:
            return 0
        right, wrong = request.drafts_right, request.drafts_wrong
        usual = (self._right + 1) / (self._right + self._wrong + 2)
        acceptance = (right + 2 * usual) / (right + wrong + 2)
        if share <= acceptance**MOST:
            return MOST
        count = int(math.log(share) / math.log(acceptance))
        return count or int(request.output_length % PROBED == 0)
