"""Mixed precision: what each layer costs in each precision, the best assignment, and the report."""

import itertools
import random

import numpy as np
import pytest

from kvern.errors import ConfigError
from kvern.quantize import assignment
from kvern.quantize.assignment import Choice, frontier


def random_units(seed: int, units: int, choices: int = 4) -> list[list[Choice]]:
    draw = random.Random(seed)
    return [
        [
            Choice(draw.randint(1, 30) * draw.choice([1, 7]), draw.choice([0.0, 1.0, draw.random()]))
            for _ in range(choices)
        ]
        for _ in range(units)
    ]


def totals(units: list[list[Choice]], chosen: list[int]) -> Choice:
    picked = [choices[index] for choices, index in zip(units, chosen, strict=True)]
    return Choice(sum(choice.size for choice in picked), sum(choice.loss for choice in picked))


@pytest.mark.parametrize("seed", range(20))
def test_the_best_assignment_is_that_of_brute_force(seed: int) -> None:
    units = random_units(seed, units=1 + seed % 6)
    found = frontier(units)
    every = [totals(units, list(chosen)) for chosen in itertools.product(range(4), repeat=len(units))]
    for budget in sorted({choice.size for choice in every}):
        point = found.within_size(budget)
        made = totals(units, found.choices(point))
        assert made == pytest.approx((found.sizes[point], found.losses[point]))
        assert made.size <= budget
        assert made.loss == pytest.approx(min(choice.loss for choice in every if choice.size <= budget))
    for budget in sorted({choice.loss for choice in every}):
        made = totals(units, found.choices(found.within_loss(budget + 1e-9)))
        assert made.loss <= budget + 1e-6
        assert made.size == min(choice.size for choice in every if choice.loss <= budget + 1e-9)
    with pytest.raises(ConfigError, match="below the"):
        found.within_size(min(choice.size for choice in every) - 1)
    assert found.within_loss(-1.0) == len(found.sizes) - 1


@pytest.mark.parametrize("seed", range(3))
def test_with_too_many_assignments_the_answer_is_nearly_best(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    units = random_units(seed, units=40, choices=5)
    exact = frontier(units)
    monkeypatch.setattr(assignment, "MOST_POINTS", 80)
    thinned = frontier(units)
    assert len(thinned.sizes) <= 81 < len(exact.sizes)
    assert thinned.sizes[0] == exact.sizes[0]
    for share in (0.1, 0.3, 0.6):
        budget = exact.sizes[0] + share * (exact.sizes[-1] - exact.sizes[0])
        best, made = exact.within_size(budget), thinned.within_size(budget)
        assert totals(units, thinned.choices(made)) == pytest.approx((thinned.sizes[made], thinned.losses[made]))
        assert thinned.losses[made] <= exact.losses[exact.within_size(0.95 * budget)]
        assert thinned.losses[made] >= exact.losses[best] - 1e-9


def test_a_model_of_many_layers_is_solved() -> None:
    """Sizes as those of a large model: 200 units of six choices."""
    draw = np.random.default_rng(0)
    units = [
        [Choice(int(bits * size), float(weight * 2.0 ** (-2 * bits))) for bits in (16, 8.125, 8, 4.5, 4.25, 4.125)]
        for size, weight in zip(draw.integers(1 << 20, 1 << 27, 200), draw.random(200), strict=True)
    ]
    found = frontier(units)
    budget = 5 * sum(choices[2].size for choices in units) // 8
    point = found.within_size(budget)
    assert 0.999 * budget < found.sizes[point] <= budget
