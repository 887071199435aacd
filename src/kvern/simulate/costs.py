"""The seconds of steps: fitted from recorded steps of a real engine, or estimated from a card's rates.

    seconds = base(rows) + per request + per new request + per key + per pair, and a part for steps with prompts

`base` is interpolated between numbers of rows. What the fit leaves over is kept as the ratios of measured to fitted
times, in the order of the steps, and a simulation draws them in runs: slow steps follow each other on a machine, and
an answer that meets them waits for all of them.

Steps of equal work do not take equal times, so no model is right about single ones: `Errors` has the error of the fit
beside the spread among steps of like work, and the error where this spread is averaged out.
"""

import math
import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from kvern.engine.step_load import StepLoad
from kvern.engine.step_seconds import parts_of
from kvern.errors import ConfigError
from kvern.simulate.executor import Price

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvern.planning.estimate import StepFactors

LEAST_STEPS = 100
"""Fewer recorded steps say too little."""
HELD_OUT = 5
"""Each fifth window is not fitted, and says how wrong the fit is."""
WINDOW = 10
"""Consecutive steps of a window."""
RUN_STEPS = 256
"""Residuals that are drawn together, those of consecutive steps: a run. Most answers take fewer steps."""
LIKE = 1.25
"""Steps are of like work if rows, keys and tokens of prompts are within such a factor."""
KEYS, PAIRS = 2, 3
"""The places of their costs in `StepFit.others`."""
KNOWN = 100_000
"""Costs that a price remembers."""
LEAST_LIKE = 5
"""Fewer steps of like work say little about their spread."""
SMOOTH = 0.02
"""The weight of a bend of the costs, so that those of numbers of rows that were rarely seen lie between others."""


class StepWork(NamedTuple):
    """The work of a step, on which its time depends."""

    load: StepLoad
    requests: int
    joined: int


class StepSample(NamedTuple):
    """A recorded step: its work, and the seconds from the end of the step before."""

    work: StepWork
    seconds: float


class RooflinePrice(Price):
    """The estimates of `kvern plan`, which no step of this model on this card has confirmed."""

    def __init__(self, factors: "StepFactors") -> None:
        self._factors = factors

    def seconds(self, load: StepLoad, requests: int, joined: int) -> float:
        """Returns the estimate of a step."""
        weights, keys, products, sums = parts_of(load, self._factors)
        return weights + keys + products + sums + self._factors.overhead

    def decodes(self, load: StepLoad, steps: int) -> "npt.NDArray[np.float64]":
        """See `Price`."""
        weights, _, products, sums = parts_of(load, self._factors)
        reading = np.full(steps, load.rows * self._factors.state)
        keys = load.keys + load.rows * np.arange(steps)
        for window, each in self._factors.keys:
            reading += each * (np.minimum(keys, load.rows * window) if window else keys)
        return weights + reading + products + sums + self._factors.overhead


class Errors(msgspec.Struct, frozen=True):
    """Mean relative errors on steps that were not fitted.

    `single`: of single steps. `spread`: of the median of steps of like work, which no model of the work can fall below.
    `like`: of the mean of steps of like work. `windows`: of the sum of consecutive steps. `bias`: of the sum of all.
    """

    single: float = 0.0
    spread: float = 0.0
    like: float = 0.0
    windows: float = 0.0
    bias: float = 0.0

    def __str__(self) -> str:
        return (
            f"of steps that were not fitted single ones are {self.single:.1%} off on average, where steps of like work "
            f"are {self.spread:.1%} apart from their median; means of like steps {self.like:.1%}, sums of {WINDOW} "
            f"consecutive steps {self.windows:.1%}, the sum of all {self.bias:+.1%}"
        )


class StepFit(msgspec.Struct, frozen=True):
    """Costs that were fitted to steps.

    `decodes` and `prompts` are the ratios of measured to fitted times, of steps without and with prompts, in order.
    """

    knots: tuple[int, ...]
    base: tuple[float, ...]
    others: tuple[float, ...]
    decodes: tuple[float, ...]
    prompts: tuple[float, ...]
    errors: Errors
    steps: int

    def seconds(self, work: StepWork) -> float:
        """Returns the time of a step without what is drawn."""
        found = sum(share * self.base[place] for place, share in _between(self.knots, work.load.rows))
        return found + sum(each * value for each, value in zip(self.others, _others(work), strict=True))


