"""Experts of a quantized mixture made of Triton kernels, which make numbers of codes inside their products."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvern.formats.gpu.products import multiplies
from kvern.formats.groups import GroupedMethod
from kvern.formats.method import QuantizedMethod
from kvern.kernels.codes import readable
from kvern.kernels.expert_lanes import LaneWeight, fits_lanes
from kvern.kernels.moe import ACTIVATIONS
from kvern.kernels.moe_lanes import LANE_ACTIVATIONS, alone, lane_experts
from kvern.kernels.moe_packed import one_by_one, packed_experts
from kvern.kernels.moe_scaled import coded_experts, hopper_codes
from kvern.kernels.scaled_product import multiplies_codes
from kvern.layers.build_options import BuildOptions
from kvern.layers.linear_method import LinearMethod
from kvern.layers.row_experts import RowStackedExperts
from kvern.layers.tuned_experts import Ways
from kvern.spec.model import MoeSpec

if TYPE_CHECKING:
    from kvern.kernels.quantize_rows import Coding
    from kvern.layers.linear_format import LinearFormat


class FusedPackedExperts(RowStackedExperts):
    """Experts whose products are grouped by expert on the device.

    A format that rounds activations to codes like its weights' has codes multiplied by codes, but for one or a few
    tokens, and for experts with biases, which are multiplied as they are. On Hopper GPUs MXFP4 has kernels of its own,
    with weights in lanes.
    """

    def __init__(
        self, hidden_size: int, spec: MoeSpec, build: BuildOptions, gate_up: "LinearFormat", down: "LinearFormat"
    ) -> None:
        super().__init__(hidden_size, spec, build, gate_up, down)
        self.deterministic = build.deterministic
        self._hopper = "hopper_linear" in build.kernels
        for method in self.methods():
            method.use_kernels(build)

    def finish(self) -> None:
        super().finish()
        methods = self.gate_up_proj, self.down_proj
        self._lanes = self._take_lanes() if self._hopper and not self.deterministic else None
        self._packed = tuple(readable(method.packed()) for method in methods)
        codings = [coding for method in methods if (coding := _coded(method)) is not None]
        self._ways: Ways | None = None
        by_codes = not self.deterministic and self.spec.has_plain_gate
        if len(codings) == 2 and by_codes:
            shape = self.gate_up_proj.shape.dtype, self.hidden_size, self.spec.width
            known = all(hopper_codes(packed.code, *shape) for packed in self._packed)
            hopper = self._hopper and known and all(map(_whole_rows, methods, codings))
            self._codings = [replace(coding, late=hopper) for coding in codings]
            self._ways = Ways(self._multiply, hopper, several=True)

    def forward(self, x: Tensor, weights: Tensor, topk_ids: Tensor, add: Tensor | None = None) -> Tensor:
        experts, (gate_up, down) = self.slots, self._packed
        if self._lanes is not None:
            return lane_experts(
                x, self._lanes[0], self._lanes[1], weights, topk_ids, self.spec.activation,
                experts=experts, biases=self.bias_pair, add=add, of=self.share.of,
            )  # fmt: skip
        few = self.share.of is None and one_by_one(topk_ids, experts, gate_up, down)
        if self._ways is not None and not few:
            return self._ways(x, weights, topk_ids, add)
        given = x, gate_up, down, weights, topk_ids, self.spec.activation
        return packed_experts(
            *given,
            experts=experts,
            biases=self.bias_pair,
            add=add,
            deterministic=self.deterministic,
            of=self.share.of,
        )

    def tensors_of(self, slot: int) -> list[Tensor]:
        if self._lanes is None:
            return super().tensors_of(slot)
        gate_up, down = self._lanes
        first_width, hidden = self.spec.first_width, self.hidden_size
        found = [*gate_up.rows(slot * first_width, first_width), *down.rows(slot * hidden, hidden)]
        return found + self._biases_of(slot)

    def candidates(self) -> Mapping[int, Mapping[Hashable, Callable[..., Tensor]]]:
        return {} if self._ways is None else self._ways.candidates()

    def choose(self, tokens: int, candidate: Hashable) -> None:
        if self._ways is not None:
            self._ways.choose(tokens, candidate)

    def _take_lanes(self) -> tuple[LaneWeight, LaneWeight] | None:
        """Both matrices as the kernel for Hopper reads them, if it knows such experts."""
        gate_up, down = self.gate_up_proj, self.down_proj
        if not isinstance(gate_up, GroupedMethod) or not isinstance(down, GroupedMethod):
            return None
        known = self.spec.activation in LANE_ACTIVATIONS and gate_up.shape.dtype == torch.bfloat16
        if not known or not all(fits_lanes(method.packed()) for method in (gate_up, down)):
            return None
        alone(gate_up.codes.device)
        return gate_up.take_lanes(), down.take_lanes()

    def _multiply(self, x: Tensor, weights: Tensor, topk_ids: Tensor, add: Tensor | None = None, **way: Any) -> Tensor:
        gate_up, down = self._packed
        given = x, gate_up, down, weights, topk_ids, self.spec.activation
        return coded_experts(*given, experts=self.slots, rounded=self._codings, add=add, of=self.share.of, **way)


def _coded(method: QuantizedMethod) -> "Coding | None":
    """The coding of activations; None: these kernels, or this card, multiply no codes by such codes."""
    how = method.activation_codes()
    packed = method.packed()
    _, inputs, _, device = method.shape
    if how is None or packed.zero is not None or packed.factor is not None:
        return None
    return how if multiplies_codes(packed.code, (packed.group, how.group or inputs), inputs, device) else None


def _whole_rows(method: QuantizedMethod, how: "Coding") -> bool:
    """Return whether each scale is of a whole row, for weights and for activations."""
    return method.packed().group == method.shape.inputs and not how.group


def fuses(gate_up: LinearMethod, down: LinearMethod, activation: str) -> bool:
    """Return whether the kernels know the codes of such experts, their shapes and their activation."""
    return activation in ACTIVATIONS and all(
        isinstance(method, QuantizedMethod) and multiplies(method.packed().code, method.shape.inputs)
        for method in (gate_up, down)
    )
