"""The wall time of an engine, every second of it under one of `CAUSES`.

    add     |-- idle --|
    submit             |-- host, tier, grammar ... --|
    result                                           |-- the step: weights, keys, products, collectives --|

A step without rows only loads or saves, and what passes before it is the tier's, too: nothing else was to be done.
Steps end in the order in which they began. A step's time begins at the end of the one before, or when it was submitted
if that was later; what is between two steps is the host's. The end of a step whose result was ready before it was
awaited, while others could be in flight, is estimated.

A step's time is divided in the proportion of the parts that `kvern plan` estimates. While a request waits because it
lacks a row, blocks or the place of its adapter, weights are read for fewer requests than there could be: the seconds of
the weights are those of this lack. On a machine of unknown speed steps are not divided.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

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
Parts = tuple[float, float, float, float]


class StepSeconds:
    """Is told by the core when steps begin and end, and what nothing ran for.

    overlaps    steps are submitted while others run
    """

    def __init__(self, overlaps: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._factors: StepFactors | None = None
        self._overhead = 0.0
        self._overlaps = overlaps
        self._clock = clock
        self.spent = [0.0] * len(CAUSES)
        """The seconds of each cause."""
        self.last = 0.0, 0.0, 0
        """The end of the last step, its seconds, whatever they were spent on, and its tokens."""
        self._until = clock()
        """The time up to which all seconds have a cause."""
        self._begun: deque[tuple[Parts | None, int, float, int]] = deque()
        """The parts of each step in flight, the cause of its weights, or of all of it, when it was submitted, and its
        tokens."""
        self._awaited = 0.0
        self._exact, self._ratio = True, 1.0
        self._reads = self._computes = 0.0
        self._reported = self._until

    def divide(self, factors: "StepFactors | None") -> None:
        """Divide steps from now on by estimates of their parts; None: nobody knows how fast this machine is."""
        self._factors = factors
        self._overhead = 0.0 if factors is None else factors.overhead

    def rests(self, cause: str) -> None:
        """Nothing has run since the last call, because of this."""
        if not self._begun:
            self._pass(PLACES[cause], self._clock())

    def began(self, load: StepLoad, lack: Lack | None = None) -> None:
        """A step is about to be submitted, while the best waiting request has this `lack`."""
        now = self._clock()
        is_empty = not load.rows and not load.encoding
        if not self._begun:
            self._pass(TIER if is_empty else HOST, now)
        if is_empty:
            self._begun.append((None, TIER, now, 0))
        elif self._factors is None:
            self._begun.append((None, LACKS.get(lack, STEP), now, load.rows))
        else:
            parts = parts_of(load, self._factors)
            self._begun.append((parts, LACKS.get(lack, WEIGHTS), now, load.rows))

    def awaits(self) -> None:
        """The result of the oldest step is about to be awaited."""
        if self._overlaps:
            self._awaited = self._clock()

    def ended(self) -> None:
        """The result of the oldest step has come."""
        now, known = self._clock(), self._exact
        parts, cause, _, tokens = self._begun.popleft()
        self.last = now, now - self._until, tokens
        self._exact = not self._overlaps or now - self._awaited > AT_ONCE
        if parts is None:
            self._pass(cause, now)
            return
        weights, keys, products, collectives = parts
        whole = weights + keys + products + collectives
        took = now - self._until
        if self._overlaps:
            expected = self._ratio * (whole + self._overhead)
            if not self._exact:
                took = min(took, expected)
            elif known and took > 0:
                self._ratio += GAIN * self._ratio * (min(took / expected, LARGEST) - 1)
        factor, spent = took / whole, self.spent
        if weights:
            spent[cause] += factor * weights
        spent[KEYS] += factor * keys
        factors = self._factors
        if factors is not None:
            read = factors.read[min(tokens.bit_length(), len(factors.read) - 1)]
            self._reads += read * weights + factors.keys_read * keys
        if products:
            spent[PRODUCTS] += factor * products
            self._computes += products
        if collectives:
            spent[COLLECTIVES] += factor * collectives
        self._until += took
        if self._overlaps:
            self._pass(HOST, max(self._until, self._begun[0][2]) if self._begun else now)

    def forget(self) -> None:
        """The steps in flight are lost."""
        self._pass(STEP, self._clock())
        self._begun.clear()

    def report(self, statistics: EngineStatistics, works: bool = False) -> None:
        """Write what is known into the statistics; while the engine `works`, not after each step."""
        if works and self._until < self._reported + REPORT_SECONDS:
            return
        self._reported = self._until
        statistics.seconds = tuple(self.spent)
        if (factors := self._factors) is not None:
            spent = self.spent
            read = spent[WEIGHTS] + spent[KEYS] + spent[BLOCKS] + spent[ROWS] + spent[ADAPTER] + spent[BATCH]
            statistics.reading = self._reads, read
            statistics.computing = factors.computed * self._computes, spent[PRODUCTS]
            statistics.bandwidth, statistics.rate = factors.card.bandwidth, factors.card.rate

    def _pass(self, cause: int, until: float) -> None:
        self.spent[cause] += until - self._until
        self._until = until


def parts_of(load: StepLoad, factors: "StepFactors") -> Parts:
    """Returns the seconds of weights, keys, products and collectives; of the shorter of weights and their products what
    does not overlap with the longer."""
    rows, keys, pairs, encoding, prompt, _ = load
    table, bits = factors.weights, rows.bit_length()
    weights = (table[bits] if bits < len(table) else table[-1]) if rows else 0.0
    decodes = rows - prompt
    products = factors.row * (rows + encoding) + factors.head * decodes
    if products > weights:
        weights *= factors.late
    else:
        products *= factors.late
    reading = decodes * factors.state
    for window, each in factors.keys:
        reading += each * (min(keys, decodes * window) if window else keys)
    return weights, reading, products + factors.pair * pairs, factors.sums + factors.sum_row * rows
