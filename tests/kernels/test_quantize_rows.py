"""Activations rounded to one byte beside PyTorch's rounding, and integer products with their scales."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from kvern.formats.scaled import ROWS, Block, Code, Rounding, Scaled, ScaledMethod, rounded, scaled
from kvern.kernels import quantize_rows as rounding_kernels
from kvern.kernels.activation import coded_gated_activation
from kvern.kernels.norm import coded_rms_norm
from kvern.kernels.quantize_rows import Coding, quantize_rows, scale_products
from kvern.layers.build import Build
from kvern.layers.linear import Linear
from kvern.layers.linear_format import LinearMethods
from kvern.layers.linear_method import LinearShape
from tests.support.kernels.references import relative_error

STEP = 2.0**-8


def rows_of(device: torch.device, tokens: int, width: int) -> torch.Tensor:
    """Numbers of e4m3 but for a power of two, the largest among them every eighth: nothing is rounded.

    Triton's interpreter loses a carry where it rounds to e4m3; how a GPU rounds is seen on one.
    """
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(tokens, width, generator=generator).mul(60).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    x[:, ::8] = 448 * torch.randn(tokens, -(-width // 8), generator=generator).sign()
    x[-1] = 0
    x[x.abs() < 1] = 0
    return (x * STEP).to(device)


@pytest.mark.parametrize("code", ["e4m3", "int8"])
@pytest.mark.parametrize(("tokens", "width", "limit"), [(3, 48, None), (2, 5000, None), (4, 130, 0.875)])
def test_each_token_has_the_scale_of_its_largest_number(
    device: torch.device, code: Code, tokens: int, width: int, limit: float | None
) -> None:
    x = rows_of(device, tokens, width)
    codes, scale = quantize_rows(x, code, limit=limit)
    assert scale.shape == (tokens, 1)
    assert torch.equal(codes.float(), scaled(x, code, scale).float())
    assert torch.equal(codes.float() * scale, rounded(x, Rounding(code, limit=limit)))
    assert (codes.float()[-1] == 0).all() and codes.float().abs().max() == (448 if code == "e4m3" else 127)


def test_rows_that_do_not_fit_into_a_program(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    x, static = rows_of(device, 3, 200), torch.tensor([STEP], device=device)
    expected = [quantize_rows(x, "int8"), quantize_rows(x, "int8", static=static)]
    monkeypatch.setattr(rounding_kernels, "BLOCK", 64)
    for whole, parts in zip(expected, (quantize_rows(x, "int8"), quantize_rows(x, "int8", static=static)), strict=True):
        assert torch.equal(whole.codes, parts.codes) and torch.equal(whole.scales, parts.scales)


@pytest.mark.parametrize("code", ["e4m3", "int8"])
@pytest.mark.parametrize(("width", "group"), [(384, 128), (200, 128), (96, 24)])
def test_each_group_of_a_token_has_its_scale(device: torch.device, code: Code, width: int, group: int) -> None:
    x = rows_of(device, 5, width)
    x[:, :group] *= 0.5
    codes, scale = quantize_rows(x, code, group)
    in_columns = quantize_rows(x, code, group, columns=True)[1]
    assert scale.shape == (5, -(-width // group)) and in_columns.stride(0) == 1 and torch.equal(scale, in_columns)
    assert scale[0, 1] / scale[0, 0] == 2
    plain = codes.float() * scale.repeat_interleave(group, 1)[:, :width]
    assert torch.equal(plain, rounded(x, Rounding(code, group)))


@pytest.mark.parametrize("code", ["e4m3", "int8"])
def test_a_scale_may_be_known_before(device: torch.device, code: Code) -> None:
    x, static = rows_of(device, 3, 80), torch.tensor([STEP / 2], device=device)
    codes, scale = quantize_rows(x, code, static=static)
    assert torch.equal(scale, static.expand(3, 1))
    assert torch.equal(codes.float(), scaled(x, code, static).float())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="how a GPU rounds")
@pytest.mark.parametrize("group", [0, 128])
def test_a_gpu_rounds_to_the_nearest_number(group: int) -> None:
    x = torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16)
    codes, scale = quantize_rows(x, "e4m3", group)
    plain = codes.float() * (scale.repeat_interleave(group, 1) if group else scale)
    assert relative_error(plain, rounded(x.float(), Rounding("e4m3", group)).double()) < 1e-3


@pytest.mark.parametrize("biased", [False, True])
def test_integer_products_get_their_scales(device: torch.device, biased: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    products = torch.randint(-90000, 90000, (5, 1100), generator=generator, dtype=torch.int32).to(device)
    by_row, by_output = (torch.rand(size, 1, generator=generator).to(device) for size in (5, 1100))
    bias = torch.randn(1100, generator=generator).to(device) if biased else None
    expected = products.double() * by_row * by_output.T + (0 if bias is None else bias)
    assert relative_error(scale_products(products, by_row, by_output, bias, torch.float32), expected) < 1e-6


FORMS = [
    Scaled("int8", activations=Rounding("int8")),
    Scaled("int8", activations=Rounding("int8"), static=True),
    Scaled("e4m3", activations=Rounding("e4m3")),
    Scaled("e4m3", Block(128, 128), Rounding("e4m3", 128)),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("form", FORMS)
def test_products_of_many_rows(device: torch.device, form: Scaled) -> None:
    """All ways to multiply agree on activations that rounding does not change; on a GPU those of libraries, too."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    build = Build(dtype, device, 1, frozenset({"quantized"}), linear=LinearMethods(form))
    linear = Linear(256, {"o_proj": 128}, build, bias=True)
    method = linear.method
    assert isinstance(method, ScaledMethod) and linear.bias is not None
    linear.fill_random(torch.Generator(device).manual_seed(0))
    method.scale *= torch.rand(method.scale.shape, generator=torch.Generator().manual_seed(1)).to(device) + 0.5
    if form.static:
        method.input_scale.fill_(STEP)
    linear.finish()
    x = rows_of(device, 70, 256)
    if form.code == "int8":
        x = (x.clamp(-127 * STEP, 127 * STEP) / STEP).round() * STEP
    x = x.to(dtype)
    assert torch.equal(method.rounded(x), x)
    expected = x.double() @ method.dequantize().double().T + linear.bias.double()
    ways = method.candidates()[1024]
    assert len(method.own_products()) == (1 if device.type == "cuda" else 0)
    assert set(method.own_products()) <= set(ways)
    assert sum(isinstance(name, tuple) and name[-1] == "codes" for name in ways) == 2
    few = {
        name: way for name, way in method.candidates()[16].items() if isinstance(name, tuple) and name[-1] == "codes"
    }
    assert len(few) == 1
    for name, way in (ways | few).items():
        assert relative_error(way(x, linear.bias), expected) < (1e-5 if device.type == "cpu" else 0.01), name


