"""A matrix whose parts are stored in different ways: as many products, side by side."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor, nn

from kvern.layers.linear_method import LinearMethod, LinearShape, Part, TensorLayout, all_stored


class PartedMethod(LinearMethod):
    """`methods`, of the same inputs, stacked along their outputs; `beside` puts their results side by side."""

    name = "parted"

    def __init__(
        self, shape: LinearShape, methods: Sequence[LinearMethod], beside: Callable[[Sequence[Tensor]], Tensor]
    ) -> None:
        super().__init__(shape)
        self.parts = nn.ModuleList(methods)
        self._methods, self._beside = tuple(methods), beside
        sizes = [method.shape.outputs for method in methods]
        self._first = dict(zip(accumulate(sizes[:-1], initial=0), methods, strict=True))
        self._sizes = sizes

    def layouts(self) -> Mapping[str, TensorLayout]:
        return {}

    def part_layouts(self, first: int) -> Mapping[str, TensorLayout]:
        return self._first[first].layouts()

    def stored(self) -> list[Tensor] | None:
        return all_stored(method.stored() for method in self._methods)

    @property
    def compiled(self) -> bool:
        return all(method.compiled for method in self._methods)

    def methods(self) -> Iterable[LinearMethod]:
        for method in self._methods:
            yield from method.methods()

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        biases = [None] * len(self._sizes) if bias is None else torch.split(bias, self._sizes)
        products = zip(self._methods, biases, strict=True)
        return self._beside([method.multiply(x, part) for method, part in products])

    def dequantize(self) -> Tensor:
        return torch.cat([method.dequantize() for method in self._methods])

    def cuts(self) -> tuple[int, int]:
        cuts = [method.cuts() for method in self._methods]
        outputs, inputs = (math.lcm(*sizes) for sizes in zip(*cuts, strict=True))
        return outputs, inputs

    def load(self, kind: str, tensor: Tensor, part: Part, first_row: int = 0) -> None:
        """A part of a checkpoint may hold outputs of several methods, or some of one: each takes its own.

        Raises ValueError where a block of the checkpoint has rows of two of them.
        """
        for first, method in self._first.items():
            begin = max(first, part.first)
            end = min(first + method.shape.outputs, part.first + len(part.outputs))
            if begin < end:
                start = part.outputs.start + begin - part.first
                if start % method.cuts()[0]:
                    raise ValueError(
                        f"a block of {method.cuts()[0]} rows holds rows of two layers; store queries, keys and values, "
                        "and gates and ups, in tensors of their own"
                    )
                outputs = range(start, start + end - begin)
                method.load(kind, tensor, replace(part, first=begin - first, outputs=outputs), first_row)

    def fill_random(self, generator: torch.Generator) -> None:
        for method in self._methods:
            method.fill_random(generator)

    def finish(self) -> None:
        for method in self._methods:
            method.finish()
