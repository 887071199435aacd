"""The wall time of an engine, every second of it under one of `CAUSES`.

    add     |-- idle --|
    submit             |-- host, tier, grammar ... --|
    result                                           |-- the step: weights, keys, products, collectives --|

A step without rows only loads or saves, and what passes before it is the tier's, too: nothing else was to be done.
Steps end in the order in which they began. A step's time begins at the end of the one before, or when it was submitted
if that was later; what is between two steps is the host's. The end of a step whose result was ready before it was
awaited, while others could be in flight, is estimated.

A step's time is divided in the proportion of the parts that `kvern plan` estimates; decodes of equally many rows that
follow each other are divided together. While a request waits because it lacks a row, blocks or the place of its
adapter, weights are read for fewer requests than there could be: the seconds of the weights are those of this lack. On
a machine of unknown speed steps are not divided.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from msgspec.structs import replace

from kvern.engine.step_load import StepLoad
from kvern.request.events import CAUSES, EngineStatistics
from kvern.request.record import Lack

if TYPE_CHECKING:
    from kvern.planning.estimate import StepFactors

PLACES = {cause: place for place, cause in enumerate(CAUSES)}
WEIGHTS, KEYS, PRODUCTS, COLLECTIVES, STEP, HOST = (PLACES[cause] for cause in CAUSES[:6])
BLOCKS, ROWS, ADAPTER, BATCH, TIER = (PLACES[cause] for cause in CAUSES[6:11])
LACKS: dict[str | None, int] = {"blocks": BLOCKS, "rows": ROWS, "adapter": ADAPTER, "batch": BATCH}
AT_ONCE = 0.0001
"""The seconds in which a result is returned that was ready before."""
REPORT_SECONDS = 0.1
"""The seconds between two reports while the engine works."""
GAIN = 0.1
"""The share of its error by which a step corrects the ratio of measured to estimated times."""
LARGEST = 2.0
"""The most by which one step raises the ratio: it may have been the first of its kind."""
LONGEST_RUN = 32
"""The most steps that are divided together: meanwhile what they read of keys grows."""
ALONE = -1
"""No number of rows."""
Parts = tuple[float, float, float, float]


class StepSeconds:
    """Is told by the core when steps begin and end, and what nothing ran for.

    overlaps    steps are submitted while others run
    """

    def __init__(self, overlaps: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._factors: StepFactors | None = None
        self._overlaps = overlaps
        self._clock = clock
        self._spent = [0.0] * len(CAUSES)
        """The seconds of each cause, without those of the run."""
        self.last = 0.0, 0.0, 0
        """The end of the last step, its seconds, whatever they were spent on, and its tokens."""
        self._until = clock()
        """The time up to which all seconds have a cause."""
        self._begun: deque[tuple[StepLoad, Lack | None, float]] = deque()
        """The load of each step in flight, the lack of the best waiting request, and when it was submitted."""
        self._run_load, self._run_lack = StepLoad(), cast("Lack | None", None)
        """The first step of a run: of steps that have ended and are divided together."""
        self._run_rows = ALONE
        """The rows of another step of the run; `ALONE`: none can be."""
        self._run_steps = self._run_keys = 0
        self._run_seconds = 0.0
        self._run_estimate = 0.0
        """The seconds of its first step, if steps overlap; 0: unknown."""
        self._awaited = 0.0
        self._exact, self._ratio = True, 1.0
        self._reads = self._computes = 0.0
        self._reported = self._until

    def divide(self, factors: "StepFactors | None") -> None:
        """Divide steps from now on by estimates of their parts; None: nobody knows how fast this machine is."""
        self._divide_run()
        self._factors = factors

    def rests(self, cause: str) -> None:
        """Nothing has run since the last call, because of this."""
        if not self._begun:
            self._pass(PLACES[cause], self._clock())

    def began(self, load: StepLoad, now: float, lack: Lack | None = None) -> None:
        """A step is about to be submitted, while the best waiting request has this `lack`."""
        if not self._begun:  # like `_pass`
            self._spent[HOST if load.rows or load.encoding else TIER] += now - self._until
            self._until = now
        self._begun.append((load, lack, now))

    def awaits(self) -> None:
        """The result of the oldest step is about to be awaited; nobody needs to say so if steps do not overlap."""
        self._awaited = self._clock()

    def ended(self, now: float) -> None:
        """The result of the oldest step has come."""
        load, lack, _ = self._begun.popleft()
        took = now - self._until
        self.last = now, took, load.rows
        goes_on = load.rows == self._run_rows and lack == self._run_lack and self._run_steps < LONGEST_RUN
        if not goes_on or load.prompt or load.encoding:
            self._begin_run(load, lack)
        self._run_steps += 1
        self._run_keys += load.keys
        if self._overlaps:
            took = self._computing(took, now)
            self._until += took
            self._run_seconds += took
            self._pass(HOST, max(self._until, self._begun[0][2]) if self._begun else now)
        else:
            self._until = now
            self._run_seconds += took

    def _computing(self, took: float, now: float) -> float:
        """The seconds for which a step ran, of those until its result came."""
        known, self._exact = self._exact, now - self._awaited > AT_ONCE
        if not self._run_estimate:
            return took
        expected = self._ratio * self._run_estimate
        if not self._exact:
            return min(took, expected)
        if known and took > 0:
            self._ratio += GAIN * self._ratio * (min(took / expected, LARGEST) - 1)
        return took

    def _begin_run(self, load: StepLoad, lack: Lack | None) -> None:
        """A step is the first of a run, or alone."""
        self._divide_run()
        self._run_load, self._run_lack = load, lack
        self._run_rows = ALONE if load.prompt or load.encoding else load.rows
        self._run_estimate = 0.0
        if self._overlaps and self._factors is not None and (load.rows or load.encoding):
            self._run_estimate = sum(parts_of(load, self._factors)) + self._factors.overhead

    def _divide_run(self) -> None:
        """Divide the seconds of the run, which ends."""
        steps, took = self._run_steps, self._run_seconds
        if not steps:
            return
        load, lack = self._run_load, self._run_lack
        factors = self._factors
        spent = self._spent
        if not load.rows and not load.encoding:
            spent[TIER] += took
        elif factors is None:
            spent[LACKS.get(lack, STEP)] += took
        else:
            parts = parts_of(replace(load, keys=self._run_keys / steps), factors)
            weights, keys, products, collectives = parts
            factor = took / sum(parts)
            spent[LACKS.get(lack, WEIGHTS)] += factor * weights
            spent[KEYS] += factor * keys
            spent[PRODUCTS] += factor * products
            spent[COLLECTIVES] += factor * collectives
            read = factors.read[min(load.rows.bit_length(), len(factors.read) - 1)]
            self._reads += steps * (read * weights + factors.keys_read * keys)
            self._computes += steps * products
        self._run_steps = self._run_keys = 0
        self._run_seconds = 0.0
        self._run_rows = ALONE

    def forget(self) -> None:
        """The steps in flight are lost."""
        self._pass(STEP, self._clock())
        self._begun.clear()

    def report(self, statistics: EngineStatistics, works: bool = False) -> None:
        """Write what is known into the statistics; while the engine `works`, not after each step."""
        if works and self._until < self._reported + REPORT_SECONDS:
            return
        self._reported = self._until
        self._divide_run()
        spent = self._spent
        statistics.seconds = tuple(spent)
        if (factors := self._factors) is not None:
            read = spent[WEIGHTS] + spent[KEYS] + spent[BLOCKS] + spent[ROWS] + spent[ADAPTER] + spent[BATCH]
            statistics.reading = self._reads, read
            statistics.computing = factors.computed * self._computes, spent[PRODUCTS]
            statistics.bandwidth, statistics.rate = factors.card.bandwidth, factors.card.rate

    def _pass(self, cause: int, until: float) -> None:
        self._spent[cause] += until - self._until
        self._until = until


def parts_of(load: StepLoad, factors: "StepFactors") -> Parts:
    """Returns the seconds of weights, keys, products and collectives; of the shorter of weights and their products what
    does not overlap with the longer."""
    rows, encoding = load.rows, load.encoding
    table, bits = factors.weights, rows.bit_length()
    weights = (table[bits] if bits < len(table) else table[-1]) if rows else 0.0
    decodes = rows - load.prompt
    products = factors.row * (rows + encoding) + factors.head * decodes
    if products > weights:
        weights *= factors.late
    else:
        products *= factors.late
    reading = decodes * factors.state
    for window, each in factors.keys:
        reading += each * (min(load.keys, decodes * window) if window else load.keys)
    return weights, reading, products + factors.pair * load.pairs, factors.sums + factors.sum_row * rows
