"""The seconds of steps: fitted from recorded steps of a real engine, or estimated from a card's rates.

    seconds = base(rows) + per request + per new request + per key + per pair, and a part for steps with prompts

`base` is interpolated between numbers of rows. What the fit leaves over is kept as the ratios of measured to fitted
times, and each step of a simulation draws one of them: so a simulation has the spread of a real engine, not its mean
alone.
"""

import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from kvern.engine.step_load import StepLoad
from kvern.engine.step_seconds import parts_of
from kvern.errors import ConfigError

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvern.planning.estimate import StepFactors

LEAST_STEPS = 100
"""Fewer recorded steps say too little."""
HELD_OUT = 5
"""Each fifth step is not fitted, and says how wrong the fit is."""
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


class RooflinePrice:
    """The estimates of `kvern plan`, which no step of this model on this card has confirmed."""

    def __init__(self, factors: "StepFactors") -> None:
        self._factors = factors

    def seconds(self, load: StepLoad, requests: int, joined: int) -> float:
        """Returns the estimate of a step."""
        return sum(parts_of(load, self._factors)) + self._factors.overhead


class StepFit(msgspec.Struct, frozen=True):
    """Costs that were fitted to steps; `decodes` and `prompts` are the ratios of measured to fitted times, ascending.

    `error`: the mean relative error on steps that were not fitted; `bias`: the relative error of their sum.
    """

    knots: tuple[int, ...]
    base: tuple[float, ...]
    others: tuple[float, ...]
    decodes: tuple[float, ...]
    prompts: tuple[float, ...]
    error: float
    bias: float
    steps: int

    def seconds(self, work: StepWork) -> float:
        """Returns the time of a step without what is drawn."""
        found = sum(share * self.base[place] for place, share in _between(self.knots, work.load.rows))
        return found + sum(each * value for each, value in zip(self.others, _others(work), strict=True))


class FittedPrice:
    """Fitted costs; each step draws a ratio, by the seed. `spread` False: none is drawn."""

    def __init__(self, fit: StepFit, seed: int, spread: bool = True) -> None:
        self._fit, self._spread = fit, spread
        self._random = random.Random(f"residuals {seed}")
        self._mean = {True: float(np.mean(fit.prompts)), False: float(np.mean(fit.decodes))}

    def seconds(self, load: StepLoad, requests: int, joined: int) -> float:
        """Returns the time of a step."""
        seconds = self._fit.seconds(StepWork(load, requests, joined))
        if not self._spread:
            return seconds * self._mean[load.prompt > 0]
        ratios = self._fit.prompts if load.prompt else self._fit.decodes
        return seconds * ratios[int(self._random.random() * len(ratios))]


def fit_steps(samples: Sequence[StepSample]) -> StepFit:
    """Fits costs to recorded steps. Raises ConfigError if there are too few."""
    if len(samples) < LEAST_STEPS:
        raise ConfigError(
            f"the record has {len(samples)} steps: at least {LEAST_STEPS} are needed to fit what steps cost; record a "
            "longer load"
        )
    trained = [sample for number, sample in enumerate(samples) if number % HELD_OUT]
    held = samples[::HELD_OUT]
    knots = _knots([sample.work.load.rows for sample in samples])
    base, others = _solve(trained, knots)
    found = StepFit(knots, base, others, (1.0,), (1.0,), 0.0, 0.0, len(samples))
    decodes = _ratios(found, [sample for sample in samples if not sample.work.load.prompt])
    prompts = _ratios(found, [sample for sample in samples if sample.work.load.prompt])
    kept = msgspec.structs.replace(found, decodes=decodes or prompts, prompts=prompts or decodes)
    plain = FittedPrice(kept, 0, spread=False)
    predicted = [plain.seconds(*sample.work) for sample in held]
    errors = [abs(guess / sample.seconds - 1) for guess, sample in zip(predicted, held, strict=True)]
    bias = sum(predicted) / sum(sample.seconds for sample in held) - 1
    return msgspec.structs.replace(kept, error=float(np.mean(errors)), bias=bias)


def _ratios(fit: StepFit, samples: Sequence[StepSample]) -> tuple[float, ...]:
    return tuple(sorted(sample.seconds / fit.seconds(sample.work) for sample in samples))


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
    return work.requests, work.joined, load.keys, load.pairs, load.prompt, float(load.prompt > 0)


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
