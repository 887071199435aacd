"""The number of drafts that are worth their time, from learnt costs of drafting and verifying, and learnt acceptance.

    step ended --its time, its accepted drafts--> DraftCosts --wanted--> drafts of the next step; none while the
                                                                         balance of all earlier ones is empty

A step of N requests with k drafts each computes N * (1 + k) rows, and a drafter on the device takes k passes. With
drafts that are accepted with probability a, it gives (1 - a ** (k + 1)) / (1 - a) tokens a request. The k with the most
tokens a second is taken, if it exceeds no drafts by `LEAST_GAIN`. A drafter that lags behind has to catch up first: it
does so if the rest of an answer gains more than that costs.

Estimates may be wrong, and a client can try to make them wrong. So drafts are paid from a balance: a step with drafts
that takes longer than its tokens would take without them reduces it; a step that takes less, and `ALLOWED` of all time,
increase it.
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
"""The most drafts of a request in a step."""
MOST_ROWS = {"cpu": 8, "cuda": 256}
"""The most rows of a step whose drafts the device makes: with more, computing takes longer than reading weights."""
MOST_ROWS_OF_PROPOSERS = 256
LEAST_GAIN = 1.08
KEPT_OF_ALL = 0.98
"""The weight that the counts of all earlier drafts keep at each further step."""
KEPT_OF_SHARE = 0.9
"""The weight that the share of requests with drafts in earlier steps keeps at each further step."""
FORGOTTEN = 1.01
"""The factor by which the least time of steps of a size grows with each that follows."""
VISITS = 4
"""The steps of a size before their time is known: other programs share the machine, and the first step is slower."""
EXPLORED = 5
"""Drafts of a request in steps that explore the time of more rows: kernels of CPUs take six rows at a time."""
REMEASURED = 64
"""Steps with drafts after which one has none, to measure the time of steps without them again."""
FIRST_PASS = 0.125
"""The assumed time of a drafter's pass before the first, as a share of a step."""
CAUGHT_UP = 0.25
"""The most time of a token that a drafter catches up with, as a share of a pass: many are computed at once."""
SHORT = 32
"""Tokens that a drafter catches up with in any case."""
PROBED = 64
"""Tokens after which a request whose drafts were not worth it gets one again."""
ALLOWED = 0.008
"""The share of the time that drafts may lose in the long run."""
FIRST_BALANCE, LARGEST_BALANCE = 12, 64
"""The additional loss that drafts may make, at first and after gains, in steps without drafts."""
REVIVED = 2
"""The level that the balance must reach again once it is empty, in the same unit: drafts need a few steps to show
their gain."""
RESTED = 16
"""Steps without asking after one in which no request got drafts: with a small model, asking takes time, too."""
LOOKED_AT = 8
"""The number of steps in a row without drafts, of which one is learnt from."""
HELD = 8
"""Steps for which computed costs are kept."""
LARGEST_FIRST_LOSS = 0.5
"""The most that the first step of its size may take from the balance, in the same unit: it prepares what is made
once."""
LARGEST_LOSS = 12
"""The most that a step may take, in the same unit, unless another took more recently: what delays one step so long,
such as a machine that sleeps, seldom occurs twice."""
LONGEST = 5.0
"""The factor over the expected time beyond which something else delayed a step."""
LONGEST_KNOWN = 2.0
"""This factor for steps of a known size."""


