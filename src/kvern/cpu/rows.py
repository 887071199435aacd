"""Rows `[T, width]` that are added, multiplied, widened, put side by side, normalised and activated."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvern.cpu.library import CODE, DTYPES, INTEGER, NUMBER, POINTER, address, function

NORMS = {"rms": 1, "layer": 2}
"""Codes in `sources/norm.h`."""
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4, "clamped_swiglu": 5, "quick_gelu": 6}
"""Codes in `sources/activation.h`."""

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