@pytest.mark.parametrize(("group", "known"), [(0, True), (128, True), (64, False)])
def test_scales_of_short_runs_are_not_for_products_of_codes(device: torch.device, group: int, known: bool) -> None:
    method = ScaledMethod(LinearShape(32, 256, torch.bfloat16, device), Scaled("e4m3", ROWS, Rounding("e4m3", group)))
    assert (method.activation_codes() is not None) == known


def _launch(group: int, code: str, static: bool) -> object:
    x = torch.empty(64, 4096, dtype=torch.bfloat16)
    return quantize_rows(x, code, group, torch.empty(1) if static else None)


def _launch_coded(coding: Coding) -> None:
    x, both = torch.empty(64, 4096, dtype=torch.bfloat16), torch.empty(64, 2 * 14336, dtype=torch.bfloat16)
    coded_rms_norm(x, None, x[0], 1e-6, coding)
    coded_rms_norm(x, x, x[0], 1e-6, coding)
    coded_gated_activation(both, "silu", coding)


LAUNCHES: list[Callable[[], object]] = [
    *(partial(_launch_coded, Coding(code, group)) for code in ("e4m3", "int8") for group in (0, 128)),
    *(
        partial(_launch, group, code, static)
        for code in ("e4m3", "int8")
        for group, static in ((0, False), (0, True), (128, False))
    ),
    lambda: scale_products(
        torch.empty(64, 4096, dtype=torch.int32), torch.empty(64, 1), torch.empty(4096, 1), None, torch.bfloat16
    ),
]