class LeastTimes:
    """The least recent time of steps by their rows, as other work on the machine only adds to it."""

    def __init__(self, alike_from: int = 1 << 30, alike: int = 1) -> None:
        """Steps of more rows than `alike_from` are grouped by multiples of `alike`, as they have all sizes."""
        self._alike_from, self._alike = alike_from, alike
        self._least: dict[int, float] = {}
        self._visits: dict[int, int] = {}
        self._known: list[int] = []

    def add(self, rows: int, seconds: float) -> bool:
        """Adds the time of a step. Returns True for the first step of its size, which is slower."""
        rows = self._size(rows)
        visits = self._visits[rows] = self._visits.get(rows, 0) + 1
        if visits > 1:
            self._least[rows] = min(seconds, FORGOTTEN * self._least.get(rows, math.inf))
        if visits == VISITS:
            insort(self._known, rows)
        return visits == 1

    def knows(self, rows: int) -> bool:
        """True if the time of steps of so many rows is known."""
        return self._visits.get(self._size(rows), 0) >= VISITS

    def _size(self, rows: int) -> int:
        return rows if rows <= self._alike_from else -(-rows // self._alike) * self._alike

    @property
    def seen(self) -> bool:
        """True if there was any step."""
        return bool(self._visits)

    @property
    def largest(self) -> int:
        """The most rows whose time is known; 0 if none is."""
        return self._known[-1] if self._known else 0

    def of(self, rows: int, fewer: tuple[int, float] = (0, 0.0)) -> float:
        """Returns the time of so many rows: interpolated between known sizes and extrapolated, never less for more
        rows.

        `fewer` are rows and their time from which the line to the smallest size, or to the only one, starts.
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
    """A step that took `seconds`, `drafting` of them for the drafts that the device made after the tokens of `guessed`.

    It waited for a proposer for `proposing` in addition. It accepted `right` of the drafts that it verified.
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
    """Costs of drafts by a proposer or by the device, where no step with drafts has more than `most_rows`.

    A request gets up to `most` drafts. `catches_up`: the drafter has to compute the text first.
    """

    def __init__(
        self,
        most_rows: int = MOST_ROWS_OF_PROPOSERS,
        most: int = MOST,
        *,
        on_device: bool = False,
        catches_up: bool = True,
    ) -> None:
        self._most_rows = most_rows
        self._most = most
        self._on_device = on_device
        self._catches_up = on_device and catches_up
        self._plain = LeastTimes()
        self._verifying = LeastTimes(8, 4)
        self._passes = LeastTimes()
        self._share = 1.0
        """The share of requests with drafts, in steps with drafts."""
        self._right, self._wrong = 2.0, 1.0
        self._length, self._caught_up = 64.0, math.inf
        """The mean number of tokens of an answer, and a drafter's seconds for each token of a prompt."""
        self._balance: float | None = None
        """The seconds that drafts may still lose; None while the time of steps is unknown."""
        self._forgiven = 0.0
        """The seconds of a step that took more than `LARGEST_LOSS`; passing time compensates them as well."""
        self._largest_balance = self._least_balance = 0.0
        """The least balance for drafts: none or, once all was lost, what `REVIVED` says."""
        self._since_plain = self._since_drafts = 0
        """Steps since the last without drafts, and since the last with drafts."""
        self._costs = [1.0]
        self._held = self._held_for = 0
        """The steps for which `_costs` are still valid, with this number of running requests."""
        self._resting = self._running = 0
        """Steps without asking, while this number of requests runs."""

    def passes_over(self, running: int, seconds: float, proposing: float) -> bool:
        """True if nothing can be learnt of a step without drafts, because earlier ones had none either."""
        balance = self._balance
        if balance is None or self._since_drafts % LOOKED_AT == 0 or not self._plain.knows(running):
            return False
        self._since_drafts += 1
        self._forgiven = max(0.0, self._forgiven - ALLOWED * seconds)
        self._balance = min(balance + ALLOWED * seconds - proposing, max(balance, self._largest_balance))
        return True

    def rest(self) -> int:
        """Returns the number of steps in which no request need be asked for, after a step without drafts."""
        if self._balance is None:
            return 0
        if self._balance <= self._least_balance:
            return LOOKED_AT - 1
        rest = min(self._resting, LOOKED_AT - 1)
        self._resting -= rest
        return rest

    def rested(self, steps: int, seconds: float) -> None:
        """Counts steps without asking, and their approximate time each."""
        self._since_drafts += steps
        if self._balance is not None:
            self._forgiven = max(0.0, self._forgiven - ALLOWED * steps * seconds)
            self._balance = min(self._balance + ALLOWED * steps * seconds, max(self._balance, self._largest_balance))

    def learn(self, step: TimedStep) -> None:
        """Learns from a step that has ended."""
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
        """Returns the part of a step's gain or loss that counts: a loss far above recent ones counts in part."""
        self._forgiven = max(0.0, self._forgiven - ALLOWED * seconds)
        most = LARGEST_LOSS * plain
        if self._forgiven or gained >= -most:
            return gained
        self._forgiven = min(-gained - most, LARGEST_BALANCE * plain)
        return -most

    def _gained(self, step: TimedStep) -> float:
        """Returns the seconds that a step saved compared with no drafts, with those that it may lose."""
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
        """Learns that `right` drafts of a request were accepted; `wrong` says that the next was rejected."""
        self._right = KEPT_OF_ALL * self._right + right
        self._wrong = KEPT_OF_ALL * self._wrong + wrong

    def answered(self, length: int) -> None:
        """Learns the length of an answer that has ended."""
        self._resting = 0
        self._length += 0.1 * (length - self._length)

    def has_rows(self, running: int) -> bool:
        """True if a step of so many requests may have drafts."""
        return 2 * running <= self._most_rows

    def wanted(self, running: int) -> Wanted | None:
        """Returns how many drafts each request should get in the next step; None if none should."""
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
        """Returns the time of a step with none, one, ... drafts of each request, relative to the first; kept for some
        steps."""
        if running != self._held_for or not self._held:
            having, costs = max(1.0, self._share * running), [1.0]
            for count in range(1, most + 1):
                verifying = self._verifying.of(round(running + having * count), (running, plain))
                costs.append(1 + ((verifying - plain) * running / having + count * one_pass) / plain)
            self._costs = costs
            self._held_for = running
            self._held = HELD
        self._held -= 1
        return self._costs

    def _best(self, request: Request, costs: Sequence[float]) -> tuple[int, float]:
        """Returns the number of drafts with the most tokens a second, and the factor over no drafts."""
        all_right = self._right / (self._right + self._wrong)
        right, wrong = request.drafts.right + 2 * all_right, request.drafts.wrong + 2 * (1 - all_right)
        acceptance = right / (right + wrong)
        best = 0
        most = LEAST_GAIN
        tokens = 1.0
        chance = 1.0
        for count in range(1, len(costs)):
            chance *= acceptance
            tokens += chance
            rate = tokens / costs[count]
            if rate > most:
                best, most = count, rate
            elif tokens + chance * acceptance / max(1 - acceptance, 0.01) < most * costs[count]:
                break
        return best, most
