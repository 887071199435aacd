"""Linear layers and experts with plain weights that record statistics of their inputs."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from kvern.layers.build_options import BuildOptions
from kvern.layers.experts import Experts, StackedExperts
from kvern.layers.linear import Linear
from kvern.layers.linear_format import LinearFormat
from kvern.layers.linear_method import LinearMethod, LinearShape
from kvern.layers.unquantized import UnquantizedMethod
from kvern.quantize.inputs import Inputs
from kvern.spec.model import MoeSpec

if TYPE_CHECKING:
    from torch import nn


Rounding = Callable[[Tensor], Tensor]
"""Rows `[T, inputs]` -> the same as a format has them multiplied."""


class WatchedMethod(UnquantizedMethod):
    """A plain weight with its `inputs`, None: not recorded. `rounding`, if any, is applied to the activations."""

    inputs: Inputs | None = None
    rounding: Rounding | None = None

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.inputs is not None:
            self.inputs.add(x)
        if self.rounding is not None:
            x = self.rounding(x)
        return super().multiply(x, bias)


class WatchedExperts(StackedExperts):
    """Plain experts: `inputs["gate_up", e]` and `inputs["down", e]` are those of expert e; empty: not recorded.

    `rounding`, if any, is applied to the activations.
    """

    rounding: Rounding | None = None

    def __init__(self, hidden_size: int, spec: MoeSpec, build: BuildOptions) -> None:
        super().__init__(hidden_size, spec, build)
        self.inputs: dict[tuple[str, int], Inputs] = {}

    def gate_up(self, expert: int, x: Tensor) -> Tensor:
        self._tell("gate_up", expert, x)
        return super().gate_up(expert, x if self.rounding is None else self.rounding(x))

    def down(self, expert: int, x: Tensor) -> Tensor:
        self._tell("down", expert, x)
        return super().down(expert, x if self.rounding is None else self.rounding(x))

    def _tell(self, matrix: str, expert: int, x: Tensor) -> None:
        inputs = self.inputs.get((matrix, expert))
        if inputs is not None:
            inputs.add(x)


class Watched(LinearFormat):
    """Plain weights that can be watched."""

    def linear(self, shape: LinearShape, build: BuildOptions) -> LinearMethod:
        return WatchedMethod(shape)

    def experts(self, hidden_size: int, spec: MoeSpec, build: BuildOptions) -> Experts:
        return WatchedExperts(hidden_size, spec, build)


class WatchedProduct:
    """The location of matrices that multiply the same rows: a `Linear`, or an expert's matrix.

    `paths` are Llama's names of the matrices, fused ones included.
    """

    def __init__(
        self, owner: "Linear | WatchedExperts", matrix: tuple[str, int], inputs: int, paths: list[str]
    ) -> None:
        self._owner = owner
        self._matrix = matrix
        self.inputs = inputs
        self.paths = paths

    def watch(self, inputs: Inputs | None) -> None:
        """Records the inputs of these matrices in `inputs`; None: stops that."""
        if isinstance(self._owner, WatchedExperts):
            if inputs is None:
                self._owner.inputs.pop(self._matrix, None)
            else:
                self._owner.inputs[self._matrix] = inputs
        elif isinstance(self._owner.method, WatchedMethod):
            self._owner.method.inputs = inputs


def places(module: "nn.Module") -> Iterator[WatchedProduct]:
    """All products of a block that can be watched."""
    for part in module.modules():
        if isinstance(part, Linear):
            names = [*part.outputs, *([part.fused] if part.fused else [])]
            yield WatchedProduct(
                part, ("", 0), part.inputs, [f"{part.path}.{name}" if part.path else name for name in names]
            )
        elif isinstance(part, WatchedExperts):
            for expert in range(part.spec.experts):
                prefix = f"{part.path}.experts.{expert}"
                both = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
                yield WatchedProduct(part, ("gate_up", expert), part.hidden_size, both)
                yield WatchedProduct(part, ("down", expert), part.spec.width, [f"{prefix}.down_proj"])
