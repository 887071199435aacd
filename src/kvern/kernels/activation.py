"""The gated activation between the two products of an MLP, as numbers or rounded to codes."""

import torch
import triton
import triton.language as tl

from kvern.kernels.launch import Launcher, cdiv, next_power_of_2, wait_for_previous
from kvern.kernels.quantize_rows import Coding, RowCodes, Strides, Target, store_codes

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
"""Activations of gated MLPs; others run in PyTorch. Experts have more, see `kernels/moe.py`."""


@triton.jit
def activate(x, KIND: tl.constexpr):
    """An activation of float32 values."""
    if KIND == "silu":
        return x / (1.0 + tl.exp(-x))
    if KIND == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    if KIND == "gelu_tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x / (1.0 + tl.exp(-2.0 * inner))
    x = tl.maximum(x, 0.0)
    return x * x if KIND == "relu2" else x


@triton.jit
def activate_gated(gate, up, KIND: tl.constexpr):
    """Returns the activated product of float32 values; for experts also "clamped_swiglu", see `MoeSpec`."""
    if KIND == "clamped_swiglu":
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0)
        return gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)
    else:
        return activate(gate, KIND) * up


@Launcher
@triton.jit
def _gated_activation_kernel(
    gate_up: tl.tensor, out: tl.tensor, width, KIND: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, (activate(gate, KIND) * up).to(out.dtype.element_ty), mask=inside)


@Launcher
@triton.jit(do_not_specialize=["strides"])
def _coded_activation_kernel(
    gate_up: tl.tensor,
    target: Target,
    strides: Strides,
    width,
    KIND: tl.constexpr,
    RULE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A row is a program's, because its largest number has to be known; it is rounded to the dtype of x before."""
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    activated = (activate(gate, KIND) * up).to(gate_up.dtype.element_ty).to(tl.float32)
    store_codes(activated, row, column, width, target, strides, RULE)


def coded_gated_activation(gate_up: torch.Tensor, activation: str, coding: Coding) -> RowCodes:
    """Returns `gated_activation` as coded by `coding`, bit for bit, in one launch except for very long rows."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    block = coding.block(width)
    if not block:
        return coding(gated_activation(gate_up, activation))
    made = coding.empty(tokens, width, gate_up.device)
    target, strides, rule = coding.arguments(made)
    _coded_activation_kernel[(tokens,)](
        gate_up, target, strides, width, activation, rule, block, num_warps=min(16, max(1, block // 1024))
    )
    return made


def gated_activation(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """`activation(gate) * up` in float32: [T, 2 * width], gate first -> [T, width]. Moves both once."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, next_power_of_2(width))
    _gated_activation_kernel[(tokens, cdiv(width, block))](gate_up, out, width, activation, block, num_warps=4)
    return out
