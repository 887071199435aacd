"""The experts of a mixture in a quantized format: all experts' rows in one matrix, behind one another."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvern.cpu.packed import LANES
from kvern.formats.method import QuantizedMethod
from kvern.layers.cuts import check_cut
from kvern.layers.expert_share import ExpertShare
from kvern.layers.experts import Experts, MethodExperts, SeparateExperts
from kvern.layers.linear_method import LinearMethod, LinearShape
from kvern.ranks.ranks import Share
from kvern.spec.model import MoeSpec

if TYPE_CHECKING:
    from kvern.layers.build import Build
    from kvern.layers.linear_format import LinearFormat

META = torch.device("meta")


class RowStackedExperts(MethodExperts):
    """One matrix `[slots * first_width, hidden]` for gate and up, one `[slots * hidden, width]` for down.

    The rows of an expert follow each other: gate's, if it has one, then up's. So whatever a format says of rows holds
    for experts.
    """

    def __init__(
        self, hidden_size: int, spec: MoeSpec, build: "Build", gate_up: "LinearFormat", down: "LinearFormat"
    ) -> None:
        super().__init__(hidden_size, spec, build)

        def method(linear_format: "LinearFormat", outputs: int, inputs: int) -> QuantizedMethod:
            made = linear_format.linear(LinearShape(self.slots * outputs, inputs, build.dtype, build.device), build)
            assert isinstance(made, QuantizedMethod), "stacks() asks for it"
            if outputs % LANES == 0 and build.device.type == "cpu":
                made.use_kernels(build)
            return made

        self.gate_up_proj = method(gate_up, spec.first_width, hidden_size)
        self.down_proj = method(down, hidden_size, spec.width)

    def gate_up(self, expert: int, x: Tensor) -> Tensor:
        return self.gate_up_proj.multiply_part(x, expert * self.spec.first_width, self.spec.first_width)

    def down(self, expert: int, x: Tensor) -> Tensor:
        return self.down_proj.multiply_part(x, expert * self.hidden_size, self.hidden_size)

    def tensors_of(self, slot: int) -> list[Tensor]:
        first_width, hidden = self.spec.first_width, self.hidden_size
        gate_up = self.gate_up_proj.stored_part(slot * first_width, first_width)
        return gate_up + self.down_proj.stored_part(slot * hidden, hidden) + self._biases_of(slot)

    def _slots_of(self, expert: int, name: str, kind: str) -> list[int]:
        slots, (method, _) = super()._slots_of(expert, name, kind), self.matrix(name, 0)
        return slots or [0] * method.layouts()[kind].common

    def matrix(self, name: str, slot: int) -> tuple[LinearMethod, int]:
        if name == "down":
            return self.down_proj, slot * self.hidden_size
        return self.gate_up_proj, slot * self.spec.first_width

    def methods(self) -> Iterable[LinearMethod]:
        return self.gate_up_proj, self.down_proj


def stacks(method: LinearMethod, outputs: int) -> bool:
    """Whether parts of so many outputs may follow one another in one matrix: no block holds rows of two of them."""
    return isinstance(method, QuantizedMethod) and outputs % method.cuts()[0] == 0


def make_experts(hidden_size: int, spec: MoeSpec, build: "Build", formats: Mapping[str, "LinearFormat"]) -> Experts:
    """Experts whose "gate", if there is one, "up" and "down" have these formats: stacked by rows where they can be.

    A format that does not join parts keeps more of a part than rows, as an order of its inputs: it is not stacked.
    Raises ConfigError where ranks would cut what is stored together.
    """
    if build.ranks.size > 1:
        _check_cuts(hidden_size, spec, build, formats)
    gate, down = formats.get("gate", formats["up"]), formats["down"]
    if gate is formats["up"] and gate.joins and down.joins:
        outline = replace(build, device=META)
        gate_up = gate.linear(LinearShape(spec.first_width, hidden_size, build.dtype, META), outline)
        other = down.linear(LinearShape(hidden_size, spec.width, build.dtype, META), outline)
        if stacks(gate_up, spec.width) and stacks(other, hidden_size):
            if spec.gated and {"moe", "quantized"} <= build.kernels:
                from kvern.layers.fused_packed_experts import FusedPackedExperts, fuses

                if fuses(gate_up, other, spec.activation):
                    return FusedPackedExperts(hidden_size, spec, build, gate, down)
            return RowStackedExperts(hidden_size, spec, build, gate, down)
    return SeparateExperts(hidden_size, spec, build, formats)


def _check_cuts(hidden_size: int, spec: MoeSpec, build: "Build", formats: Mapping[str, "LinearFormat"]) -> None:
    """Raise ConfigError where a share of an expert begins or ends among numbers that are stored together."""
    share, instead = ExpertShare(hidden_size, spec, build.ranks, META), "turn enable_expert_parallel on, or "
    alone = replace(build.whole, device=META, kernels=frozenset())
    for name, linear_format in formats.items():
        (outputs, inputs), (part,) = share.shape(name), share.parts(name)
        whole = linear_format.linear(LinearShape(outputs, inputs, build.dtype, META), alone)
        check_cut(build, f"experts.{name}_proj", whole, "outputs", Share(part.outputs, outputs), instead=instead)
        check_cut(build, f"experts.{name}_proj", whole, "inputs", Share(part.inputs, inputs), instead=instead)
