"""Checkpoints of bitsandbytes: INT8 (LLM.int8) here, four bits in `nf4.py`."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvern.errors import CorruptCheckpoint, UnsupportedModel
from kvern.formats.choice import all_but, paths_matching
from kvern.formats.nf4 import bitsandbytes_nf4
from kvern.formats.scaled import Scaled, ScaledMethod
from kvern.layers.build_options import BuildOptions
from kvern.layers.linear_format import LinearFormat, LinearMethods
from kvern.layers.linear_method import LinearMethod, LinearShape, Part, TensorLayout


class Int8Method(ScaledMethod):
    """`weight` int8 and `SCB [outputs]`, the largest number of each row, which code 127 represents."""

    def layouts(self) -> Mapping[str, TensorLayout]:
        return {**super().layouts(), "weight_format": TensorLayout(torch.uint8, (), needed=False)}

    def load(self, kind: str, tensor: Tensor, part: Part, first_row: int = 0) -> None:
        if kind != "weight_format":
            super().load(kind, tensor, part, first_row)
        elif int(tensor) != 0:
            raise CorruptCheckpoint(f"weight_format of a layer is {int(tensor)}; kvern reads 0, weights stored by rows")


class Int8(Scaled):
    """LLM.int8 without rounded activations: bitsandbytes keeps some columns in 16 bits, kvern all of them."""

    def linear(self, shape: LinearShape, build: BuildOptions) -> LinearMethod:
        return Int8Method(shape, self)


def bitsandbytes(quantization: Mapping[str, Any], unquantized: LinearFormat) -> LinearMethods:
    """Reads `load_in_8bit` or `load_in_4bit`; `llm_int8_skip_modules` are plain."""
    eight, four = (bool(quantization.get(f"load_in_{bits}bit", False)) for bits in (8, 4))
    if eight == four:
        raise UnsupportedModel(
            f"quantization_config: load_in_8bit is {eight} and load_in_4bit is {four}; one of them must be true"
        )
    form: LinearFormat = Int8("int8", scale_name="SCB", factor=1 / 127)
    if four:
        form = bitsandbytes_nf4(quantization, unquantized)
    ignored = paths_matching(quantization.get("llm_int8_skip_modules"), "llm_int8_skip_modules")
    return all_but([ignored], form, unquantized)
