"""How many drafts the device should guess: what guessing and verifying take is learnt, as is how often it was right.

A step with k drafts of each of N requests computes N * (1 + k) rows, and takes k passes of the drafter. With drafts
that are right with probability a, it gives (1 - a ** (k + 1)) / (1 - a) tokens of a request. The k that gives the most
in the time is taken, if it gives more than none by `LEAST_GAIN`. A drafter that has fallen behind has to catch up
first: it does where what an answer still gains is more than that.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Sequence

from kvern.engine.draft_room import Wanted
from kvern.engine.proposer import takes_drafts
from kvern.request import Request
from kvern.step import ScheduledTokens

MOST = 16
"""Drafts of a request in a step."""
MOST_ROWS = {"cpu": 8, "cuda": 256}
"""Of a step with drafts, by the device: behind them it computes for longer than it reads weights."""
LEAST_GAIN = 1.08
KEPT_OF_ALL = 0.98
"""Of the weight of what became of all earlier drafts, by each step with others."""
FORGOTTEN = 1.01
"""By which what steps of a size take at least is raised with each that follows."""
VISITS = 4
"""Steps of a size before it is known what they take: others share the machine, and the first makes what it needs."""
EXPLORED = 4
"""Drafts of a request in steps that find out what more rows take."""
CAUGHT_UP = 0.25
"""What a token takes that is caught up with, as a share of a pass: many are computed at once."""
SHORT = 32
"""Tokens that are caught up with in any case."""
PROBED = 64
"""Tokens after which a request whose drafts were not worth it gets one again."""
PROBES = 0.01
"""Share of the time that such probes may take."""


class LeastTimes:
    """What steps take by their rows: the least of late, as whatever else the machine does only adds to it."""

    def __init__(self) -> None:
        self._least: dict[int, float] = {}
        self._visits: dict[int, int] = {}
        self._known: list[int] = []

    def add(self, rows: int, seconds: float) -> None:
        """A step of so many rows took so long."""
        visits = self._visits[rows] = self._visits.get(rows, 0) + 1
        if visits > 1:
            self._least[rows] = min(seconds, FORGOTTEN * self._least.get(rows, math.inf))
        if visits == VISITS:
            insort(self._known, rows)

    @property
    def largest(self) -> int:
        """The most rows of which it is known what they take; 0: none are."""
        return self._known[-1] if self._known else 0

    def of(self, rows: int) -> float:
        """What so many rows take: between known sizes, and beyond them, as on a line, and never less for more rows."""
        known, least = self._known, self._least
        place = bisect_left(known, rows)
        if place < len(known) and (place == 0 or known[place] == rows):
            return least[known[place]]
        if len(known) == 1:
            return least[known[0]] * rows / known[0]
        place = min(place, len(known) - 1)
        low, high = known[place - 1], known[place]
        slope = max(0.0, (least[high] - least[low]) / (high - low))
        return least[low] + slope * (rows - low)


class DraftCosts:
    """Of a drafter beside a model: up to `most` drafts of a request; no step with drafts has more than `most_rows`."""

    def __init__(self, most_rows: int, most: int = MOST) -> None:
        self._most_rows, self._most = most_rows, most
        self._steps, self._passes = LeastTimes(), LeastTimes()
        self._right, self._wrong = 2.0, 1.0
        self._length, self._seconds, self._probed = 64.0, 0.0, 0.0

    def learn(self, scheduled: Sequence[ScheduledTokens], seconds: float, drafting: float) -> None:
        """A step without prompts took so long, of which guessing behind it took `drafting`."""
        guesses = [item.guesses for item in scheduled if item.guesses]
        self._steps.add(sum(item.count for item in scheduled), seconds - drafting)
        self._seconds += seconds
        if guesses == [1]:
            self._probed += drafting
        if guesses and drafting and all(item.sampled > 1 or not item.guesses for item in scheduled):
            self._passes.add(len(guesses), drafting / max(guesses))

    def verified(self, right: int, wrong: bool) -> None:
        """Of a request's drafts so many were right, and the one behind them was not."""
        self._right = KEPT_OF_ALL * self._right + right
        self._wrong = KEPT_OF_ALL * self._wrong + wrong

    def answered(self, length: int) -> None:
        """An answer of so many tokens has ended."""
        self._length += 0.1 * (length - self._length)

    def has_rows(self, running: int) -> bool:
        """Whether a step of so many requests may have drafts."""
        return 2 * running <= self._most_rows

    def wanted(self, running: int) -> Wanted:
        """How many drafts each of so many requests should get."""
        steps, explored = self._steps, 0
        most = min(self._most, self._most_rows // running - 1)
        if most < 1 or not steps.largest:
            return lambda request: 0
        plain, one_pass = steps.of(running), self._passes.of(running) if self._passes.largest else 0.0
        costs = [1.0]
        if steps.largest < running + min(EXPLORED, most):
            explored = min(EXPLORED, most)
        else:
            times = (steps.of(running * (1 + count)) + count * one_pass for count in range(1, most + 1))
            costs += [seconds / plain for seconds in times]

        def of(request: Request) -> int:
            nonlocal explored
            if not takes_drafts(request):
                return 0
            behind = len(request.token_ids) - request.drafted_tokens
            if explored:
                count, explored = explored, 0
                return count if behind <= SHORT else 0
            count, rate = self._best(request, costs)
            if count and behind > SHORT:
                left = max(min(self._length, request.max_tokens) - request.output_length, self._length / 4)
                if left * plain * (1 - 1 / rate) < behind * CAUGHT_UP * one_pass:
                    return 0
            if not count and request.output_length % PROBED == PROBED - 1 and self._probed < PROBES * self._seconds:
                return int(len(costs) > 1 and LEAST_GAIN * costs[1] < 2)
            return count

        return of

    def _best(self, request: Request, costs: Sequence[float]) -> tuple[int, float]:
        """As many drafts as give the most tokens in the time, and how many times as many as none do."""
        all_right = self._right / (self._right + self._wrong)
        right, wrong = request.drafts_right + 2 * all_right, request.drafts_wrong + 2 * (1 - all_right)
        acceptance = right / (right + wrong)
        best, most, tokens, chance = 0, LEAST_GAIN, 1.0, 1.0
        for count in range(1, len(costs)):
            chance *= acceptance
            tokens += chance
            rate = tokens / costs[count]
            if rate > most:
                best, most = count, rate
            elif tokens + chance * acceptance / max(1 - acceptance, 0.01) < most * costs[count]:
                break
        return best, most
