"""The operations that layers call: PyTorch's, those of Triton kernels, or those of kernels for CPUs."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvern.spec.model import SWIGLU_LIMIT, SWIGLU_SLOPE, Activation

Function = Callable[[Tensor], Tensor]
"""A function of rows `[T, width]`."""


class Ops(NamedTuple):
    """The operations of one build, by what they do. An operation that is None is computed by the layer in PyTorch.

    add, scale, beside      of rows `[T, width]`; the contents of the first operand may be gone afterwards
    activation              the function of an activation's name: `[T, width] -> [T, width]`
    gated_activation        likewise `activation(gate) * up`: `[T, 2 * width] -> [T, width]`, gate and up
    fused_activation        the same as one launch; None for what no kernel computes
    coded_activation        `(gate_up, name, coding)`: the codes that a product multiplies in the place of its result
    norm, coded_norm        `(hidden, update or None, weight, epsilon)`: the root-mean-square norm of the sum, which is
                            written to `hidden`; with a last argument `coding` the codes of it
    any_norm                `(hidden, update or None, weight, bias, epsilon, kind)`, a norm of either kind, likewise
    store_latents           norm, rotation and cache write of latent attention, see `kernels/store_latents.py`
    route                   `(logits, top_k, renormalize, scale, counts, slots)`: the choice of experts
    """

    add: Callable[[Tensor, Tensor], Tensor]
    scale: Callable[[Tensor, float], Tensor]
    beside: Callable[[Sequence[Tensor]], Tensor]
    activation: Callable[[Activation], Function]
    gated_activation: Callable[[Activation], Function]
    fused_activation: Callable[[Activation], Function | None] = lambda name: None
    coded_activation: Callable[..., Any] | None = None
    norm: Callable[..., Tensor] | None = None
    coded_norm: Callable[..., Any] | None = None
    any_norm: Callable[..., Tensor] | None = None
    store_latents: Callable[..., None] | None = None
    route: Callable[..., tuple[Tensor, Tensor]] | None = None


@cache
def ops_of(kernels: frozenset[str]) -> Ops:
    """The operations of a build with these groups of kernels."""
    ops = TORCH
    for group, operations in GROUPS.items():
        if group in kernels:
            ops = ops._replace(**operations())
    return ops


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * (1.702 * x).sigmoid()


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: Mapping[Activation, Function] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "relu2": _squared_relu,
}


def _clamped_swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return (gate * SWIGLU_SLOPE).sigmoid_().mul_(gate).mul_(up + 1)


def _gated(name: Activation) -> Function:
    if name == "clamped_swiglu":
        return _clamped_swiglu
    activation = ACTIVATIONS[name]

    def gated(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return activation(gate).mul_(up)

    return gated


TORCH = Ops(torch.add, torch.mul, partial(torch.cat, dim=-1), ACTIVATIONS.__getitem__, _gated)


def _compiled() -> Mapping[str, Any]:
    from kvern.cpu import rows

    def activate(gated: bool, name: Activation) -> Function:
        return partial(rows.activate, kind=rows.ACTIVATIONS[name], gated=gated)

    def any_norm(
        hidden: Tensor, update: Tensor | None, weight: Tensor | None, bias: Tensor | None, epsilon: float, kind: str
    ) -> Tensor:
        return rows.add_norm(hidden, update, weight, bias, epsilon, rows.NORMS[kind])

    return {
        "add": rows.add,
        "scale": rows.scale,
        "beside": rows.beside,
        "activation": partial(activate, False),
        "gated_activation": partial(activate, True),
        "any_norm": any_norm,
    }


def _triton_activation() -> Mapping[str, Any]:
    from kvern.kernels.activation import coded_gated_activation, gated_activation

    def fused(name: Activation) -> Function | None:
        return None if name in ("relu2", "quick_gelu") else partial(gated_activation, activation=name)

    return {"fused_activation": fused, "coded_activation": coded_gated_activation}


def _triton_norm() -> Mapping[str, Any]:
    from kvern.kernels.norm import add_any_norm, add_rms_norm, coded_rms_norm, rms_norm

    def norm(hidden: Tensor, update: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
        if update is None:
            return rms_norm(hidden, weight, epsilon)
        return add_rms_norm(hidden, update, weight, epsilon)

    return {"norm": norm, "coded_norm": coded_rms_norm, "any_norm": add_any_norm}


def _triton_latents() -> Mapping[str, Any]:
    from kvern.kernels.store_latents import store_latents

    return {"store_latents": store_latents}


def _triton_route() -> Mapping[str, Any]:
    from kvern.kernels.moe import route

    return {"route": route}


GROUPS: Mapping[str, Callable[[], Mapping[str, Any]]] = {
    "cpu_layers": _compiled,
    "activation": _triton_activation,
    "norm": _triton_norm,
    "rotary": _triton_latents,
    "moe": _triton_route,
}
"""The operations of each group of kernels; they are imported when a build has them."""
