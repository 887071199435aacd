"""Linear layers and experts with plain weights that record statistics of their inputs."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvern.layers.build_options import BuildOptions
from kvern.layers.experts import Experts, StackedExperts
from kvern.layers.linear import Linear
from kvern.layers.linear_format import LinearFormat
from kvern.layers.linear_method import LinearMethod, LinearShape
from kvern.layers.unquantized import UnquantizedMethod
from kvern.spec.model import MoeSpec

if TYPE_CHECKING:
    from torch import nn


SAMPLE = 512
"""The number of a matrix's input rows that are kept, from the whole calibration."""


class Inputs:
    """Statistics of the rows `[T, inputs]` that a matrix multiplies, taken batch by batch.

    count     int: rows so far
    largest   [inputs] float32: the largest |x|
    absolute  [inputs] float32: the sum of |x|
    squares   [inputs] float32: the sum of x^2
    products  [inputs, inputs] float32, the sum of X^T X, if asked for
    rows      [at most SAMPLE, inputs]: some of the rows, evenly spread over the batches
    """

    def __init__(self, inputs: int, batches: int, device: torch.device, *, products: bool = False) -> None:
        self.inputs, self.count = inputs, 0
        self.largest, self.absolute, self.squares = torch.zeros(3, inputs, device=device)
        self.products = torch.zeros(inputs, inputs, device=device) if products else None
        self._share = max(1, SAMPLE // batches)
        self._kept: list[Tensor] = []

    def add(self, x: Tensor) -> None:
        """Adds the rows `[T, inputs]` of a batch."""
        numbers = x.float()
        self.count += len(x)
        self.largest = torch.maximum(self.largest, numbers.abs().amax(0)) if len(x) else self.largest
        self.absolute += numbers.abs().sum(0)
        self.squares += numbers.square().sum(0)
        if self.products is not None:
            self.products.addmm_(numbers.t(), numbers)
        self._kept.append(x[:: max(1, -(-len(x) // self._share))].clone())

    @property
    def rows(self) -> Tensor:
        """float32."""
        if not self._kept:
            return torch.zeros(0, self.inputs, device=self.largest.device)
        self._kept = [torch.cat(self._kept)]
        rows: Tensor = self._kept[0].float()
        return rows

    @property
    def mean_squares(self) -> Tensor:
        """`[inputs]` float32."""
        mean: Tensor = self.squares / max(1, self.count)
        return mean

    def divide(self, scale: Tensor) -> None:
        """Changes the statistics to those of inputs divided by `scale [inputs]`."""
        self.largest, self.absolute = self.largest / scale, self.absolute / scale
        self.squares = self.squares / scale.square()
        if self.products is not None:
            self.products = self.products / scale / scale[:, None]
        self._kept = [(self.rows / scale)] if self._kept else []


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

    def activated(self, activation: str) -> None:
        """Every product is watched."""


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
