"""Activations of MLPs."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kvern.cpu.library import CODE, DTYPES, INTEGER, POINTER, close_to, function

KINDS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4, "clamped_swiglu": 5}
"""Codes in `sources/activation.cpp`."""

_activation = function("kvern_activation", POINTER, POINTER, INTEGER, INTEGER, CODE, CODE, CODE)


def activate(x: Tensor, kind: int, gated: bool) -> Tensor:
    """`activation(x)`, or where `gated` that of the first half of each row times the second.

    "clamped_swiglu" is one of both halves together, see `MoeSpec`.

    x        [T, width] or [T, 2 * width], float32 or bfloat16
    kind     of `KINDS`
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
            close_to(activate(x, KINDS[kind], True), expected * up)
            close_to(activate(x[:, :width], KINDS[kind], False), expected)
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        close_to(activate(x, KINDS["clamped_swiglu"], True), gate * (1.702 * gate).sigmoid() * (up + 1))
