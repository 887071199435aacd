"""Drafts for requests, as many as are worth a step's time.

step --ended--> DraftCosts --propose--> Proposer: as many drafts of each request as pay
                           --wanted---> the device: the same
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakSet

from kvern.drafting.costs import FORGOTTEN, LONGEST, MOST, MOST_ROWS, DraftCosts, TimedStep
from kvern.drafting.proposer import Proposer, takes_drafts
from kvern.drafting.room import Wanted
from kvern.errors import shown
from kvern.request.request import Request, State
from kvern.request.step import ModelRunnerOutput, ScheduledTokens, SchedulerOutput

if TYPE_CHECKING:
    from kvern.drafting.predictions import PredictionProposer

logger = logging.getLogger("kvern")

KEPT_OF_REQUEST = 0.9
"""The weight that the counts of a request's earlier drafts keep at each further step."""
NOBODY: frozenset[str] = frozenset()
QUIET = 16
"""The number of steps without drafts, in one of which a proposer still gets the texts."""


class Positions:
    """Counts of drafts that were the 1st, 2nd, ... after a known token, and of the accepted ones."""

    def __init__(self) -> None:
        self.drafts: list[int] = []
        self.accepted: list[int] = []

    def add(self, drafts: int, accepted: int) -> None:
        """Adds drafts that were verified together, of which the first `accepted` were accepted."""
        missing = [0] * (drafts - len(self.drafts))
        self.drafts += missing
        self.accepted += missing
        for place in range(drafts):
            self.drafts[place] += 1
        for place in range(accepted):
            self.accepted[place] += 1


class Asked(NamedTuple):
    """The requests `going` for which drafts are made and the numbers of these, decided when `running` requests ran."""

    running: int
    going: Sequence[Request]
    counts: Sequence[int]
    has_predictions: bool

    def holds(self, requests: Sequence[Request], running: int) -> bool:
        """True if the numbers still hold: the same requests got tokens, and none has ended."""
        if running != self.running or requests != self.going:
            return False
        return all(request.state is not State.FINISHED for request in requests)


