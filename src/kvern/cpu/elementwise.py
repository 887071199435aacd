"""Rows that are added, multiplied, widened and put side by side."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvern.cpu.library import CODE, DTYPES, INTEGER, NUMBER, POINTER, close_to, function

_add = function("kvern_add", POINTER, POINTER, INTEGER, CODE)
_scale = function("kvern_scale", POINTER, NUMBER, INTEGER, CODE)
_widen = function("kvern_widen", POINTER, POINTER, INTEGER, CODE)
_put_rows = function("kvern_put_rows", POINTER, POINTER, INTEGER, INTEGER, INTEGER, INTEGER)


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


def check() -> None:
    """Compare with PyTorch. Raises AssertionError."""
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        x, added = torch.randn(2, 13, 389, generator=generator).to(dtype)
        close_to(add(x.clone(), added), x.double() + added)
        close_to(scale(x.clone(), 1.375), x.double() * 1.375)
        assert torch.equal(widened(x), x.float()), "widened numbers are others"
        parts = (x, x[:, :7], added)
        assert torch.equal(beside(parts), torch.cat(parts, -1)), "rows stand elsewhere"
