"""How many drafts are worth their time: what guessing and verifying take is learnt, as is how often guesses are right.

    step ended --what it took, what was right--> DraftCosts --wanted--> drafts of the next step, none while the
                                                                        balance of all earlier ones is empty

A step of N requests with k drafts of each computes N * (1 + k) rows, and a drafter on the device takes k passes. With
drafts that are right with probability a, it gives (1 - a ** (k + 1)) / (1 - a) tokens of a request. The k that gives
the most in the time is taken, if it gives more than none by `LEAST_GAIN`. A drafter that has fallen behind has to catch
up first: it does where what an answer still gains is more than that.

Such an estimate may be wrong, and whoever asks may see to it that it is. So drafts live on what they have gained: what
a step with them takes longer than its tokens take without is drawn from a balance, which gets what it takes shorter,
and `ALLOWED` of all time.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvern.drafting.proposer import takes_drafts
from kvern.drafting.room import Wanted
from kvern.request.request import Request
from kvern.request.step import ScheduledTokens

MOST = 16
"""Drafts of a request in a step."""
MOST_ROWS = {"cpu": 8, "cuda": 256}
"""Of a step whose drafts the device guesses: behind them it computes for longer than it reads weights."""
MOST_ROWS_OF_PROPOSERS = 256
LEAST_GAIN = 1.08
KEPT_OF_ALL = 0.98
"""Of the weight of what became of all earlier drafts, by each step with others."""
KEPT_OF_SHARE = 0.9
"""Of how many requests had drafts in earlier steps, by each step with others."""
FORGOTTEN = 1.01
"""By which what steps of a size take at least is raised with each that follows."""
VISITS = 4
"""Steps of a size before it is known what they take: others share the machine, and the first makes what it needs."""
EXPLORED = 5
"""Drafts of a request in steps that find out what more rows take: kernels of CPUs take six rows at a time."""
REMEASURED = 64
"""Steps with drafts behind which one has none: what they gain is told by what such steps take now."""
FIRST_PASS = 0.125
"""What a pass of a drafter is taken to take, as a share of a step, before there was one."""
CAUGHT_UP = 0.25
"""What a token takes at most that is caught up with, as a share of a pass: many are computed at once."""
SHORT = 32
"""Tokens that are caught up with in any case."""
PROBED = 64
"""Tokens after which a request whose drafts were not worth it gets one again."""
ALLOWED = 0.008
"""Share of the time that drafts may lose in the long run."""
FIRST_BALANCE, LARGEST_BALANCE = 12, 64
"""What they may lose in addition, at first and behind what they have gained: as steps without drafts take."""
REVIVED = 2
"""What the balance must come to again behind its end, in the same: drafts take a few steps to show what they gain."""
RESTED = 16
"""Steps in which nobody is asked behind one in which nobody got any: beside a small model to ask takes time, too."""
LOOKED_AT = 8
"""Of steps in a row in which nobody has any, one in so many is learnt from."""
HELD = 8
"""Steps for which what drafts cost is worked out at once."""
LARGEST_FIRST_LOSS = 0.5
"""What the first step of its size may draw from the balance, in the same: what it makes is made once."""
LARGEST_LOSS = 12
"""What a step may draw at most, in the same, unless another drew more of late: what holds one up so long, as a machine
that sleeps, or something that is made once, seldom comes twice."""
LONGEST = 5.0
"""Times what was expected: of a step that took longer, something else held up the rest."""
LONGEST_KNOWN = 2.0
"""The same of steps of a size that is known."""


class LeastTimes:
    """What steps take by their rows: the least of late, as whatever else the machine does only adds to it."""

    def __init__(self, alike_from: int = 1 << 30, alike: int = 1) -> None:
        """Steps of more rows than `alike_from` are told apart by multiples of `alike`: there are all sizes of them."""
        self._alike_from, self._alike = alike_from, alike
        self._least: dict[int, float] = {}
        self._visits: dict[int, int] = {}
        self._known: list[int] = []

    def add(self, rows: int, seconds: float) -> bool:
        """A step of so many rows took so long; whether it is the first of its size, which takes longer."""
        rows = self._size(rows)
        visits = self._visits[rows] = self._visits.get(rows, 0) + 1
        if visits > 1:
            self._least[rows] = min(seconds, FORGOTTEN * self._least.get(rows, math.inf))
        if visits == VISITS:
            insort(self._known, rows)
        return visits == 1

    def knows(self, rows: int) -> bool:
        """Whether it is known what steps of so many rows take."""
        return self._visits.get(self._size(rows), 0) >= VISITS

    def _size(self, rows: int) -> int:
        return rows if rows <= self._alike_from else -(-rows // self._alike) * self._alike

    @property
    def seen(self) -> bool:
        """Whether there was any step."""
        return bool(self._visits)

    @property
    def largest(self) -> int:
        """The most rows of which it is known what they take; 0: none are."""
        return self._known[-1] if self._known else 0

    def of(self, rows: int, fewer: tuple[int, float] = (0, 0.0)) -> float:
        """What so many rows take: between known sizes, and beyond them, as on a line, and never less for more rows.

        `fewer`: rows, and what they take, from which the line comes to the smallest size, or to the only one.
        """
        known, least = self._known, self._least
        place = bisect_left(known, rows)
        is_between = place == 0 and 0 < fewer[0] <= rows < known[0]
        if place < len(known) and (place == 0 or known[place] == rows) and not is_between:
            return least[known[place]]
        if len(known) == 1 or is_between:
            slope = max(0.0, (least[known[0]] - fewer[1]) / (known[0] - fewer[0]))
            return least[known[0]] + slope * (rows - known[0])
        place = min(place, len(known) - 1)
        low, high = known[place - 1], known[place]
        slope = max(0.0, (least[high] - least[low]) / (high - low))
        return least[low] + slope * (rows - low)


@dataclass
class TimedStep:
    """A step that took so many `seconds`, of which the device guessed behind the step `guessed` for `drafting`.

    It waited for a proposer for `proposing` besides. Of the drafts that it verified so many were `right`.
    """

    scheduled: Sequence[ScheduledTokens]
    seconds: float
    right: int = 0
    drafting: float = 0.0
    guessed: Sequence[ScheduledTokens] = ()
    proposing: float = 0.0
    rows: int = field(init=False)
    decodes: int = field(init=False)
    drafts: int = field(init=False)

    def __post_init__(self) -> None:
        self.rows = self.decodes = self.drafts = 0
        for item in self.scheduled:
            self.rows += item.count
            self.decodes += item.count == item.sampled
            self.drafts += max(0, item.sampled - 1)

    @property
    def has_prompts(self) -> bool:
        return self.decodes < len(self.scheduled)


class DraftCosts:
    """Of drafts that a proposer guesses, or the device: there no step with drafts has more than `most_rows`.

    A request gets up to `most` drafts. `catches_up`: whoever guesses has to compute the text before first.
    """

    def __init__(
        self,
        most_rows: int = MOST_ROWS_OF_PROPOSERS,
        most: int = MOST,
        *,
        on_device: bool = False,
        catches_up: bool = True,
    ) -> None:
        self._most_rows, self._most, self._on_device = most_rows, most, on_device
        self._catches_up = on_device and catches_up
        self._plain, self._verifying, self._passes = LeastTimes(), LeastTimes(8, 4), LeastTimes()
        self._share = 1.0
        """Of the requests, those that have drafts where any has."""
        self._right, self._wrong = 2.0, 1.0
        self._length, self._caught_up = 64.0, math.inf
        """Tokens of an answer, and what a drafter takes for each token of a prompt."""
        self._balance: float | None = None
        """Seconds that drafts may still lose; None: it is not known yet what steps take."""
        self._forgiven = 0.0
        """Seconds of a step that drew more than `LARGEST_LOSS`; the time that passes makes up for them, too."""
        self._largest_balance = self._least_balance = 0.0
        """More than the least is needed: it is none, or, once all was lost, what `REVIVED` says."""
        self._since_plain = self._since_drafts = 0
        """Steps behind the last without drafts, and with."""
        self._costs = [1.0]
        self._held = self._held_for = 0
        """For how many steps more `_costs` hold, if so many run."""
        self._resting = self._running = 0
        """Steps in which nobody is asked, as long as so many run."""

    def passes_over(self, running: int, seconds: float, proposing: float) -> bool:
        """Whether nothing is to be learnt of a step of so many requests without drafts, as those before had none."""
        balance = self._balance
        if balance is None or self._since_drafts % LOOKED_AT == 0 or not self._plain.knows(running):
            return False
        self._since_drafts += 1
        self._forgiven = max(0.0, self._forgiven - ALLOWED * seconds)
        self._balance = min(balance + ALLOWED * seconds - proposing, max(balance, self._largest_balance))
        return True

    def rest(self) -> int:
        """Behind a step in which nobody got drafts: in how many nobody needs to be asked, or looked at."""
        if self._balance is None:
            return 0
        if self._balance <= self._least_balance:
            return LOOKED_AT - 1
        rest = min(self._resting, LOOKED_AT - 1)
        self._resting -= rest
        return rest

    def rested(self, steps: int, seconds: float) -> None:
        """So many steps went by, each of which took about so long."""
        self._since_drafts += steps
        if self._balance is not None:
            self._forgiven = max(0.0, self._forgiven - ALLOWED * steps * seconds)
            self._balance = min(self._balance + ALLOWED * steps * seconds, max(self._balance, self._largest_balance))

    def learn(self, step: TimedStep) -> None:
        """A step has ended."""
        is_first = step.drafting > 0 and not self._passes.seen
        if not step.has_prompts:
            times = self._verifying if step.drafts else self._plain
            is_first = times.add(step.rows, step.seconds - step.drafting) or is_first
        guessed = [item for item in step.guessed if item.guesses]
        if guessed and all(item.sampled > 1 for item in guessed):
            most = max(item.guesses for item in guessed)
            is_first = self._passes.add(len(guessed), step.drafting / most) or is_first
        elif sum(item.count for item in guessed) > SHORT:
            caught_up = step.drafting / sum(item.count for item in guessed)
            self._caught_up = min(caught_up, FORGOTTEN * self._caught_up)
        self._since_plain = self._since_plain + 1 if step.drafts else 0
        self._since_drafts = 0 if step.drafts else self._since_drafts + 1
        if step.drafts and not self._on_device:
            having = sum(item.sampled > 1 for item in step.scheduled)
            self._share += (1 - KEPT_OF_SHARE) * (having / step.decodes - self._share)
        if not self._plain.largest:
            return
        if self._balance is None:
            self._balance = FIRST_BALANCE * self._plain.of(self._plain.largest)
        else:
            plain, gained = self._plain.of(max(1, step.decodes)), self._gained(step)
            if is_first:
                gained = max(gained, -LARGEST_FIRST_LOSS * plain)
            gained = self._forgive(gained - step.proposing, step.seconds, plain)
            self._largest_balance = LARGEST_BALANCE * plain
            self._balance = min(self._balance + gained, max(self._balance, self._largest_balance))

    def _forgive(self, gained: float, seconds: float, plain: float) -> float:
        """What counts of what a step gained, or lost: of one that lost far more than others of late, a part."""
        self._forgiven = max(0.0, self._forgiven - ALLOWED * seconds)
        most = LARGEST_LOSS * plain
        if self._forgiven or gained >= -most:
            return gained
        self._forgiven = min(-gained - most, LARGEST_BALANCE * plain)
        return -most

    def _gained(self, step: TimedStep) -> float:
        """Seconds that a step took less than its tokens would have taken without drafts, and those that it may lose."""
        read = 0.0 if any(item.guesses for item in step.guessed) else step.drafting  # whether or not drafts are wanted
        took, without = step.seconds - read, step.seconds - step.drafting
        if step.drafts:
            plain = self._plain.of(step.decodes)
            longest = LONGEST * self._plain.of(step.rows)
            if not step.has_prompts and self._verifying.knows(step.rows):
                longest = min(longest, LONGEST_KNOWN * self._verifying.of(step.rows))
            took = min(took, longest + step.drafting)
            # Rows of prompts take time, each of them.
            without = without * (1 - step.drafts / step.rows) if step.has_prompts else plain
            without += step.right * plain / step.decodes
        return (1 + ALLOWED) * without - took

    def verified(self, right: int, wrong: bool) -> None:
        """Of a request's drafts so many were right, and the one behind them was not."""
        self._right = KEPT_OF_ALL * self._right + right
        self._wrong = KEPT_OF_ALL * self._wrong + wrong

    def answered(self, length: int) -> None:
        """An answer of so many tokens has ended."""
        self._resting = 0
        self._length += 0.1 * (length - self._length)

    def has_rows(self, running: int) -> bool:
        """Whether a step of so many requests may have drafts."""
        return 2 * running <= self._most_rows

    def wanted(self, running: int) -> Wanted | None:
        """How many drafts each of so many requests should get in the next step; None: nobody gets any."""
        most = min(self._most, self._most_rows // running - 1)
        balance = self._balance
        if most < 1 or balance is None or self._since_plain >= REMEASURED:
            return None
        if balance <= self._least_balance:
            self._least_balance = REVIVED * self._largest_balance / LARGEST_BALANCE
            return None
        self._least_balance = 0.0
        if self._resting and running == self._running:
            self._resting -= 1
            return None
        self._running, self._resting = running, 0
        plain, one_pass = self._plain.of(running), 0.0
        if self._on_device:
            one_pass = self._passes.of(running) if self._passes.largest else FIRST_PASS * plain
        explored, costs = min(EXPLORED, most), [1.0]
        if self._verifying.largest >= running + explored:
            explored, costs = 0, self._costs_of(running, most, plain, one_pass)

        def count_of(request: Request) -> int:
            nonlocal explored
            behind = len(request.token_ids) - request.drafts.read_tokens if self._catches_up else 0
            catching_up = behind * min(self._caught_up, CAUGHT_UP * one_pass) if behind > SHORT else 0.0
            if catching_up > balance:
                return 0
            if explored:
                count = explored
                if self._on_device:
                    explored = 0  # one finds it out; a proposer may know nothing of it
                return count
            count, rate = self._best(request, costs)
            if not count:
                is_due = request.output_length % PROBED >= PROBED - RESTED or self._since_drafts >= PROBED
                return int(is_due and len(costs) > 1 and LEAST_GAIN * costs[1] < 2)
            left = max(min(self._length, request.max_tokens) - request.output_length, self._length / 4)
            return count if catching_up < left * plain / running * (1 - 1 / rate) else 0

        anybody = False

        def of(request: Request) -> int:
            nonlocal anybody
            count = count_of(request) if takes_drafts(request) else 0
            anybody = anybody or count > 0
            self._resting = 0 if anybody else RESTED
            return count

        return of

    def _costs_of(self, running: int, most: int, plain: float, one_pass: float) -> list[float]:
        """What a step takes with none, one, ... drafts of each request, as multiples of the first; as of late."""
        if running != self._held_for or not self._held:
            having, costs = max(1.0, self._share * running), [1.0]
            for count in range(1, most + 1):
                verifying = self._verifying.of(round(running + having * count), (running, plain))
                costs.append(1 + ((verifying - plain) * running / having + count * one_pass) / plain)
            self._costs, self._held_for, self._held = costs, running, HELD
        self._held -= 1
        return self._costs

    def _best(self, request: Request, costs: Sequence[float]) -> tuple[int, float]:
        """As many drafts as give the most tokens in the time, and how many times as many as none do."""
        all_right = self._right / (self._right + self._wrong)
        right, wrong = request.drafts.right + 2 * all_right, request.drafts.wrong + 2 * (1 - all_right)
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
