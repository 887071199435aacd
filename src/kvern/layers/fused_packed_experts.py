"""Experts of a quantized mixture made of Triton kernels, which make numbers of codes inside their products."""

from typing import TYPE_CHECKING

from torch import Tensor

from kvern.kernels.codes import readable
from kvern.kernels.launch import capability
from kvern.kernels.moe import ACTIVATIONS, rows_of_block
from kvern.kernels.moe_packed import packed_experts
from kvern.kernels.moe_scaled import ROWS, Rounded, coded_experts, multiplies_codes
from kvern.layers.linear_method import LinearMethod
from kvern.layers.quantized.method import QuantizedMethod
from kvern.layers.quantized.products import multiplies
from kvern.layers.row_experts import RowStackedExperts
from kvern.model_spec import MoeSpec

if TYPE_CHECKING:
    from kvern.layers.build import Build
    from kvern.layers.linear_format import LinearFormat

CARDS = {"e4m3": 89, "int8": 80}
"""The first compute capability whose matrix units multiply such codes by such codes; 0: there is no card."""


class FusedPackedExperts(RowStackedExperts):
    """Experts whose products are grouped by expert on the device.

    Few rows read codes and compute little: they are multiplied as they are. Of more rows than fill blocks, a format that
    rounds activations to codes like its weights' has these multiplied by codes.
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
        ways = [_coded(method) for method in methods]
        self._coded = None if self.deterministic or None in ways else ways

    def forward(self, x: Tensor, weights: Tensor, topk_ids: Tensor, add: Tensor | None = None) -> Tensor:
        experts, activation = self.spec.experts, self.spec.activation
        gate_up, down = self._packed
        if self._coded is not None and rows_of_block(topk_ids.numel(), experts) == ROWS:
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
    how, packed = method.coded(), method.packed()
    if how is None or not multiplies_codes(packed, method.shape.inputs, how.group):
        return None
    card, first = capability(method.shape.device), CARDS[packed.code]
    return how.rows if card == 0 or card >= first else None


def fuses(gate_up: LinearMethod, down: LinearMethod, activation: str) -> bool:
    """Whether the kernels know the codes of such experts, their shapes and their activation."""
    return activation in ACTIVATIONS and all(
        isinstance(method, QuantizedMethod) and multiplies(method.packed().code, method.shape.inputs)
        for method in (gate_up, down)
    )