class Drafting:
    """Gets drafts from a `proposer` or from the device, and learns from steps in the order of their submission.

    The predicted output of a client is drafted first; the proposer is asked if the answer differs from it. A proposer
    that raises, or returns anything but token ids below `vocab_size`, is not asked again.
    """

    def __init__(
        self,
        proposer: Proposer | None,
        vocab_size: int,
        clock: Callable[[], float] = time.perf_counter,
        *,
        device: str | None = None,
        most: int | None = None,
        catches_up: bool = True,
    ) -> None:
        """`device` is "cpu" or "cuda" if the device drafts; there is no proposer then, except for predicted outputs.

        `most`: the device's limit of drafts of a request in a step; None: no limit. `catches_up`: see `DraftCosts`.
        """
        self._proposer = proposer
        self._device, most = device, MOST if most is None else min(MOST, most)
        self._costs = DraftCosts()
        if device is not None:
            self._costs = DraftCosts(MOST_ROWS[device], most, on_device=True, catches_up=catches_up)
        self._predicted: WeakSet[Request] = WeakSet()
        """Requests whose drafts come from predicted outputs."""
        self.verified_predictions = NOBODY
        """The ids of such requests whose drafts the last returned step has verified."""
        self._vocab_size, self._clock = vocab_size, clock
        self.positions = Positions()
        self._begun: deque[tuple[float, float, frozenset[str]] | None] = deque()
        """The start of each step in flight, its wait for the proposer, and its `verified_predictions`.

        None for a step in which the proposer was not asked.
        """
        self._ended = self._proposing = self._learning = 0.0
        self._least_asking = math.inf
        """The least recent time to ask for drafts; a much longer time has other causes."""
        self._guessed: Sequence[ScheduledTokens] = ()
        """Tokens after which a GPU drafts in a step, before it begins the next."""
        self._quiet = 0
        self._asked: Asked | None = None
        """Valid until more is learnt."""
        self._rest = self._rested = self._resting = 0
        """Steps without asking, from now on and before, while so many requests run."""

    def began(self, output: SchedulerOutput, requests: Sequence[Request]) -> None:
        """Notes that a step of these requests was submitted."""
        if self._rest and not output.drafts:
            self._begun.append(None)
            return
        predicted = NOBODY
        if output.drafts and self._predicted:
            slots = {slot for slot, _, _ in output.drafts}
            predicted = frozenset(
                request.request_id for request in requests if request.slot in slots and request in self._predicted
            )
        waited, self._proposing = 0.0 if self._begun else self._proposing, 0.0
        self._begun.append((self._clock(), waited, predicted))

    def forget(self) -> None:
        """Forgets the steps in flight."""
        self._begun.clear()
        self._guessed = ()

    def ended(self, output: SchedulerOutput, requests: Sequence[Request], result: ModelRunnerOutput) -> None:
        """Learns from the oldest step, which has returned.

        `drafting_seconds` is of this step or, on a GPU, of the one before: there a result waits for drafts only if it
        has them.
        """
        step = self._begun.popleft() if self._begun else None  # or it was submitted before anybody guessed
        if step is None:
            self.verified_predictions, self._ended = NOBODY, self._clock()  # the device went on with the next
            return
        (begun, waited, self.verified_predictions), now = step, self._clock()
        seconds, self._ended = now - max(begun, self._ended), now
        guessed: Sequence[ScheduledTokens] = output.scheduled
        if self._device == "cuda":
            guessed, self._guessed = (guessed, ()) if result.guessed else (self._guessed, guessed)
        drafting_seconds = result.drafting_seconds
        tokens = output.token_count
        count = len(output.scheduled)
        right = 0
        if tokens == count and not self._would_guess(count):
            return
        if self._rested:
            self._costs.rested(self._rested, seconds)
            self._rested = 0
        if tokens == count and not drafting_seconds and self._costs.passes_over(count, seconds, waited):
            return
        self._asked = None
        for item, request, token_ids in zip(output.scheduled, requests, result.token_ids, strict=True):
            if item.sampled > 1 and token_ids and request.state is not State.FINISHED:
                accepted = len(request.until_stop(token_ids)) - 1  # behind an answer's end none is of use
                is_wrong = accepted < item.sampled - 1
                right += accepted
                self.positions.add(item.sampled - 1, accepted)
                request.drafts.right = KEPT_OF_REQUEST * request.drafts.right + accepted
                request.drafts.wrong = KEPT_OF_REQUEST * request.drafts.wrong + is_wrong
                self._costs.verified(accepted, is_wrong)
        self._costs.learn(TimedStep(output.scheduled, seconds, right, drafting_seconds, guessed, waited))
        self._learning = self._clock() - now

    def _would_guess(self, running: int) -> bool:
        """True if drafts are possible with so many running requests."""
        guesses = self._device is not None or self._proposer is not None or bool(self._predicted)
        return guesses and self._costs.has_rows(running)

    def propose(self, requests: Sequence[Request], running: int) -> None:
        """Gets drafts for requests that got tokens, in an engine that runs `running` requests."""
        if self._rest and self._rests(requests, running):
            return
        begun, asked = self._clock(), self._asked
        if asked is None or not asked.holds(requests, running):
            asked = self._who(requests, running)
            self._asked = asked if any(asked.counts) else None
        if self._quiet % QUIET:
            for request in asked.going:
                request.drafts.token_ids = []
        elif asked.going:
            self._guess(asked)
            took = self._clock() - begun
            if not self._quiet:
                self._least_asking = min(took, FORGOTTEN * self._least_asking)
            self._proposing = self._learning + min(took, LONGEST * self._least_asking)
        self._learning = 0.0

    def _who(self, requests: Sequence[Request], running: int) -> Asked:
        """Returns the requests to draft for, with numbers; without drafts the proposer rests for some steps."""
        going, has_predictions = [], False
        for request in requests:
            if request.state is State.FINISHED:
                self._costs.answered(request.output_length)
            elif (self._proposer is not None or request.spec.predicted) and takes_drafts(request):
                going.append(request)
                has_predictions = has_predictions or bool(request.spec.predicted)
        counts = self.most(going, running) if going else []
        if any(counts):
            self._quiet = 0
        elif going:
            self._quiet += 1
            self._rest, self._resting = 0 if self._device else self._costs.rest(), running
        return Asked(running, going, counts, has_predictions)

    def _rests(self, requests: Sequence[Request], running: int) -> bool:
        """True if the proposer rests, as it had no drafts before; a change of the running requests ends that."""
        self._rest -= 1
        self._rested += 1
        self._quiet += 1
        stays = running == self._resting and all(request.state is not State.FINISHED for request in requests)
        if not stays or self._quiet % QUIET == 0:
            self._rest = 0
            self._quiet -= 1
            return False
        return True

    def _guess(self, asked: Asked) -> None:
        """Gets the drafts."""
        going = asked.going
        most = [count and count + request.in_flight for request, count in zip(going, asked.counts, strict=True)]
        if asked.has_predictions:
            going, most = self._unpredicted(going, most)
        for request, drafts in zip(going, self._guesses(going, most), strict=True):
            request.drafts.token_ids = drafts

    @cached_property
    def _predictions(self) -> "PredictionProposer":
        """The drafts from predicted outputs; in a millisecond they are imported for the first request that has one."""
        from kvern.drafting.predictions import PredictionProposer

        return PredictionProposer()

    def _unpredicted(self, going: Sequence[Request], most: Sequence[int]) -> tuple[list[Request], list[int]]:
        """Drafts from predicted outputs, and returns the requests without one, or whose answers differ from it."""
        wanted = dict(zip(going, most, strict=True))
        predicted = [request for request in going if request.spec.predicted]
        found = self._predictions.propose(predicted, [wanted[request] for request in predicted])
        for request, drafts in zip(predicted, found, strict=True):
            request.drafts.token_ids = drafts
            if drafts:
                self._predicted.add(request)
                del wanted[request]
            else:
                self._predicted.discard(request)
        return [*wanted], [*wanted.values()]

    def wanted(self, running: int) -> Wanted | None:
        """Returns how many drafts the device should make with so many running requests; None if it makes none."""
        wanted = None if self._device is None else self._costs.wanted(max(1, running))
        return None if wanted is None else lambda request: 0 if request in self._predicted else wanted(request)

    def _guesses(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        """Returns the proposer's drafts, checked to be token ids, as kernels index tables by them."""
        try:
            if self._proposer is not None:
                found = self._proposer.propose(requests, most)
                return [self._checked(drafts[:count]) for drafts, count in zip(found, most, strict=True)]
        except Exception:
            self._proposer = None
            logger.exception("the proposer fails and is not asked again; answers go on without drafts")
        return [[] for _ in requests]

    def _checked(self, drafts: Sequence[int]) -> list[int]:
        """Returns a copy of valid drafts. Raises ValueError."""
        for token in drafts:
            if type(token) is not int or not 0 <= token < self._vocab_size:
                raise ValueError(
                    f"it guesses {shown(token)}: a token id is an integer from 0 to {self._vocab_size - 1}"
                )
        return list(drafts)

    def most(self, requests: Sequence[Request], running: int) -> list[int]:
        """Returns how many drafts of each request are worth their rows in the next step."""
        wanted = self._costs.wanted(running)
        return [0] * len(requests) if wanted is None else [wanted(request) for request in requests]