class FittedPrice(Price):
    """Fitted costs; steps draw runs of ratios, by the seed. None: all take the mean."""

    def __init__(self, fit: StepFit, seed: int | None) -> None:
        self._fit, self._seed = fit, seed
        ratios = {False: np.array(fit.decodes), True: np.array(fit.prompts)}
        self._ratios = ratios if seed is not None else {kind: each.mean(keepdims=True) for kind, each in ratios.items()}
        self._places = {True: 0, False: 0}
        """The ratios that come next, of steps with prompts and others."""
        self._left = self._runs = 0
        self._known: dict[tuple[int, int, int, int], float] = {}
        """The costs of rows, requests, new requests and tokens of prompts."""

    def seconds(self, load: StepLoad, requests: int, joined: int) -> float:
        """Returns the time of a step."""
        seconds = self._plain(load, requests, joined) + load.keys * self._fit.others[KEYS]
        seconds += load.pairs * self._fit.others[PAIRS]
        return seconds * float(self._drawn(load.prompt > 0, 1)[0])

    def decodes(self, load: StepLoad, steps: int) -> "npt.NDArray[np.float64]":
        """See `Price`."""
        keys = load.keys + load.rows * np.arange(steps)
        return (self._plain(load, load.rows, 0) + keys * self._fit.others[KEYS]) * self._drawn(False, steps)

    def mark(self) -> tuple[int, int, int, int]:
        """See `Price`."""
        return self._left, self._runs, self._places[False], self._places[True]

    def back(self, mark: tuple[int, int, int, int]) -> None:
        """See `Price`."""
        self._left, self._runs, self._places[False], self._places[True] = mark

    def _plain(self, load: StepLoad, requests: int, joined: int) -> float:
        """Returns the cost of a step that attends to nothing."""
        sizes = load.rows, requests, joined, load.prompt
        known = self._known.get(sizes)
        if known is None:
            if len(self._known) >= KNOWN:
                self._known.clear()
            plain = load._replace(keys=0, pairs=0.0)
            known = self._known[sizes] = self._fit.seconds(StepWork(plain, requests, joined))
        return known

    def _drawn(self, kind: bool, steps: int) -> "npt.NDArray[np.float64]":
        """Draws the ratios of the next steps."""
        ratios, missing = self._ratios[kind], steps
        found: list[npt.NDArray[np.float64]] = []
        while missing:
            if not self._left:
                moment = random.Random(
                    f"residuals {self._seed} {self._runs}"
                ).random()  # of the record, where it begins
                self._places = {each: int(moment * len(self._ratios[each])) for each in (False, True)}
                self._left, self._runs = RUN_STEPS, self._runs + 1
            count, place = min(missing, self._left), self._places[kind]
            if place + count <= len(ratios):
                found.append(ratios[place : place + count])
            else:
                found.append(ratios[np.arange(place, place + count) % len(ratios)])
            self._places[kind] = (place + count) % len(ratios)
            self._left -= count
            missing -= count
        return found[0] if len(found) == 1 else np.concatenate(found)


def fit_steps(samples: Sequence[StepSample]) -> StepFit:
    """Fits costs to recorded steps. Raises ConfigError if there are too few."""
    if len(samples) < LEAST_STEPS:
        raise ConfigError(
            f"the record has {len(samples)} steps: at least {LEAST_STEPS} are needed to fit what steps cost; record a "
            "longer load"
        )
    windows = [samples[first : first + WINDOW] for first in range(0, len(samples), WINDOW)]
    trained = [sample for number, window in enumerate(windows) if number % HELD_OUT for sample in window]
    knots = _knots([sample.work.load.rows for sample in samples])
    base, others = _solve(trained, knots)
    found = StepFit(knots, base, others, (1.0,), (1.0,), Errors(), len(samples))
    decodes = _ratios(found, [sample for sample in samples if not sample.work.load.prompt])
    prompts = _ratios(found, [sample for sample in samples if sample.work.load.prompt])
    kept = msgspec.structs.replace(found, decodes=decodes or prompts, prompts=prompts or decodes)
    return msgspec.structs.replace(kept, errors=errors_of(FittedPrice(kept, None), windows[::HELD_OUT]))


def errors_of(price: FittedPrice, windows: Sequence[Sequence[StepSample]]) -> Errors:
    """Returns how far a price without spread is off on windows of consecutive steps."""
    held = [sample for window in windows for sample in window]
    guesses = [price.seconds(*sample.work) for sample in held]
    seconds = [sample.seconds for sample in held]
    groups: dict[tuple[int, ...], list[int]] = {}
    for place, sample in enumerate(held):
        load = sample.work.load
        sizes = load.rows - load.prompt, load.prompt, load.keys, sample.work.joined
        groups.setdefault(tuple(round(math.log(size + 1, LIKE)) for size in sizes), []).append(place)
    like = [places for places in groups.values() if len(places) >= LEAST_LIKE]
    medians = {place: float(np.median([seconds[each] for each in places])) for places in like for place in places}
    return Errors(
        single=_mean_error(guesses, seconds),
        spread=_mean_error(list(medians.values()), [seconds[place] for place in medians]),
        like=_sums_error(like, guesses, seconds),
        windows=_sums_error(
            [range(first, min(first + WINDOW, len(held))) for first in range(0, len(held), WINDOW)], guesses, seconds
        ),
        bias=sum(guesses) / sum(seconds) - 1,
    )


def _mean_error(guesses: Sequence[float], seconds: Sequence[float]) -> float:
    errors = [abs(guess / took - 1) for guess, took in zip(guesses, seconds, strict=True)]
    return float(np.mean(errors)) if errors else 0.0


