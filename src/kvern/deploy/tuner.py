"""A choice of options by measurements: coordinate descent that takes no noise for a difference.

The tuner is given `measure(configuration) -> seconds`, one run, and a clock; it knows no engine. A configuration is run
until the interval of its mean is narrow, or the number of repetitions is used up. Another one is better only where the
intervals of both do not meet; at a tie the one that stood first is kept, which at the beginning is the plan's.

A knob with an order (`ladder`) is climbed: from its value up and down for as long as that is better. Of any other all
values are tried. Rounds over all knobs go on until one changes nothing, or the time is over.
"""

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Configuration = Mapping[str, Any]
Measure = Callable[[Configuration], float]
Clock = Callable[[], float]

WIDTH = 0.02
"""The width of an interval, as a share of the mean, at which it is narrow."""
FEWEST = 3
"""The fewest runs of which an interval is taken."""
HOPELESS = 1.5
"""A configuration whose first two runs take so many times as long as the best one is not run again."""
STUDENT = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's factors of intervals of 95 % by degrees of freedom, from 1 on; beyond them 2 is near enough."""


@dataclass(frozen=True)
class Knob:
    """An option with the values that it may take; those of a `ladder` are in order."""

    name: str
    values: Sequence[Any]
    ladder: bool = False


@dataclass
class Trial:
    """A configuration with the seconds of its runs. `kept`: it replaced the best one before it."""

    configuration: Configuration
    runs: list[float] = field(default_factory=list)
    kept: bool = False

    @property
    def mean(self) -> float:
        return statistics.fmean(self.runs)

    @property
    def interval(self) -> tuple[float, float]:
        """The interval of the mean; of one run alone everything."""
        count = len(self.runs)
        if any(map(math.isinf, self.runs)):
            return math.inf, math.inf
        if count < 2:
            return 0.0, math.inf
        factor = STUDENT[count - 2] if count - 2 < len(STUDENT) else 2.0
        half = factor * statistics.stdev(self.runs) / math.sqrt(count)
        return self.mean - half, self.mean + half

    @property
    def is_narrow(self) -> bool:
        low, high = self.interval
        return len(self.runs) >= FEWEST and high - low <= WIDTH * self.mean


class Tuner:
    """Chooses a configuration. `seconds`: the time after which no further configuration is begun."""

    def __init__(self, measure: Measure, clock: Clock, repetitions: int, seconds: float) -> None:
        self._measure = measure
        self._clock = clock
        self._repetitions = max(repetitions, FEWEST)
        self._ends = clock() + seconds
        self.trials: dict[str, Trial] = {}
        """The configurations that were tried, in order, as JSON."""
        self.ended_early = False
        """True if the time was over before a round changed nothing."""

    def tune(self, start: Configuration, knobs: Sequence[Knob]) -> Trial:
        """Returns the best configuration that was found from `start` on."""
        best = self._tried(start, None)
        changed = True
        while changed and not self._is_over():
            changed = False
            for knob in knobs:
                found = self._along(knob, best)
                changed = changed or found is not best
                best = found
        return best

    def _along(self, knob: Knob, best: Trial) -> Trial:
        """Returns the best of a knob's values, all other options as they are."""
        values = list(knob.values)
        if not knob.ladder:
            for value in values:
                best = self._better(best, knob.name, value)
            return best
        at = values.index(best.configuration[knob.name])
        for step in (1, -1):
            before = best
            place = at + step
            while 0 <= place < len(values):
                found = self._better(best, knob.name, values[place])
                if found is best:
                    break
                best = found
                place += step
            if best is not before:
                break
        return best

    def _better(self, best: Trial, name: str, value: Any) -> Trial:
        """Returns the trial of another value if it is better beyond noise, else `best`."""
        if best.configuration[name] == value or self._is_over():
            return best
        other = self._tried({**best.configuration, name: value}, best)
        other.kept = other.interval[1] < best.interval[0]
        return other if other.kept else best

    def _tried(self, configuration: Configuration, best: Trial | None) -> Trial:
        key = json.dumps(configuration, sort_keys=True)
        if key in self.trials:
            return self.trials[key]
        trial = self.trials[key] = Trial(dict(configuration))
        while len(trial.runs) < self._repetitions and not trial.is_narrow:
            trial.runs.append(self._measure(configuration))
            if self._is_lost(trial, best):
                break
        return trial

    def _is_lost(self, trial: Trial, best: Trial | None) -> bool:
        """True if further runs cannot make a trial better than the best."""
        if math.isinf(trial.runs[-1]):
            return True
        if best is None:
            return False
        if len(trial.runs) == 2:
            return min(trial.runs) > HOPELESS * best.mean
        return len(trial.runs) >= FEWEST and trial.interval[0] > best.interval[1]

    def _is_over(self) -> bool:
        over = self._clock() >= self._ends
        self.ended_early = self.ended_early or over
        return over
