"""The seconds of steps: fitted from recorded steps of a real engine, or estimated from a card's rates.

    seconds = decodes(rows that decode) + prompts(tokens of prompts) + per prompt, new request, key and pair

Both are interpolated between numbers that were seen, and never fall. They add up, because the tokens of a prompt read
weights that the decodes beside them have read already. What the fit leaves over are ratios of measured to fitted times.
A pause of the host that doubles a short step is little of a long one, so ratios belong to steps of a class, of similar
fitted times. Kept is, in the order of the steps, where each stands among those of its class, and a simulation draws
these places in runs and takes the ratios there of the class of its own steps: slow steps follow each other on a
machine, and an answer that meets them waits for all of them.

Steps of equal work do not take equal times, so no model is right about single ones: `Errors` has the error of the fit
beside the spread among steps of like work, and the error where this spread is averaged out.
"""

import math
import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from kvern.engine.step_load import StepLoad
from kvern.engine.step_seconds import parts_of
from kvern.errors import ConfigError
from kvern.simulate.executor import Price
from kvern.simulate.launches import Launches, StepSample, StepWork, find_launches, scaled, seen

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
CLASS = 1.5
"""Fitted times of a class are within such a factor, if enough steps are."""
LEAST_OF_CLASS = 30
RATIO = 1.08
"""A number of rows whose cost is fitted, to the one before."""
TURNS = 8
"""Fits, each with the weights of steps that the one before gives."""
SMOOTH = 0.02
"""The weight of a bend of the costs, so that those of numbers of rows that were rarely seen lie between others."""


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


class Residuals(msgspec.Struct, frozen=True):
    """Ratios of measured to fitted times of steps: what a fit leaves over.

    `edges`: the fitted times at which classes begin, but for the first; `ratios`: those of each class, sorted;
    `places`: of each step in order the place of its ratio in its class, from 0 to 1.
    """

    edges: tuple[float, ...]
    ratios: tuple[tuple[float, ...], ...]
    places: tuple[float, ...]


