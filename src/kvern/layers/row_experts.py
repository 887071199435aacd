"""Experts whose weights are `LinearMethod`s: all experts' rows in one matrix, or two matrices for each expert."""

from collections.abc import Iterable, Mapping
from itertools import chain

import torch
from torch import Tensor, nn

from kvern.cpu.packed import LANES
from kvern.formats.method import QuantizedMethod
from kvern.layers.build_options import BuildOptions
from kvern.layers.experts import MethodExperts
from kvern.layers.linear_format import LinearFormat
from kvern.layers.linear_method import LinearMethod, LinearShape, all_stored
from kvern.layers.parted import PartedMethod
from kvern.spec.model import MoeSpec

META = torch.device("meta")


class RowStackedExperts(MethodExperts):
    """One matrix `[slots * first_width, hidden]` for gate and up, one `[slots * hidden, width]` for down.

    The rows of an expert follow each other: gate's, if it has one, then up's. So whatever a format says of rows holds
    for experts.
    """

    def __init__(
        self, hidden_size: int, spec: MoeSpec, build: BuildOptions, gate_up: LinearFormat, down: LinearFormat
    ) -> None:
        super().__init__(hidden_size, spec, build)

        def method(linear_format: LinearFormat, outputs: int, inputs: int) -> QuantizedMethod:
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
    """Return whether parts of so many outputs can follow one another in one matrix: no block has rows of two parts."""
    return isinstance(method, QuantizedMethod) and outputs % method.cuts()[0] == 0


class SeparateExperts(MethodExperts):
    """Two `LinearMethod`s for each expert, multiplied one after another.

    `formats` are those of gate, up and down. Gate and up are one matrix where their format joins parts, and where its
    blocks do not reach from one into the other.
    """

    def __init__(
        self, hidden_size: int, spec: MoeSpec, build: BuildOptions, formats: Mapping[str, LinearFormat]
    ) -> None:
        super().__init__(hidden_size, spec, build)

        def method(name: str, outputs: int, inputs: int) -> LinearMethod:
            return formats[name].linear(LinearShape(outputs, inputs, build.dtype, build.device), build)

        def gate_up() -> LinearMethod:
            if not spec.gated:
                return method("up", spec.width, hidden_size)
            if formats["gate"] is formats["up"] and formats["gate"].joins:
                joined = method("gate", 2 * spec.width, hidden_size)
                if spec.width % joined.cuts()[0] == 0:
                    return joined
            parts = [method(name, spec.width, hidden_size) for name in ("gate", "up")]
            return PartedMethod(
                LinearShape(2 * spec.width, hidden_size, build.dtype, build.device), parts, build.ops.beside
            )

        self._methods = {
            "gate_up": [gate_up() for _ in range(self.slots)],
            "down": [method("down", hidden_size, spec.width) for _ in range(self.slots)],
        }
        self.gate_up_proj, self.down_proj = map(nn.ModuleList, self._methods.values())
        for one in self.methods():
            for part in one.methods():
                part.use_kernels(build)

    def gate_up(self, expert: int, x: Tensor) -> Tensor:
        return self._methods["gate_up"][expert].multiply(x, None)

    def down(self, expert: int, x: Tensor) -> Tensor:
        return self._methods["down"][expert].multiply(x, None)

    def tensors_of(self, slot: int) -> list[Tensor] | None:
        stored = [methods[slot].stored() for methods in self._methods.values()]
        return all_stored([*stored, self._biases_of(slot)])

    def matrix(self, name: str, slot: int) -> tuple[LinearMethod, int]:
        return self._methods["down" if name == "down" else "gate_up"][slot], 0

    def methods(self) -> Iterable[LinearMethod]:
        return chain(*self._methods.values())
