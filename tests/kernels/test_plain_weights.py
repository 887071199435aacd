"""Runs of rows of quantized weights made plain, beside the numbers that they stand for, and products with them."""

import os
from collections.abc import Callable
from functools import partial

import pytest
import torch

from kvern.formats.gpu.candidates import PlainRuns
from kvern.kernels.arrange import arrange
from kvern.kernels.codes import readable
from kvern.kernels.plain_weights import INPUTS, RUN_ROWS, plain_product, plain_weights
from tests.kernels.packed_weights import KINDS, LARGE_BLOCKS, made_layer, make_packed, to_device
from tests.support.kernels.references import relative_error

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
ON_GPU = pytest.mark.parametrize("device", [pytest.param(torch.device("cuda"), marks=on_gpu)])

COMPILED = ("int4 zero", "e4m3 row", "nvfp4", "gguf q4_k", "gguf q6_k")
LAUNCHES: list[Callable[[], object]] = []
if os.environ.get("TRITON_INTERPRET") != "1":
    LAUNCHES += [
        partial(
            plain_weights, make_packed(kind, 64, 1024, group=128).packed, 0, torch.empty(64, 1024, dtype=torch.bfloat16)
        )
        for kind in COMPILED
    ]


def poisoned(rows: int, inputs: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((rows, inputs), float("nan"), dtype=dtype, device=device)


@pytest.mark.parametrize("kind", KINDS)
def test_some_rows(kind: str, device: torch.device) -> None:
    """As many as fill no tile, of inputs that fill no step where the code may have such; what is behind them stays."""
    inputs = 2 * INPUTS if kind in LARGE_BLOCKS else INPUTS + 64
    made = make_packed(kind, 23, inputs)
    out = poisoned(20, inputs, torch.float32, device)
    plain_weights(readable(to_device(made.packed, device)), 3, out[:19])
    torch.testing.assert_close(out[:19].double(), made.plain[3:22].to(device), rtol=1e-3, atol=1e-5)
    assert out[19:].isnan().all()


@pytest.mark.parametrize("numbers", [1, 1 << 20])
def test_products_by_runs(numbers: int, device: torch.device) -> None:
    outputs, inputs = RUN_ROWS + 9, 192
    made = make_packed("int4 zero", outputs, inputs, order=True)
    packed = to_device(made.packed, device)
    x, bias = torch.randn(7, inputs, device=device), torch.randn(outputs, device=device)
    out = plain_product(arrange(x, packed.order, ""), packed, bias, numbers)
    assert relative_error(out, x.double() @ made.plain.to(device).T + bias.double()) < 1e-4


@ON_GPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_every_code(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    """Whole matrices of odd rows, beside what is rounded once; then a product in memory that was no number."""
    inputs = 4096 if dtype == torch.bfloat16 else 1280 if kind in LARGE_BLOCKS else 1312
    made = make_packed(kind, 1031, inputs)
    packed, plain = readable(to_device(made.packed, device)), made.plain.to(device)
    out = plain_weights(packed, 5, poisoned(1021, inputs, dtype, device))
    expected = plain[5:1026]
    most = torch.finfo(dtype).eps * expected.abs() + float(expected.abs().max()) * 2e-4
    assert ((out.double() - expected).abs() <= most).all()
    torch.full((1 << 24,), float("nan"), device=device)
    x = torch.randn(77, inputs, device=device).to(dtype)
    bias = torch.randn(1031, device=device).to(dtype)
    found = plain_product(x, packed, bias, 512 * inputs)
    assert relative_error(found, x.double() @ plain.T + bias.double()) < 0.01


@ON_GPU
@pytest.mark.parametrize("kind", ["int4 zero", "gguf q4_k"])
def test_a_layer_in_a_graph(kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several runs; computed again it is the same, and follows its input."""
    monkeypatch.setattr("kvern.formats.gpu.candidates.FLOAT32_CANDIDATES", {1024: (PlainRuns(256 * 1024),)})
    made = make_packed(kind, 640, 1024)
    linear = made_layer(made, device)
    x = torch.randn(200, 1024, device=device)
    expected = linear(x).clone()
    assert relative_error(expected, x.double() @ made.plain.to(device).T) < 1e-4
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):  # see `time_calls`
        out = linear(x)
    for sign in (1, -1):
        out.fill_(float("nan"))
        graph.replay()
        torch.testing.assert_close(out, sign * expected, rtol=1e-4, atol=1e-4)
        x.neg_()
