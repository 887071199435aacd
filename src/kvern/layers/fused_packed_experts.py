"""Experts of a quantized mixture made of Triton kernels, which make numbers of codes inside their products."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvern.kernels.codes import readable
from kvern.kernels.launch import cdiv
from kvern.kernels.moe import ACTIVATIONS
from kvern.kernels.moe_packed import one_by_one, packed_experts
from kvern.kernels.moe_scaled import Rounded, coded_experts
from kvern.kernels.scaled_product import multiplies_codes
from kvern.layers.linear_method import LinearMethod
from kvern.layers.quantized.method import QuantizedMethod
from kvern.layers.quantized.products import multiplies
from kvern.layers.row_experts import RowStackedExperts
from kvern.model_spec import MoeSpec

if TYPE_CHECKING:
    from kvern.layers.build import Build
    from kvern.layers.linear_format import LinearFormat


class FusedPackedExperts(RowStackedExperts):
    """Experts whose products are grouped by expert on the device.

    A format that rounds activations to codes like its weights' has codes multiplied by codes, but for one or a few
    tokens, which are multiplied as they are.
    """

    def __init__(
        self, hidden_size: int, spec: MoeSpec, build: "Build", gate_up: "LinearFormat", down: "LinearFormat"
    ) -> None:
        super().__init__(hidden_size, spec, build, gate_up, down)
        self.deterministic = build.deterministic
        for method in self.methods():
            method.use_kernels(build)

    def finish(self) -> None:
        super().finish()
        methods = self.gate_up_proj, self.down_proj
        self._packed = tuple(readable(method.packed()) for method in methods)
        ways = [way for method in methods if (way := _coded(method)) is not None]
        self._coded = ways if len(ways) == 2 and not self.deterministic else None

    def forward(self, x: Tensor, weights: Tensor, topk_ids: Tensor, add: Tensor | None = None) -> Tensor:
        experts, activation = self.spec.experts, self.spec.activation
        gate_up, down = self._packed
        if self._coded is not None and not one_by_one(topk_ids, experts, gate_up, down):
            return coded_experts(
                x, gate_up, down, weights, topk_ids, activation, experts=experts, rounded=self._coded, add=add
            )
        return packed_experts(
            x,
            gate_up,
            down,
            weights,
            topk_ids,
            activation,
            experts=experts,
            add=add,
            deterministic=self.deterministic,
        )


def _coded(method: QuantizedMethod) -> Rounded | None:
    """How activations become codes; None: these kernels, or this card, multiply no codes by such codes."""
    how, packed, (_, inputs, dtype, device) = method.activation_codes(), method.packed(), method.shape
    if how is None or packed.zero is not None or packed.factor is not None:
        return None
    runs = how(torch.zeros(1, inputs, dtype=dtype, device=device))[1].shape[1]
    return how if multiplies_codes(packed.code, (packed.group, cdiv(inputs, runs)), inputs, device) else None


def fuses(gate_up: LinearMethod, down: LinearMethod, activation: str) -> bool:
    """Whether the kernels know the codes of such experts, their shapes and their activation."""
    return activation in ACTIVATIONS and all(
        isinstance(method, QuantizedMethod) and multiplies(method.packed().code, method.shape.inputs)
        for method in (gate_up, down)
    )
