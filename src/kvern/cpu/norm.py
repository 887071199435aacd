"""Norms."""

import torch
from torch import Tensor

from kvern.cpu.library import CODE, DTYPES, INTEGER, NUMBER, POINTER, address, close_to, function

KINDS = {"rms": 1, "layer": 2}
"""Codes in `sources/norm.h`."""

_norm = function("kvern_norm", POINTER, POINTER, POINTER, POINTER, POINTER, INTEGER, INTEGER, NUMBER, CODE, CODE)


def add_norm(
    hidden: Tensor, update: Tensor | None, weight: Tensor | None, bias: Tensor | None, epsilon: float, kind: int
) -> Tensor:
    """Add `update` to `hidden` in place, if there is one, and return the norm of the sum.

    hidden, update  [T, width] float32 or bfloat16; hidden without gaps
    weight, bias    [width] float32
    kind            of `KINDS`
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


def check() -> None:
    """Compare with PyTorch. Raises AssertionError."""
    generator = torch.Generator().manual_seed(0)
    for dtype, width in ((torch.float32, 72), (torch.bfloat16, 389)):
        hidden, update = torch.randn(2, 19, width, generator=generator).to(dtype)
        weight, bias = torch.randn(2, width, generator=generator)
        total = hidden + update
        expected = torch.nn.functional.rms_norm(total.double(), (width,), weight.double(), 1e-5)
        close_to(add_norm(hidden, update, weight, None, 1e-5, KINDS["rms"]), expected)
        assert torch.equal(hidden, total), "the sum is wrong"
        expected = torch.nn.functional.layer_norm(total.double(), (width,), weight.double(), bias.double(), 1e-5)
        close_to(add_norm(hidden, None, weight, bias, 1e-5, KINDS["layer"]), expected)