def _sums_error(groups: Sequence[Sequence[int]], guesses: Sequence[float], seconds: Sequence[float]) -> float:
    """Returns the mean error of the sums of groups, in which each step counts alike."""
    off = [
        len(places) * abs(sum(guesses[place] for place in places) / sum(seconds[place] for place in places) - 1)
        for places in groups
    ]
    return sum(off) / sum(map(len, groups)) if groups else 0.0


def _ratios(fit: StepFit, samples: Sequence[StepSample]) -> tuple[float, ...]:
    return tuple(sample.seconds / fit.seconds(sample.work) for sample in samples)


def _knots(rows: Sequence[int]) -> tuple[int, ...]:
    """Returns numbers of rows that are some 1.4 times as large as the one before, within those that were seen."""
    low, high = min(rows), max(rows)
    found = [low]
    while found[-1] < high:
        found.append(min(high, max(found[-1] + 1, int(found[-1] * 1.4))))
    return tuple(
        knot for place, knot in enumerate(found) if place in (0, len(found) - 1) or _is_seen(rows, found, place)
    )


def _is_seen(rows: Sequence[int], knots: Sequence[int], place: int) -> bool:
    """Some steps are near a knot."""
    return any(knots[place - 1] < count < knots[place + 1] for count in rows)


def _between(knots: Sequence[int], rows: int) -> list[tuple[int, float]]:
    """Returns the knots around a number of rows, with the weight of each."""
    above = bisect_right(knots, rows)
    if above == 0:
        return [(0, 1.0)]
    if above == len(knots):
        return [(above - 1, rows / knots[-1])]
    share = (rows - knots[above - 1]) / (knots[above] - knots[above - 1])
    return [(above - 1, 1 - share), (above, share)]


def _others(work: StepWork) -> tuple[float, ...]:
    load = work.load
    return work.requests, work.joined, load.keys, load.pairs, load.prompt, float(load.prompt > 0)  # see KEYS, PAIRS


def _solve(samples: Sequence[StepSample], knots: Sequence[int]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns costs, none below 0, with the least squares of relative errors; outliers count less in a second turn."""
    matrix = np.array(list(_rows_of(samples, knots)))
    seconds = np.array([sample.seconds for sample in samples])
    bends = SMOOTH * len(samples) ** 0.5 / float(np.median(seconds)) * _bends(knots, matrix.shape[1])
    straight = np.zeros(len(bends))
    weights = 1 / seconds
    for _ in range(4):
        costs = _non_negative(
            np.vstack([matrix * weights[:, None], bends]), np.concatenate([seconds * weights, straight])
        )
        errors = np.abs(matrix @ costs / seconds - 1)
        scale = max(float(np.median(errors)), 1e-9)
        weights = 1 / seconds / np.sqrt(np.maximum(1.0, errors / (2 * scale)))
    found = costs.tolist()
    return tuple(found[: len(knots)]), tuple(found[len(knots) :])


def _bends(knots: Sequence[int], width: int) -> "npt.NDArray[np.float64]":
    """Returns a row for each inner knot: by how much its cost differs from those beside it."""
    found = np.zeros((max(0, len(knots) - 2), width))
    for place, bend in enumerate(found, 1):
        share = (knots[place] - knots[place - 1]) / (knots[place + 1] - knots[place - 1])
        bend[place - 1 : place + 2] = share - 1, 1.0, -share
    return found


def _rows_of(samples: Sequence[StepSample], knots: Sequence[int]) -> Iterator[list[float]]:
    for sample in samples:
        row = [0.0] * len(knots)
        for place, share in _between(knots, sample.work.load.rows):
            row[place] = share
        yield [*row, *_others(sample.work)]


def _non_negative(matrix: "npt.NDArray[np.float64]", target: "npt.NDArray[np.float64]") -> "npt.NDArray[np.float64]":
    """Returns the least squares without numbers below 0, by the algorithm of Lawson and Hanson."""
    scale = np.maximum(np.linalg.norm(matrix, axis=0), 1e-300)
    scaled = matrix / scale
    product, wanted = scaled.T @ scaled, scaled.T @ target
    found = np.zeros(matrix.shape[1])
    used: list[int] = []
    least = 1e-9 * float(np.abs(wanted).max())
    for _ in range(3 * len(found)):
        gain = wanted - product @ found
        gain[used] = 0.0
        if gain.max() <= least:
            break
        used.append(int(gain.argmax()))
        while used:
            part = np.linalg.lstsq(product[np.ix_(used, used)], wanted[used], rcond=1e-12)[0]
            if part.min() > 0:
                break
            before = found[used]
            steps = [old / (old - new) for old, new in zip(before, part, strict=True) if new <= 0]
            found[used] = before + min(steps) * (part - before)
            used = [place for place in used if found[place] > 1e-15]
        found = np.zeros(matrix.shape[1])
        found[used] = part if used else 0.0
    result: npt.NDArray[np.float64] = found / scale
    return result
