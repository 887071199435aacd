"""Random experts and the reference result of an MoE layer."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from kvern.spec.model import MoeSpec

REFERENCES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "clamped_swiglu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu2": lambda x: x.relu().square(),
}
"""Activations of gates; for "clamped_swiglu" both operands are clamped before."""
Biases = tuple[torch.Tensor, torch.Tensor] | None


def make_biases(experts: int, hidden: int, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Biases of gate and up, some of which are clamped, and of down."""
    generator = torch.Generator().manual_seed(9)
    shapes = ((experts, 2 * width), 6.0), ((experts, hidden), 1.0)
    first, second = ((scale * torch.randn(shape, generator=generator)).to(device) for shape, scale in shapes)
    return first, second


def experts_reference(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    activation: str,
    biases: Biases = None,
) -> torch.Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token, experts in enumerate(chosen.tolist()):
        for choice, expert in enumerate(experts):
            first, second = (0, 0) if biases is None else (bias[expert].double() for bias in biases)
            product = gate_up[expert].double() @ x[token].double() + first
            gate, up = product.chunk(2) if gate_up.shape[1] > down.shape[2] else (product, torch.ones_like(product))
            if activation == "clamped_swiglu":
                gate, up = gate.clamp(max=7), up.clamp(-7, 7) + 1
            part = down[expert].double() @ (REFERENCES[activation](gate) * up) + second
            out[token] += weights[token, choice].double() * part
    return out


Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def make_case(
    device: torch.device,
    tokens: int,
    experts: int,
    top_k: int,
    hidden: int,
    width: int,
    dtype: torch.dtype,
    seed: int = 0,
) -> Case:
    """Random experts, tokens in rows with gaps; the last expert gets no token if it can be helped."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden + 8, generator=generator)
    gate_up = torch.randn(experts, 2 * width, hidden, generator=generator) / hidden**0.5
    down = torch.randn(experts, hidden, width, generator=generator) / width**0.5
    scores = torch.rand(tokens, experts, generator=generator)
    scores[:, -1] = -1
    weights, chosen = scores.topk(top_k)
    x, gate_up, down = (tensor.to(dtype).to(device) for tensor in (x, gate_up, down))
    return x[:, :hidden], gate_up, down, weights.to(device), chosen.int().to(device)


SPECS = {
    "softmax": MoeSpec(6, 3, 24),
    "not renormalized": MoeSpec(6, 2, 24, activation="gelu_tanh", renormalize=False, routed_scale=1.5),
    "sigmoid": MoeSpec(6, 3, 24, scoring="sigmoid", routed_scale=2.5, shared_width=16),
    "shared": MoeSpec(5, 2, 24, shared_width=40, shared_gate=True),
    "relu": MoeSpec(5, 2, 24, activation="relu"),
}
