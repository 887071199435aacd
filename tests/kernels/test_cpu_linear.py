"""Products with packed plain weights on a CPU, beside float64."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from kvern.cpu.linear import gated_linear, linear, linear_heads, pack, pack_heads, unpack
from kvern.cpu.rows import ACTIVATIONS
from kvern.layers.build import Build
from kvern.layers.embedding import Embedding
from kvern.layers.expert_choice import make_experts
from kvern.layers.linear import Linear
from kvern.layers.linear_method import LinearShape
from kvern.layers.ops import TORCH
from kvern.layers.unquantized import compiles
from kvern.spec.model import Activation, MoeSpec
from tests.support.cache_folder import load_kernels, pretend_tiles

DTYPES = (torch.float32, torch.bfloat16)
PLAIN = Build(torch.float64, torch.device("cpu"), 1)
SHAPES = ((16, 2), (1, 1), (17, 31), (64, 64), (200, 33), (333, 1030), (48, 2053))
"""Outputs and inputs: whole blocks, ragged ones, an odd number of inputs, more than are summed at a time."""


def use_threads(threads: int) -> None:
    load_kernels("cpu_linear", threads)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    use_threads(1)
    yield
    use_threads(1)


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def relative_error(out: Tensor, expected: Tensor) -> float:
    return float((out.double() - expected).norm() / expected.norm())


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """New tensors hold NaN."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: empty(*size, **options).fill_(float("nan")))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.usefixtures("poisoned")
def test_products_are_those_of_float64(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    weight, bias = random(outputs, inputs, dtype=dtype), random(outputs, dtype=dtype)
    packed = pack(weight)
    for rows in (1, 2, 3, 5, 6, 7, 13, 49, 101):
        x = random(rows, inputs, dtype=dtype)
        expected = x.double() @ weight.double().T
        tolerance = 2e-6 if dtype is torch.float32 else 3e-3
        assert relative_error(linear(x, packed, None), expected) < tolerance
        assert relative_error(linear(x, packed, bias), expected + bias.double()) < tolerance
        assert relative_error(linear(x, packed, bias, torch.float32), expected + bias.double()) < 2e-6


@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name != "clamped_swiglu"])  # of experts alone
@pytest.mark.parametrize(("dtype", "width", "inputs"), [(torch.float32, 17, 33), (torch.bfloat16, 200, 1030)])
@pytest.mark.usefixtures("poisoned")
def test_gates_are_activated_in_the_product(
    activation: Activation, dtype: torch.dtype, width: int, inputs: int
) -> None:
    weight, bias = random(2 * width, inputs, dtype=dtype) / 9, random(2 * width, dtype=dtype)
    packed = pack(weight, gated=True)
    assert torch.equal(unpack(packed), weight)
    for rows in (1, 8, 61):
        x = random(rows, inputs, dtype=dtype)
        assert torch.equal(linear(x, packed, bias), linear(x, pack(weight), bias))
        expected = TORCH.gated_activation(activation)(x.double() @ weight.double().T + bias.double())
        found = gated_linear(x, packed, bias, ACTIVATIONS[activation])
        assert relative_error(found, expected) < (1e-5 if dtype is torch.float32 else 3e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_a_packed_matrix_gives_back_its_rows(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    weight = random(outputs, inputs, dtype=dtype)
    packed = pack(weight)
    assert torch.equal(unpack(packed), weight)
    ids = torch.randint(outputs, (9, 2), generator=torch.Generator().manual_seed(1))[:, 0]
    assert torch.equal(unpack(packed, ids), weight[ids])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_beside_any_rows_and_with_any_threads(dtype: torch.dtype) -> None:
    weight, x = random(334, 1030, dtype=dtype), random(101, 1030, dtype=dtype)
    packed = pack(weight, gated=True)
    alone = torch.cat([linear(row, packed, None) for row in x.split(1)])
    gated = torch.cat([gated_linear(row, packed, None, ACTIVATIONS["silu"]) for row in x.split(1)])
    for threads, rows in product((1, 2, 5), (2, 3, 4, 5, 6, 7, 16, 49, 101)):
        use_threads(threads)
        assert torch.equal(linear(x[-rows:], packed, None), alone[-rows:])
        assert torch.equal(gated_linear(x[-rows:], packed, None, ACTIVATIONS["silu"]), gated[-rows:])


@pytest.mark.sample(5)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.usefixtures("poisoned")
def test_heads_are_multiplied_by_matrices_of_their_own(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    weights = random(3, outputs, inputs, dtype=dtype)
    packed = pack_heads(weights.transpose(1, 2).contiguous().transpose(1, 2))
    for rows in (0, 1, 5, 101):
        x = random(rows, 3, inputs + 7, dtype=dtype)[..., :inputs]
        expected = torch.stack([linear(x[:, head], pack(weights[head]), None) for head in range(3)], 1)
        for threads in (1, 3):
            use_threads(threads)
            assert torch.equal(linear_heads(packed, x), expected)
    assert torch.equal(linear_heads(packed, x.transpose(1, 2).contiguous().transpose(1, 2)), expected)


def test_rows_with_gaps_and_none_at_all() -> None:
    weight, wide = random(20, 12, dtype=torch.bfloat16), random(5, 24, dtype=torch.bfloat16)
    packed = pack(weight)
    assert torch.equal(linear(wide[:, 12:], packed, None), linear(wide[:, 12:].contiguous(), packed, None))
    assert linear(wide[:0, 12:], packed, None).shape == (0, 20)


def test_numbers_that_are_none_stay_within_their_row() -> None:
    weight, x = random(20, 13, dtype=torch.bfloat16), random(7, 13, dtype=torch.bfloat16)
    packed = pack(weight)
    expected = linear(x, packed, None)
    x[3, 5] = float("nan")
    found = linear(x, packed, None)
    assert found[3].isnan().all()
    assert torch.equal(found[:3], expected[:3])
    assert torch.equal(found[4:], expected[4:])


def made(build: Build) -> tuple[Embedding, Linear, Tensor]:
    """An embedding and the head that shares its matrix, and the matrix."""
    embedding = Embedding(50, 24, 1.0, build)
    head = Linear(24, {"lm_head": 50}, build, method=embedding.method)
    weight = random(50, 24, dtype=build.dtype)
    embedding.load("embed_tokens.weight", weight)
    embedding.finish()
    return embedding, head, weight


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tied_head_multiplies_the_matrix_that_embeddings_are_read_from(dtype: torch.dtype) -> None:
    build = Build(dtype, torch.device("cpu"), 8, frozenset({"cpu_linear"}), deterministic=True)
    embedding, head, weight = made(build)
    assert list(embedding.method.parameters()) == []  # the plain matrix is gone
    assert torch.equal(embedding(torch.tensor([3, 49, 3])), weight[[3, 49, 3]])
    assert torch.equal(head.method.dequantize(), weight)
    x = random(3, 24, dtype=dtype)
    scores = head.scores(x)
    assert scores.dtype == torch.float32
    assert relative_error(scores, x.double() @ weight.double().T) < 1e-6
    assert torch.equal(head(x), scores.to(dtype))


def test_tiles_multiply_where_a_row_may_depend_on_others(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_tiles(monkeypatch, there=True)
    build = Build(torch.bfloat16, torch.device("cpu"), 8, frozenset({"cpu_linear"}))
    shape = LinearShape(16, 8, torch.bfloat16, build.device)
    assert not compiles(shape, build)
    pretend_tiles(monkeypatch, there=True, own=True)
    assert compiles(shape, build)
    pretend_tiles(monkeypatch, there=True)
    assert compiles(shape, replace(build, deterministic=True))
    assert compiles(shape._replace(dtype=torch.float32), build)
    assert not compiles(shape._replace(dtype=torch.float16), replace(build, deterministic=True))


def test_experts_are_multiplied_packed() -> None:
    spec = MoeSpec(experts=3, top_k=2, width=20, activation="silu")
    build = Build(torch.float32, torch.device("cpu"), 8, frozenset({"cpu_linear"}))
    packed, plain = (
        make_experts(24, spec, replace(build, kernels=names)) for names in (build.kernels, frozenset[str]())
    )
    for name, shape in plain.parts().items():
        weight = random(*shape, dtype=torch.float32) / 5
        packed.load(name, weight)
        plain.load(name, weight)
    packed.finish()
    assert list(packed.parameters()) == []
    x, weights, ids = random(5, 24, dtype=torch.float32), torch.rand(5, 2), torch.tensor([[0, 2]] * 5)
    torch.testing.assert_close(packed(x, weights, ids), plain(x, weights, ids))
