"""The weights of the encoders of Gemma 4, whose inputs and outputs are clipped to bounds that the checkpoint has."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from kvern.layers.build_options import BuildOptions
from kvern.layers.linear_format import LinearFormat
from kvern.layers.linear_method import Axis, LinearMethod, LinearShape, Part, TensorLayout

BOUNDS = ("input_min", "input_max", "output_min", "output_max")
NUMBER = TensorLayout(torch.float32, (Axis("others"),))


class ClippedMethod(LinearMethod):
    """The products of another method, `inner`, between bounds."""

    name = "clipped"

    def __init__(self, inner: LinearMethod) -> None:
        super().__init__(inner.shape)
        self.inner = inner
        for bound in BOUNDS:
            nn.init.constant_(getattr(self, bound), float("-inf" if bound.endswith("min") else "inf"))

    def layouts(self) -> Mapping[str, TensorLayout]:
        return {**self.storage(), **self.inner.layouts()}

    def storage(self) -> Mapping[str, TensorLayout]:
        return dict.fromkeys(BOUNDS, NUMBER)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        least_in, most_in, least_out, most_out = (getattr(self, bound).to(x.dtype) for bound in BOUNDS)
        return self.inner.multiply(x.clamp(least_in, most_in), bias).clamp(least_out, most_out)

    def dequantize(self) -> Tensor:
        return self.inner.dequantize()

    def load(self, kind: str, tensor: Tensor, part: Part, first_row: int = 0) -> None:
        if kind in BOUNDS:
            getattr(self, kind).copy_(tensor.view(1))
        else:
            self.inner.load(kind, tensor, part, first_row)

    def fill_random(self, generator: torch.Generator) -> None:
        self.inner.fill_random(generator)

    def finish(self) -> None:
        self.inner.finish()


class Clipped(LinearFormat):
    """Weights of another format, `inner`, each part of which has bounds of its own."""

    joins = False

    def __init__(self, inner: LinearFormat) -> None:
        self._inner = inner

    def linear(self, shape: LinearShape, build: BuildOptions) -> LinearMethod:
        return ClippedMethod(self._inner.linear(shape, build))
