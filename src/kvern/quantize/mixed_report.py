"""A mixture of precisions and its reasons, as data and as JSON that may be edited and read again.

The best assignment under a budget of bits, or of loss, is a multiple-choice knapsack: each unit has one choice, and
sizes and losses add up. All assignments that are best for some budget are found at once, by adding one unit after
another and dropping those that another beats in both size and loss (Nemhauser and Ullmann, 1969). That is exact; beyond
`MOST_POINTS` assignments only the best of each of that many equal steps of size is kept, which costs less than a step.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvern.errors import ConfigError
from kvern.io.files import read_object

MOST_POINTS = 1 << 14


class Choice(NamedTuple):
    """One precision of a unit: its `size` in bits, and the loss that it causes alone."""

    size: int
    loss: float


class Frontier(NamedTuple):
    """Assignments of which none is both smaller and better than another, from the smallest on.

    `sizes [N]` int64 in bits, `losses [N]` float64 falling; `taken` and `before` tell, for each unit, the choice of
    each assignment so far, and which one it was before the unit.
    """

    sizes: NDArray[np.int64]
    losses: NDArray[np.float64]
    taken: tuple[NDArray[np.int64], ...]
    before: tuple[NDArray[np.int64], ...]

    def choices(self, point: int) -> list[int]:
        """The index of each unit's choice in the assignment of index `point`."""
        chosen = []
        for taken, before in zip(reversed(self.taken), reversed(self.before), strict=True):
            chosen.append(int(taken[point]))
            point = int(before[point])
        return chosen[::-1]

    def within_size(self, bits: float) -> int:
        """The assignment of least loss with at most `bits` bits. Raises ConfigError."""
        point = int(np.searchsorted(self.sizes, bits, side="right")) - 1
        if point < 0:
            raise ConfigError(f"a budget of {bits:.0f} bits is below the {int(self.sizes[0])} of the smallest choices")
        return point

    def within_loss(self, loss: float) -> int:
        """The smallest assignment of at most this loss, or that of least loss if none is."""
        return min(int(np.searchsorted(-self.losses, -loss, side="left")), len(self.losses) - 1)


