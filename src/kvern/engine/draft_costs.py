"""How many drafts the device should guess: what guessing and verifying take is learnt, as is how often it was right.

A draft costs a row of the next step and a pass of the drafter, which is one for all requests. With k drafts, each right
with probability a, a step gives (1 - a ** (k + 1)) / (1 - a) tokens of a request. The k that gives the most in the time
is taken, if it gives more than none by `LEAST_GAIN`. A drafter that has fallen behind has to catch up first: it does
where what an answer still gains is more than that.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvern.engine.draft_room import Wanted
from kvern.engine.proposer import takes_drafts
from kvern.request import Request
from kvern.step import ScheduledTokens

if TYPE_CHECKING:
    from kvern.engine.drafting import StepTimes

MOST = 16
"""Drafts of a request in a step."""
LEAST_GAIN = 1.04
EXPLORED = (4, 2, 0)
"""Drafts of the first steps, before anybody knows what they cost."""
KEPT_OF_ALL = 0.98
"""Of the weight of what became of all earlier drafts, by each step with others."""
FIRST_PASS = 0.25
"""What a pass is taken to cost, as a share of a step, before one was seen."""
CAUGHT_UP = 0.25
"""What a token takes that is caught up with, as a share of a pass: many are computed at once."""
SHORT = 32
"""Tokens that are caught up with in any case."""
PROBED = 64
"""Tokens after which a request whose drafts were not worth it gets one again."""
PROBES = 0.01
"""Share of the time that such probes may take."""


class DraftCosts:
    """Of a drafter, whose passes take `passes`, beside a model whose steps take `times`."""

    def __init__(self, times: "StepTimes", passes: "StepTimes") -> None:
        self._times, self._passes = times, passes
        self._right, self._wrong = 2.0, 1.0
        self._length, self._seconds, self._probed = 64.0, 0.0, 0.0
        self._explored = 0
        self._hidden = False
        """What passes take is not told: it is in what rows are seen to take."""

    def learn(self, scheduled: Sequence[ScheduledTokens], seconds: float, drafting: float) -> None:
        """A step took so long, of which guessing behind it took `drafting`."""
        guesses = [item.guesses for item in scheduled if item.sampled and item.guesses]
        self._seconds += seconds
        if len(guesses) == 1 and guesses[0] == 1 and scheduled[0].sampled == 1:
            self._probed += drafting
        self._hidden = self._hidden or (bool(guesses) and not drafting)
        if guesses and drafting and all(item.sampled > 1 or not item.guesses for item in scheduled):
            self._passes.add(sum(guesses) / max(guesses), drafting / max(guesses))

    def verified(self, right: int, wrong: bool) -> None:
        """Of a request's drafts so many were right, and the one behind them was not."""
        self._right = KEPT_OF_ALL * self._right + right
        self._wrong = KEPT_OF_ALL * self._wrong + wrong

    def answered(self, length: int) -> None:
        """An answer of so many tokens has ended."""
        self._length += 0.1 * (length - self._length)

    def wanted(self, running: int) -> Wanted:
        """How many drafts each of so many requests should get."""
        share = self._times.share_of_row(running)
        step = self._times.seconds_of(running)
        one_pass = self._passes.seconds_of(running)
        known = self._times.row is not None and (one_pass > 0 or self._hidden)
        cost = share + (one_pass / step if known else FIRST_PASS)
        explored = []
        if not known:  # one request finds them out, by steps of several sizes
            self._explored = (self._explored + 1) % len(EXPLORED)
            explored = [EXPLORED[self._explored]]

        def of(request: Request) -> int:
            if not takes_drafts(request) or cost >= 1:
                return 0
            if not known:
                return explored.pop() if explored else 0
            count, rate = self._best(request, cost)
            behind = len(request.token_ids) - request.drafted_tokens
            if count and behind > SHORT:
                left = max(min(self._length, request.max_tokens) - request.output_length, self._length / 4)
                if left * step * (1 - 1 / rate) < behind * CAUGHT_UP * one_pass:
                    return 0
            if not count and request.output_length % PROBED == PROBED - 1 and self._probed < PROBES * self._seconds:
                return 1
            return count

        return of

    def _best(self, request: Request, cost: float) -> tuple[int, float]:
        """As many drafts as give the most tokens in the time, and how many times as many as none do."""
        all_right = self._right / (self._right + self._wrong)
        right, wrong = request.drafts_right + 2 * all_right, request.drafts_wrong + 2 * (1 - all_right)
        acceptance = right / (right + wrong)
        best, most, tokens, chance = 0, 1.0, 1.0, 1.0
        for count in range(1, MOST + 1):
            chance *= acceptance
            tokens += chance
            rate = tokens / (1 + count * cost)
            if rate <= most:
                break
            best, most = count, rate
        return (best, most) if most > LEAST_GAIN else (0, 1.0)
