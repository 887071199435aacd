"""Products that are computed once while an engine is idle, so that steps do not load their kernels."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvern.layers.unquantized import UnquantizedMethod
from kvern.models.loader import load_model
from kvern.runner import first_products
from kvern.runner.first_products import FEW, ROWS_AT_ONCE, FirstProducts, numbers_of_rows
from tests.support.families import make_checkpoint

MOST = 1000
Shapes = dict[tuple[int, int], list[int]]


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> Shapes:
    """The numbers of rows of products, by outputs and inputs of the matrix."""
    found: Shapes = defaultdict(list)

    def multiply(self: UnquantizedMethod, x: Tensor, bias: Tensor | None) -> Tensor:
        found[self.shape.outputs, self.shape.inputs].append(len(x))
        return x.new_empty(len(x), self.shape.outputs)

    monkeypatch.setattr(UnquantizedMethod, "multiply", multiply)
    return found


def products(tmp_path: Path) -> FirstProducts:
    return FirstProducts(load_model(make_checkpoint("mixtral", tmp_path, vocab_size=200)), MOST)


def test_each_kind_of_matrix_is_multiplied_once_by_each_number_of_rows(
    multiplied: Shapes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_products, "MOST_HEAD_OUTPUTS", 199)
    found = products(tmp_path)
    while found.missing:
        found.capture_next()
    assert multiplied.keys() >= {(200, 48)} and len(multiplied) > 2
    for (outputs, _), numbers in multiplied.items():
        assert sorted(numbers) == numbers_of_rows(FEW if outputs == 200 else MOST)


def test_steps_may_begin_between_some_rows(multiplied: Shapes, tmp_path: Path) -> None:
    found = products(tmp_path)
    before = 0
    while found.missing:
        found.capture_next()
        rows = sum(map(sum, multiplied.values()))
        assert 0 < rows - before <= ROWS_AT_ONCE
        before = rows


def test_without_memory_they_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def multiply(*_: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(UnquantizedMethod, "multiply", multiply)
    found = products(tmp_path)
    found.capture_next()
    assert not found.missing


@pytest.mark.parametrize("most", [1, 2, 100, 513, 8192])
def test_numbers_of_rows(most: int) -> None:
    numbers = numbers_of_rows(most)
    assert numbers == sorted(set(numbers)) and all(1 < number <= most for number in numbers)
    assert most == 1 or numbers[-1] == most
