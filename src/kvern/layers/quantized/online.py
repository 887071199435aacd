"""Plain weights that become FP8 or INT8 while they are loaded, row by row: the plain ones are never held whole."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from kvern.errors import ConfigError
from kvern.layers.linear_format import LinearFormat, LinearMethods
from kvern.layers.linear_method import INPUTS, OUTPUTS, LinearMethod, LinearShape, Part, TensorLayout
from kvern.layers.quantized.choice import all_but
from kvern.layers.quantized.rounding import Code, Rounding, quantized_rows
from kvern.layers.quantized.scaled import Scaled, ScaledMethod

if TYPE_CHECKING:
    from kvern.layers.build import Build

CODES: Mapping[str, Code] = {"fp8": "e4m3", "int8": "int8"}


class OnlineMethod(ScaledMethod):
    """Reads `weight [outputs, inputs]` of plain numbers; each row gets the scale of its largest one."""

    def layouts(self) -> Mapping[str, TensorLayout]:
        return {"weight": TensorLayout(self.shape.dtype, (OUTPUTS, INPUTS))}

    def load(self, kind: str, tensor: Tensor, part: Part, first_row: int = 0) -> None:
        first = max(first_row, part.outputs.start)
        end = min(first_row + len(tensor), part.outputs.stop)
        if first >= end:
            return
        rows = tensor[first - first_row : end - first_row, part.inputs.start : part.inputs.stop]
        codes, scale = quantized_rows(rows.to(self.shape.device), self.form.code)
        place = part.first + first - part.outputs.start
        for target, made in ((self.codes, codes), (self.scale, scale)):
            target[place : place + end - first].copy_(made)


class Online(Scaled):
    """Stored as codes with a scale for each row, read from a checkpoint's plain weights."""

    def linear(self, shape: LinearShape, build: "Build") -> LinearMethod:
        return OnlineMethod(shape, self)


def made_online(quantization: str, unquantized: LinearFormat) -> LinearMethods:
    """The methods of a plain checkpoint: all linear layers but routers, embeddings and the head are quantized.

    Activations are rounded for each token. Raises ConfigError.
    """
    if quantization not in CODES:
        raise ConfigError(f"quantization is {quantization!r:.40}: it must be one of {', '.join(CODES)}")
    code = CODES[quantization]
    return all_but([], Online(code, activations=Rounding(code)), unquantized)