class Curve(msgspec.Struct, frozen=True):
    """The seconds of some numbers of rows, the least first; none take none."""

    knots: tuple[int, ...]
    seconds: tuple[float, ...] = ()

    def at(self, rows: int) -> float:
        """Returns the seconds of so many rows."""
        return sum(share * self.seconds[place] for place, share in self.between(rows))

    def between(self, rows: int) -> list[tuple[int, float]]:
        """Returns the places of the knots around a number of rows, with the weight of each.

        Beyond the last, seconds rise as they do from half of that on.
        """
        knots = self.knots
        above = bisect_right(knots, rows)
        if not rows or not knots:
            return []
        if above == 0:
            return [(0, 1.0)]
        if above == len(knots) and (half := bisect_right(knots, knots[-1] // 2)):
            more = (rows - knots[-1]) / (knots[-1] - knots[half - 1])
            return [(half - 1, -more), (above - 1, 1 + more)]
        if above == len(knots):
            return [(above - 1, rows / knots[-1])]
        share = (rows - knots[above - 1]) / (knots[above] - knots[above - 1])
        return [(above - 1, 1 - share), (above, share)]


class StepFit(msgspec.Struct, frozen=True):
    """Costs that were fitted to steps. `decodes`, `prompts`: what is left over of steps without and with prompts."""

    curves: tuple[Curve, Curve]
    """The costs of rows that decode, and of tokens of prompts."""
    others: tuple[float, ...]
    decodes: Residuals
    prompts: Residuals
    errors: Errors
    steps: int
    launches: Launches = Launches()

    def seconds(self, work: StepWork) -> float:
        """Returns the time of a step without what is drawn."""
        found = sum(curve.at(rows) for curve, rows in zip(self.curves, _rows(work.load), strict=True))
        return found + sum(each * value for each, value in zip(self.others, _others(work), strict=True))


class FittedPrice(Price):
    """Fitted costs; steps draw runs of ratios, by the seed. None: all take the mean."""

    def __init__(self, fit: StepFit, seed: int | None) -> None:
        self._fit, self._seed = fit, seed
        self.launches = fit.launches
        self._drawn = {False: _Drawn(fit.decodes), True: _Drawn(fit.prompts)}
        self._places = {True: 0, False: 0}
        """The residuals that come next, of steps with prompts and others."""
        self._left = self._runs = 0
        self._known: dict[tuple[int, int, int, int], float] = {}
        """The costs of rows, requests, new requests and tokens of prompts."""

    def seconds(self, load: StepLoad, requests: int, joined: int) -> float:
        """Returns the time of a step."""
        seconds = self._plain(load, requests, joined) + load.keys * self._fit.others[KEYS]
        seconds += load.pairs * self._fit.others[PAIRS]
        return seconds * float(self._ratios(load.prompt > 0, np.array([seconds]))[0])

    def decodes(self, load: StepLoad, steps: int) -> "npt.NDArray[np.float64]":
        """See `Price`."""
        keys = load.keys + load.rows * np.arange(steps)
        seconds: npt.NDArray[np.float64] = np.multiply(keys, self._fit.others[KEYS], dtype=np.float64)
        seconds += self._plain(load, load.rows, 0)
        return seconds * self._ratios(False, seconds)

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
            plain = msgspec.structs.replace(load, keys=0, pairs=0.0)
            known = self._known[sizes] = self._fit.seconds(StepWork(plain, requests, joined))
        return known

    def _ratios(self, kind: bool, seconds: "npt.NDArray[np.float64]") -> "npt.NDArray[np.float64]":
        """Draws the ratios of the next steps, which have these fitted times."""
        drawn, missing = self._drawn[kind], len(seconds)
        if self._seed is None:
            means: npt.NDArray[np.float64] = drawn.means[np.searchsorted(drawn.edges, seconds, side="right")]
            return means
        found: list[npt.NDArray[np.float64]] = []
        while missing:
            if not self._left:
                moment = random.Random(f"residuals {self._seed} {self._runs}").random()
                self._places = {each: int(moment * len(self._drawn[each].places)) for each in (False, True)}
                self._left, self._runs = RUN_STEPS, self._runs + 1
            count, place = min(missing, self._left), self._places[kind]
            found.append(drawn.places[np.arange(place, place + count) % len(drawn.places)])
            self._places[kind] = (place + count) % len(drawn.places)
            self._left -= count
            missing -= count
        return drawn.at(np.concatenate(found), seconds)


class _Drawn:
    """The residuals of steps as arrays, the ratios of all classes in a row."""

    def __init__(self, residuals: Residuals) -> None:
        self.edges, self.places = np.array(residuals.edges), np.array(residuals.places)
        self.means = np.array([np.mean(each) for each in residuals.ratios])
        self._counts = np.array([len(each) for each in residuals.ratios])
        self._starts = np.cumsum(self._counts) - self._counts
        self._ratios = np.concatenate(residuals.ratios)

    def at(self, places: "npt.NDArray[np.float64]", seconds: "npt.NDArray[np.float64]") -> "npt.NDArray[np.float64]":
        """Returns the ratios at these places of the classes of fitted times."""
        classes = np.searchsorted(self.edges, seconds, side="right")
        found: npt.NDArray[np.float64] = self._ratios[
            self._starts[classes] + (places * self._counts[classes]).astype(np.int64)
        ]
        return found


def fit_steps(samples: Sequence[StepSample], graph_tokens: int = 0) -> StepFit:
    """Fits costs to recorded steps. Raises ConfigError if there are too few.

    `graph_tokens`: see `RecordHeader`.
    """
    if len(samples) < LEAST_STEPS:
        raise ConfigError(
            f"the record has {len(samples)} steps: at least {LEAST_STEPS} are needed to fit what steps cost; record a "
            "longer load"
        )
    launches = find_launches(samples, graph_tokens)
    windows = [samples[first : first + WINDOW] for first in range(0, len(samples), WINDOW)]
    apart = [[window[0]._replace(follows=False), *window[1:]] for window in windows]
    trained = [sample for number, window in enumerate(apart) if number % HELD_OUT for sample in window]
    decodes, prompts = (_knots(each) for each in zip(*(_rows(sample.work.load) for sample in samples), strict=True))
    curves, others = _solve(trained, (Curve(decodes), Curve(prompts)), launches)
    nothing = Residuals((), ((1.0,),), (0.0,))
    found = StepFit(curves, others, nothing, nothing, Errors(), len(samples), launches)
    errors = errors_of(FittedPrice(_with_residuals(found, trained), None), apart[::HELD_OUT])
    return msgspec.structs.replace(_with_residuals(found, samples), errors=errors)


def _with_residuals(fit: StepFit, samples: Sequence[StepSample]) -> StepFit:
    """Returns a fit with what it leaves over of steps."""
    if fit.launches.tokens:
        own = scaled(samples, np.array([fit.seconds(sample.work) for sample in samples]), fit.launches)
        samples = [each._replace(seconds=seconds) for each, seconds in zip(samples, own, strict=True)]
    decodes = _residuals(fit, [sample for sample in samples if not sample.work.load.prompt])
    prompts = _residuals(fit, [sample for sample in samples if sample.work.load.prompt])
    return msgspec.structs.replace(fit, decodes=decodes or prompts, prompts=prompts or decodes)


def errors_of(price: FittedPrice, windows: Sequence[Sequence[StepSample]]) -> Errors:
    """Returns how far a price without spread is off on windows of consecutive steps."""
    held = [sample for window in windows for sample in window]
    guesses = seen(held, [price.seconds(*sample.work) for sample in held], price.launches)
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


def _residuals(fit: StepFit, samples: Sequence[StepSample]) -> Residuals | None:
    """Returns what a fit leaves over of steps; None: there are none."""
    fitted = [fit.seconds(sample.work) for sample in samples]
    edges = list[float]()
    first = 0
    for place, seconds in enumerate(ordered := sorted(fitted)):
        if place - first >= LEAST_OF_CLASS <= len(ordered) - place and seconds > CLASS * ordered[first]:
            edges.append(seconds)
            first = place
    classes: list[list[tuple[float, int]]] = [[] for _ in range(len(edges) + 1)]
    for place, (seconds, sample) in enumerate(zip(fitted, samples, strict=True)):
        classes[bisect_right(edges, seconds)].append((sample.seconds / seconds, place))
    places = [0.0] * len(samples)
    for each in classes:
        each.sort()
        for rank, (_, place) in enumerate(each):
            places[place] = (rank + 0.5) / len(each)
    ratios = tuple(tuple(ratio for ratio, _ in each) for each in classes)
    return Residuals(tuple(edges), ratios, tuple(places)) if samples else None


def _knots(seen: Sequence[int]) -> tuple[int, ...]:
    """Returns numbers of rows that are `RATIO` times as large as the one before, within those that were seen."""
    rows = [count for count in seen if count]
    if not rows:
        return ()
    low, high = min(rows), max(rows)
    found = [low]
    while found[-1] < high:
        found.append(min(high, max(found[-1] + 1, int(found[-1] * RATIO))))
    return tuple(
        knot for place, knot in enumerate(found) if place in (0, len(found) - 1) or _is_seen(rows, found, place)
    )


def _is_seen(rows: Sequence[int], knots: Sequence[int], place: int) -> bool:
    """Some steps are near a knot."""
    return any(knots[place - 1] < count < knots[place + 1] for count in rows)


def _rows(load: StepLoad) -> tuple[int, int]:
    """Returns how many rows decode, and how many are tokens of prompts."""
    return load.rows - load.prompt, load.prompt


def _others(work: StepWork) -> tuple[float, ...]:
    load = work.load
    prompts = max(0, work.requests - load.rows + load.prompt)
    return prompts, work.joined, load.keys, load.pairs  # see KEYS, PAIRS


def _solve(
    samples: Sequence[StepSample], curves: tuple[Curve, Curve], launches: Launches
) -> tuple[tuple[Curve, Curve], tuple[float, ...]]:
    """Returns costs, none below 0, with the least squares of errors, which outliers count less in.

    Errors are relative to fitted times: relative to measured ones, a step whose end is seen early would count more than
    one whose end is seen late. Those of steps that are shorter than most are relative to the median of all.
    """
    matrix = np.array(list(_rows_of(samples, curves)))
    seconds = np.array([sample.seconds for sample in samples])
    usual = float(np.median(seconds))
    rises, bends = _rises(curves, matrix.shape[1]), _bends(curves, matrix.shape[1])
    bends *= SMOOTH * len(samples) ** 0.5 / usual
    straight = np.zeros(len(bends))
    weights = 1 / np.maximum(seconds, usual)
    for _ in range(TURNS):
        rows = np.vstack([matrix * weights[:, None], bends]) @ rises
        costs = rises @ _non_negative(rows, np.concatenate([seconds * weights, straight]))
        fitted = matrix @ costs
        if launches.tokens:
            seconds = np.array(scaled(samples, fitted, launches))
        long = np.maximum(fitted, usual)
        errors = np.abs(seconds - fitted) / long
        scale = max(float(np.median(errors)), 1e-9)
        weights = 1 / long / np.sqrt(np.maximum(1.0, errors / (2 * scale)))
    found = costs.tolist()
    first, second = (len(curve.knots) for curve in curves)
    decodes = Curve(curves[0].knots, tuple(found[:first]))
    prompts = Curve(curves[1].knots, tuple(found[first : first + second]))
    return (decodes, prompts), tuple(found[first + second :])


def _rises(curves: Sequence[Curve], width: int) -> "npt.NDArray[np.float64]":
    """Returns what makes costs of those between a knot and the one before it, and leaves others as they are."""
    found = np.eye(width)
    first = 0
    for curve in curves:
        last = first + len(curve.knots)
        found[first:last, first:last] = np.tri(last - first)
        first = last
    return found


def _bends(curves: Sequence[Curve], width: int) -> "npt.NDArray[np.float64]":
    """Returns a row for each inner knot: by how much its cost differs from those beside it."""
    found = []
    first = 0
    for curve in curves:
        knots = curve.knots
        for place in range(1, len(knots) - 1):
            share = (knots[place] - knots[place - 1]) / (knots[place + 1] - knots[place - 1])
            bend = np.zeros(width)
            bend[first + place - 1 : first + place + 2] = share - 1, 1.0, -share
            found.append(bend)
        first += len(knots)
    return np.array(found).reshape(-1, width)


def _rows_of(samples: Sequence[StepSample], curves: Sequence[Curve]) -> Iterator[list[float]]:
    for sample in samples:
        row: list[float] = []
        for curve, rows in zip(curves, _rows(sample.work.load), strict=True):
            part = [0.0] * len(curve.knots)
            for place, share in curve.between(rows):
                part[place] = share
            row += part
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
