"""Quantized layers in the engine whose batch lives on the device: kernels of their own, fused for a single token."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvern.formats.gpu.candidates import STREAMS, candidates_of
from kvern.formats.gpu.products import PackedProducts
from kvern.kernels.launch import cdiv
from kvern.kernels.linear import Around, MatmulShape
from kvern.layers.linear_method import LinearShape
from kvern.layers.tuned_linear import MOST_TILES
from kvern.layers.tuning import tune
from tests.kernels.packed_weights import MadeMethod, made_layer, make_packed


@pytest.mark.parametrize(("kind", "order"), [("int4 zero", False), ("int4", True), ("e4m3 blocks", False)])
def test_products_of_any_number_of_rows(kind: str, order: bool, device: torch.device) -> None:
    made = make_packed(kind, 40, 256, order=order)
    linear = made_layer(made, device)
    for rows in (1, 5, 70):
        x = torch.randn(rows, 256, device=device)
        expected = x.double() @ made.plain.to(device).T
        torch.testing.assert_close(linear(x).double(), expected, rtol=1e-4, atol=1e-4)
    assert (linear.row_product() is None) == order
    ids = torch.tensor([3, 0], device=device)
    assert torch.equal(linear.method.embed(ids), made.plain[ids.cpu()].float().to(device))


def test_every_candidate_is_timed_and_right(device: torch.device) -> None:
    made = make_packed("int4", 40, 256)
    linear = made_layer(made, device)
    chosen: list[object] = []

    def clock(calls: list[Callable[[], Tensor]]) -> float:
        chosen.append(calls[0]())
        return float(len(chosen))

    several = [rows for rows, ways in linear.method.candidates().items() if len(ways) > 1]
    assert set(tune(linear, clock, {})) == {f"made, 40 x 256, torch.float32, {rows} rows" for rows in several}
    x = torch.randn(3, 256, device=device)
    for rows, ways in linear.method.candidates().items():
        for name, way in ways.items():
            expected = x[: min(rows, 3)].double() @ made.plain.to(device).T
            torch.testing.assert_close(way(x[: min(rows, 3)], None).double(), expected, rtol=1e-4, atol=1e-4)
            linear.method.choose(rows, name)


def test_many_rows_are_timed_over_few_layers(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvern.layers.tuning.TIMED_ROWS", 16)
    made = make_packed("int4", 40, 256)
    seen: dict[int, int] = {}

    def clock(calls: list[Any]) -> float:
        seen[len(calls[0].args[-2])] = len(calls)
        return 1.0

    tune(nn.ModuleList([made_layer(made, device), made_layer(made, device)]), clock, {})
    assert seen == {1: 2, 16: 1}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_largest_heads_have_counters_for_every_tile_of_a_split_product(dtype: torch.dtype) -> None:
    for rows, shapes in candidates_of(dtype).items():
        for shape in shapes:
            if isinstance(shape, MatmulShape) and shape.splits > 1:
                assert cdiv(262144, shape.outputs) * cdiv(rows, shape.rows) <= MOST_TILES
    for rows, streams in STREAMS.items():
        for stream in streams:
            parts = 262144 // stream.outputs * cdiv(rows, stream.rows) * stream.outputs // 64
            assert stream.splits == 1 or 2 * parts <= MOST_TILES


def test_four_bits_are_streamed_on_hopper_where_triton_would_make_them_plain(device: torch.device) -> None:
    method = MadeMethod(LinearShape(512, 4096, torch.bfloat16, device), make_packed("int4 zero", 512, 4096, 128))
    offered = PackedProducts(method, False, True).candidates()
    for rows, streams in STREAMS.items():
        assert set(offered[rows]) - {(1 << 26,), (1 << 25,)} == {tuple(stream) for stream in streams}
    other = MadeMethod(LinearShape(512, 4096, torch.bfloat16, device), make_packed("nf4", 512, 4096, 64))
    assert PackedProducts(other, False, True).candidates().keys() == offered.keys()
    assert set(PackedProducts(other, False, True).candidates()[64]) == {
        tuple(s) for s in candidates_of(torch.bfloat16)[64]
    }


def test_a_head_is_not_timed_with_results_larger_than_its_weights(device: torch.device) -> None:
    method = MadeMethod(LinearShape(128256, 256, torch.bfloat16, device), make_packed("int4", 40, 256))
    assert set(PackedProducts(method, False, False).candidates()) == {1, 8, 16, 32, 64, 128, 256, 1024}


def test_deterministic_products_do_not_depend_on_the_rows(device: torch.device) -> None:
    linear = made_layer(make_packed("int4", 40, 256), device, deterministic=True)
    x = torch.randn(50, 256, device=device)
    whole = linear(x)
    assert torch.equal(linear(x[7:8]), whole[7:8]) and torch.equal(linear(x[30:]), whole[30:])
    assert not linear.method.candidates()


def test_a_formats_own_products_are_timed_beside_the_kernels(device: torch.device) -> None:
    linear = made_layer(make_packed("int4", 40, 256), device)
    method = linear.method
    method.own_products = lambda: {"own": lambda x, bias: x[:, :40] * 0 + 7}  # type: ignore[method-assign,assignment]
    assert "own" in method.candidates()[1024] and "own" not in method.candidates()[16]
    method.choose(1024, "own")
    assert (linear(torch.randn(2000, 256, device=device)) == 7).all()


def test_one_row_with_what_is_around_it(device: torch.device) -> None:
    made = make_packed("mxfp4", 40, 256)
    product = made_layer(made, device).row_product()
    assert product is not None and made_layer(made, device, kernels=False).row_product() is None
    x, residual = torch.randn(1, 256, device=device), torch.randn(1, 40, device=device)
    expected = x.double() @ made.plain.to(device).T + residual.double()
    torch.testing.assert_close(product(x, around=Around(residual=residual)).double(), expected, rtol=1e-4, atol=1e-4)
