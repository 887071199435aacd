"""Products that are computed once while an engine is idle, so that steps do not load their kernels."""

from collections import defaultdict
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from kvern.layers.unquantized import UnquantizedMethod
from kvern.models.fallback.decoder import load_fallback
from kvern.models.fallback.description import describe
from kvern.models.loader import load_model
from kvern.runner.first_products import ROWS_AT_ONCE, FirstProducts, numbers_of_rows
from kvern.runner.loaded_model import Draft, LoadedModel
from kvern.runner.plan import Layout
from kvern.runner.step_graphs import capture_one
from tests.support.families import make_checkpoint

MOST, REQUESTS = 1000, 20
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


def products(decoder: Any, draft: Any = None, most: int = MOST) -> FirstProducts:
    layout = Layout(MOST, 10, 16, 1, "float32", REQUESTS, most, 1, {}, "cpu", ())
    drafts = None if draft is None else Draft(draft, cast("Any", None))
    return FirstProducts(LoadedModel(decoder, cast("Any", None), None, None, draft=drafts), layout)


def mixtral(tmp_path: Path) -> FirstProducts:
    return products(load_model(make_checkpoint("mixtral", tmp_path, vocab_size=200)))


def compute(found: FirstProducts) -> None:
    while found.missing:
        found.capture_next()


def test_each_kind_of_matrix_is_multiplied_once_by_each_number_of_rows(multiplied: Shapes, tmp_path: Path) -> None:
    """An output layer by those that a step may score: other products would take memory that no step takes."""
    compute(mixtral(tmp_path))
    assert multiplied.keys() >= {(200, 48)} and len(multiplied) > 2
    for (outputs, _), numbers in multiplied.items():
        assert sorted(numbers) == numbers_of_rows(REQUESTS if outputs == 200 else MOST)


def test_models_of_transformers_and_drafts_take_part(multiplied: Shapes, tmp_path: Path) -> None:
    folder = make_checkpoint("apertus", tmp_path / "apertus", vocab_size=200)
    decoder = load_fallback(folder, describe(folder), torch.float32)
    draft = load_model(make_checkpoint("llama", tmp_path / "llama", vocab_size=200, intermediate_size=80))
    compute(products(decoder))
    own = set(multiplied)
    assert len(own) > 2 and sorted(multiplied[200, decoder.spec.hidden_size]) == numbers_of_rows(REQUESTS)
    multiplied.clear()
    compute(products(decoder, draft))
    assert own < set(multiplied) and any(80 in shape for shape in multiplied)


def test_steps_may_begin_between_some_rows(multiplied: Shapes, tmp_path: Path) -> None:
    found = mixtral(tmp_path)
    before = 0
    while found.missing:
        found.capture_next()
        rows = sum(map(sum, multiplied.values()))
        assert 0 < rows - before <= ROWS_AT_ONCE
        before = rows


def test_the_largest_steps_load_their_kernels_themselves(tmp_path: Path) -> None:
    """What they need grows with the square of their tokens, and a request would wait for a single product."""
    decoder = load_model(make_checkpoint("llama", tmp_path))
    found = [products(decoder, most=most).missing for most in (ROWS_AT_ONCE, 8 * ROWS_AT_ONCE)]
    assert [numbers for _, numbers in found[0]] == [numbers for _, numbers in found[1]]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_without_memory_they_are_left_out(
    error: RuntimeError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also on one of several ranks, and whoever says so: the driver loads kernels into memory of its own."""

    def multiply(*_: Any) -> Tensor:
        raise error

    monkeypatch.setattr(UnquantizedMethod, "multiply", multiply)
    found = mixtral(tmp_path)
    assert not capture_one([found], is_alone=False)
    assert not found.missing and "no GPU memory to load kernels" in caplog.text


def test_other_faults_are_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def multiply(*_: Any) -> Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(UnquantizedMethod, "multiply", multiply)
    with pytest.raises(RuntimeError, match="illegal"):
        capture_one([mixtral(tmp_path)], is_alone=True)


@pytest.mark.parametrize("most", [1, 2, 100, 513, 8192])
def test_numbers_of_rows(most: int) -> None:
    numbers = numbers_of_rows(most)
    assert numbers == sorted(set(numbers)) and all(1 < number <= most for number in numbers)
    assert most == 1 or numbers[-1] == most