def frontier(units: Sequence[Sequence[Choice]]) -> Frontier:
    """All best assignments of units that have these choices."""
    sizes, losses = np.zeros(1, np.int64), np.zeros(1)
    taken, before = [], []
    for choices in units:
        all_sizes = np.add.outer([choice.size for choice in choices], sizes).ravel()
        all_losses = np.add.outer([max(choice.loss, 0.0) for choice in choices], losses).ravel()
        kept = _undominated(all_sizes, all_losses)
        taken.append(kept // len(sizes))
        before.append(kept % len(sizes))
        sizes, losses = all_sizes[kept], all_losses[kept]
    return Frontier(sizes, losses, tuple(taken), tuple(before))


def _undominated(sizes: NDArray[np.int64], losses: NDArray[np.float64]) -> NDArray[np.int64]:
    """Indices of assignments that no other beats, ordered by size; of too many, the best of each step."""
    order = np.lexsort((losses, sizes))
    best = np.minimum.accumulate(losses[order])
    kept: NDArray[np.int64] = order[np.concatenate(([True], best[1:] < best[:-1]))]
    if len(kept) > MOST_POINTS:
        span = int(sizes[kept[-1]] - sizes[kept[0]])
        steps = (sizes[kept] - sizes[kept[0]]) * MOST_POINTS // (span + 1)
        last = np.concatenate((steps[1:] != steps[:-1], [True]))
        last[0] = True  # the smallest assignment is always possible
        kept = kept[last]
    return kept


PLAIN = "plain"
"""The name of the precision of weights that are not quantized."""
SECTION = "mixed"
"""The section of quantization_report.json that holds `MixedReport.as_json`."""
MOST_SHOWN_POINTS = 200


@dataclass(frozen=True)
class Unit:
    """Matrices that share one product, such as queries, keys and values: they get one precision, `chosen`.

    `layers` are their paths. `choices` give the bits of each precision, and the change of the model's next-token
    distribution if only this unit has it: the mean Kullback-Leibler divergence, in nats per token.
    """

    name: str
    layers: tuple[str, ...]
    parameters: int
    choices: Mapping[str, Choice]
    chosen: str

    @property
    def choice(self) -> Choice:
        return self.choices[self.chosen]

    def smaller(self) -> tuple[str, float] | None:
        """The precision that would save bits at the least loss for each, and that loss a bit; None: none is smaller."""
        return min(self._losses_a_bit(-1), key=lambda step: step[1], default=None)

    def larger(self) -> tuple[str, float] | None:
        """The larger precision with the best loss reduction per bit, and this reduction; None: none is larger."""
        return max(self._losses_a_bit(1), key=lambda step: step[1], default=None)

    def _losses_a_bit(self, sign: int) -> Iterator[tuple[str, float]]:
        """The precisions that are smaller (`sign` -1) or larger (1), and the change of loss for each bit."""
        now = self.choice
        for name, other in self.choices.items():
            if sign * (other.size - now.size) > 0:
                yield name, (other.loss - now.loss) / (now.size - other.size)


@dataclass(frozen=True)
class MixedReport:
    """The units of a model with their choices.

    `plain` is the dtype of other weights. `budget` is the request, `measured` the loss of the finished mixture, and
    `calibration` the data of the measurement.
    """

    model: str
    plain: str
    units: tuple[Unit, ...]
    budget: Mapping[str, float] = field(default_factory=dict)
    measured: Mapping[str, float] = field(default_factory=dict)
    calibration: Mapping[str, Any] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        return sum(unit.parameters for unit in self.units)

    @property
    def bits(self) -> float:
        """Bits per weight of the units."""
        return sum(unit.choice.size for unit in self.units) / self.parameters

    @property
    def loss(self) -> float:
        """The sum of the units' losses: the expected loss of the mixture."""
        return sum(unit.choice.loss for unit in self.units)

    def frontier(self) -> Frontier:
        return frontier([list(unit.choices.values()) for unit in self.units])

    def uniform(self) -> dict[str, tuple[float, float]]:
        """Bits per weight and expected loss of the model in one precision alone, for each that all units have."""
        shared = [name for name in self.units[0].choices if all(name in unit.choices for unit in self.units)]
        totals = {name: [unit.choices[name] for unit in self.units] for name in shared}
        return {
            name: (sum(choice.size for choice in all_of) / self.parameters, sum(choice.loss for choice in all_of))
            for name, all_of in totals.items()
        }

    def choose(self, chosen: Sequence[int]) -> "MixedReport":
        """This report with a choice for each unit, by index."""
        units = (
            replace(unit, chosen=list(unit.choices)[index]) for unit, index in zip(self.units, chosen, strict=True)
        )
        return replace(self, units=tuple(units))

    def within_bits(self, bits: float) -> "MixedReport":
        """The best mixture with at most `bits` bits per weight. Raises ConfigError."""
        found = self.frontier()
        if bits * self.parameters < found.sizes[0]:
            least = float(found.sizes[0]) / self.parameters
            raise ConfigError(
                f"target_bits is {bits:g}: the smallest mixture has {least:.3f} bits a weight, ask for more"
            )
        return self.choose(found.choices(found.within_size(bits * self.parameters)))

    def within_loss(self, loss: float) -> "MixedReport":
        """The smallest of at most this expected loss, in nats a token."""
        found = self.frontier()
        return self.choose(found.choices(found.within_loss(loss)))

    def curve(self) -> list[tuple[float, float]]:
        """Bits per weight and expected loss of the best assignments, from the smallest on."""
        found = self.frontier()
        step = math.ceil(len(found.sizes) / MOST_SHOWN_POINTS)
        points = sorted({*range(0, len(found.sizes), step), len(found.sizes) - 1})
        return [(float(found.sizes[point]) / self.parameters, float(found.losses[point])) for point in points]

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "plain": self.plain,
            "budget": dict(self.budget),
            "bits_per_weight": self.bits,
            "expected_loss": self.loss,
            "measured": dict(self.measured),
            "calibration": dict(self.calibration),
            "uniform": {name: {"bits_per_weight": bits, "loss": loss} for name, (bits, loss) in self.uniform().items()},
            "units": [
                {
                    "name": unit.name,
                    "chosen": unit.chosen,
                    "layers": list(unit.layers),
                    "parameters": unit.parameters,
                    "choices": {name: {"bits": item.size, "loss": item.loss} for name, item in unit.choices.items()},
                }
                for unit in self.units
            ],
        }


def read_report(path: Path) -> MixedReport:
    """Reads the mixture of a report, which may have been edited. Raises ConfigError, CorruptCheckpoint."""
    try:
        told = read_object(path).get(SECTION)
    except FileNotFoundError:
        raise ConfigError(f"report {str(path)!r}: there is no such file") from None
    if not isinstance(told, Mapping):
        raise ConfigError(f"{path} is no report of a mixture: it has no section {SECTION!r}")
    try:
        units = tuple(map(_unit, told["units"]))
        return MixedReport(str(told["model"]), str(told["plain"]), units, calibration=told.get("calibration", {}))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        said = f"lacks {error}" if isinstance(error, KeyError) else json.dumps(str(error))
        raise ConfigError(f"{path} cannot be read as a report of kvern quantize: it {said}") from None


def _unit(values: Mapping[str, Any]) -> Unit:
    choices = {str(name): Choice(int(item["bits"]), float(item["loss"])) for name, item in values["choices"].items()}
    name, chosen = str(values["name"]), values["chosen"]
    if chosen not in choices:
        raise ConfigError(f"{name}: chosen is {chosen!r:.40}, its choices are {', '.join(choices)}")
    return Unit(name, tuple(map(str, values["layers"])), int(values["parameters"]), choices, chosen)
