"""Rows `[T, width]` that are added, multiplied, widened, put side by side, normalised and activated."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kvern.cpu.library import CODE, DTYPES, INTEGER, NUMBER, POINTER, address, close_to, function

NORMS = {"rms": 1, "layer": 2}
"""Codes in `sources/norm.h`."""
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4, "clamped_swiglu": 5}
"""Codes in `sources/activation.cpp`."""

_add = function("kvern_add", POINTER, POINTER, INTEGER, CODE)
_scale = function("kvern_scale", POINTER, NUMBER, INTEGER, CODE)
_widen = function("kvern_widen", POINTER, POINTER, INTEGER, CODE)
_put_rows = function("kvern_put_rows", POINTER, POINTER, INTEGER, INTEGER, INTEGER, INTEGER)
_norm = function("kvern_norm", POINTER, POINTER, POINTER, POINTER, POINTER, INTEGER, INTEGER, NUMBER, CODE, CODE)
_activation = function("kvern_activation", POINTER, POINTER, INTEGER, INTEGER, CODE, CODE, CODE)


def add(x: Tensor, added: Tensor) -> Tensor:
    """Adds `added`, of the same shape and dtype, to x, contiguous float32 or bfloat16, in place; returns x."""
    assert x.is_contiguous()
    added = added.contiguous()
    _add(x.data_ptr(), added.data_ptr(), x.numel(), DTYPES[x.dtype])
    return x


def scale(x: Tensor, factor: float) -> Tensor:
    """Multiplies contiguous x, float32 or bfloat16, in place; returns x."""
    assert x.is_contiguous()
    _scale(x.data_ptr(), factor, x.numel(), DTYPES[x.dtype])
    return x


def widened(x: Tensor) -> Tensor:
    """Converts float32 or bfloat16 to float32."""
    x, out = x.contiguous(), torch.empty(x.shape)
    _widen(x.data_ptr(), out.data_ptr(), x.numel(), DTYPES[x.dtype])
    return out


def beside(parts: Sequence[Tensor]) -> Tensor:
    """Concatenates parts `[T, width]` of one dtype, with any row strides: `[T, sum of widths]`."""
    rows, size = parts[0].shape[0], parts[0].itemsize
    width = sum(part.shape[1] for part in parts)
    out = torch.empty(rows, width, dtype=parts[0].dtype)
    place = out.data_ptr()
    for part in parts:
        part = part if part.stride(1) == 1 else part.contiguous()
        taken = part.shape[1] * size
        _put_rows(part.data_ptr(), place, rows, taken, part.stride(0) * size, width * size)
        place += taken
    return out


def add_norm(
    hidden: Tensor, update: Tensor | None, weight: Tensor | None, bias: Tensor | None, epsilon: float, kind: int
) -> Tensor:
    """Add `update` to `hidden` in place, if there is one, and return the norm of the sum.

    hidden, update  [T, width] float32 or bfloat16; hidden without gaps
    weight, bias    [width] float32
    kind            of `NORMS`
    returns         the same shape and dtype as hidden; sums and products in float32
    """
    out = torch.empty_like(hidden)
    rows, width = hidden.shape
    if update is not None:
        update = update.contiguous()
    _norm(
        hidden.data_ptr(), address(update), address(weight), address(bias), out.data_ptr(), rows, width, epsilon, kind,
        DTYPES[hidden.dtype],
    )  # fmt: skip
    return out


def activate(x: Tensor, kind: int, gated: bool) -> Tensor:
    """`activation(x)`, or where `gated` that of the first half of each row times the second.

    "clamped_swiglu" is one of both halves together, see `MoeSpec`.

    x        [T, width] or [T, 2 * width], float32 or bfloat16
    kind     of `ACTIVATIONS`
    returns  [T, width] in the dtype of x, computed in float32
    """
    x = x.contiguous()
    rows, width = x.shape
    width = width // 2 if gated else width
    out = x.new_empty((rows, width))
    _activation(x.data_ptr(), out.data_ptr(), rows, width, kind, gated, DTYPES[x.dtype])
    return out


def check() -> None:
    """Compare with PyTorch. Raises AssertionError."""
    generator = torch.Generator().manual_seed(0)
    _check_elementwise(generator)
    _check_norms(generator)
    _check_activations(generator)


def _check_elementwise(generator: torch.Generator) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x, added = torch.randn(2, 13, 389, generator=generator).to(dtype)
        close_to(add(x.clone(), added), x.double() + added)
        close_to(scale(x.clone(), 1.375), x.double() * 1.375)
        assert torch.equal(widened(x), x.float()), "widened numbers are others"
        parts = (x, x[:, :7], added)
        assert torch.equal(beside(parts), torch.cat(parts, -1)), "rows stand elsewhere"


def _check_norms(generator: torch.Generator) -> None:
    for dtype, width in ((torch.float32, 72), (torch.bfloat16, 389)):
        hidden, update = torch.randn(2, 19, width, generator=generator).to(dtype)
        weight, bias = torch.randn(2, width, generator=generator)
        total = hidden + update
        expected = F.rms_norm(total.double(), (width,), weight.double(), 1e-5)
        close_to(add_norm(hidden, update, weight, None, 1e-5, NORMS["rms"]), expected)
        assert torch.equal(hidden, total), "the sum is wrong"
        expected = F.layer_norm(total.double(), (width,), weight.double(), bias.double(), 1e-5)
        close_to(add_norm(hidden, None, weight, bias, 1e-5, NORMS["layer"]), expected)


def _check_activations(generator: torch.Generator) -> None:
    for dtype, width in ((torch.float32, 72), (torch.bfloat16, 389)):
        x = (3 * torch.randn(19, 2 * width, generator=generator)).to(dtype)
        gate, up = x.double().chunk(2, -1)
        for kind, expected in (
            ("silu", F.silu(gate)),
            ("gelu", F.gelu(gate)),
            ("gelu_tanh", F.gelu(gate, approximate="tanh")),
            ("relu", F.relu(gate)),
            ("relu2", F.relu(gate).square()),
        ):
            close_to(activate(x, ACTIVATIONS[kind], True), expected * up)
            close_to(activate(x[:, :width], ACTIVATIONS[kind], False), expected)
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        close_to(activate(x, ACTIVATIONS["clamped_swiglu"], True), gate * (1.702 * gate).sigmoid() * (up + 1))
