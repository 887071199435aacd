"""A quantization format of int8 for tests."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvern.formats.method import Packed, QuantizedMethod
from kvern.layers.build import Build
from kvern.layers.linear_format import LINEAR_METHODS, LinearFormat, LinearMethods
from kvern.layers.linear_method import INPUTS, OUTPUTS, Axis, LinearMethod, LinearShape, Part, TensorLayout

NAME = "int8_blocks"


class Int8Method(QuantizedMethod):
    """`qweight [outputs, inputs]` int8 times `scale`, one for each `block` rows; parts may carry a factor of their own.

    `block` 0: scales of rows, and no factor.
    """

    name = NAME
    qweight: Tensor
    scale: Tensor
    factor: Tensor

    def __init__(self, shape: LinearShape, block: int) -> None:
        self.block = block
        super().__init__(shape)

    def layouts(self) -> Mapping[str, TensorLayout]:
        codes = {"qweight": TensorLayout(torch.int8, (OUTPUTS, INPUTS))}
        if not self.block:
            return codes | {"scale": TensorLayout(torch.float32, (OUTPUTS,))}
        return codes | {
            "scale": TensorLayout(torch.float32, (Axis("outputs", self.block),)),
            "weight.factor": TensorLayout(torch.float32, (), needed=False),
        }

    def storage(self) -> Mapping[str, TensorLayout]:
        layouts = dict(self.layouts())
        if layouts.pop("weight.factor", None):
            layouts["factor"] = TensorLayout(torch.float32, (OUTPUTS,))
        return layouts

    def load(self, kind: str, tensor: Tensor, part: Part, first_row: int = 0) -> None:
        if kind == "weight.factor":
            self.factor[part.first : part.first + len(part.outputs)] = tensor
        else:
            super().load(kind, tensor, part, first_row)

    def rows(self, index: Tensor | slice) -> Tensor:
        scale = self.scale.repeat_interleave(max(1, self.block))[: self.shape.outputs]
        if self.block:
            scale = scale * self.factor
        return (self.qweight[index] * scale[index, None]).to(self.shape.dtype)

    def packed(self) -> Packed:
        return Packed("int8", self.qweight, self.scale[:, None], group=self.shape.inputs)


class Int8(LinearFormat):
    def __init__(self, block: int = 0, joins: bool = True) -> None:
        self.block, self.joins = block, joins

    def linear(self, shape: LinearShape, build: Build) -> LinearMethod:
        return Int8Method(shape, self.block)


@LINEAR_METHODS.register(NAME)
def int8_blocks(quantization: Mapping[str, Any], unquantized: LinearFormat) -> LinearMethods:
    return LinearMethods(unquantized, ((re.compile(quantization["layers"]), Int8()),))
