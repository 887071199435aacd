"""Plain weights that become FP8, INT8 or INT4 while they are loaded: the plain ones are never held whole."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from kvern.errors import ConfigError
from kvern.formats.choice import HEAD, all_but
from kvern.formats.groups import Form, GroupedMethod, pack_pairs
from kvern.formats.scaled import Code, Rounding, Scaled, ScaledMethod, quantized_rows
from kvern.layers.build_options import BuildOptions
from kvern.layers.linear_format import LinearFormat, LinearMethods
from kvern.layers.linear_method import INPUTS, OUTPUTS, LinearMethod, LinearShape, Part, TensorLayout

CODES: Mapping[str, Code] = {"fp8": "e4m3", "int8": "int8"}
GROUP = 32
"""Inputs that share a scale and a zero of INT4; fewer, but at least LEAST_GROUP, if they do not divide a row."""
LEAST_GROUP = 8
SMALLEST_GROUP_SCALE = 2.0**-24
"""The scale of groups of zeros: the smallest number of float16."""


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

    def linear(self, shape: LinearShape, build: BuildOptions) -> LinearMethod:
        return OnlineMethod(shape, self)


class OnlineInt4Method(GroupedMethod):
    """Reads `weight [outputs, inputs]` of plain numbers; groups have 16 values from their smallest to their largest."""

    def layouts(self) -> Mapping[str, TensorLayout]:
        return {"weight": TensorLayout(self.shape.dtype, (OUTPUTS, INPUTS))}

    def cuts(self) -> tuple[int, int]:
        """A share may be cut anywhere, because it has its own groups."""
        return 1, 1

    def load(self, kind: str, tensor: Tensor, part: Part, first_row: int = 0) -> None:
        groups = tensor.to(self.shape.device).float().reshape(len(tensor), -1, self.group)
        low, high = groups.amin(-1, keepdim=True).clamp_max(0), groups.amax(-1, keepdim=True).clamp_min(0)
        scale = ((high - low) / 15).clamp_min(SMALLEST_GROUP_SCALE).to(self.form.scale)
        zero = (-low / scale.float()).round().clamp_max(15)
        codes = ((groups / scale.float()).round() + zero).clamp(0, 15).to(torch.uint8)
        self.put("codes", pack_pairs(codes.flatten(1)), part, first_row)
        self.put("scale", scale.squeeze(-1), part, first_row)
        self.put("zero", zero.to(torch.uint8).squeeze(-1), part, first_row)


class OnlineInt4(LinearFormat):
    """Stored as codes of four bits in groups; `unquantized` where rows cannot be cut into groups."""

    def __init__(self, unquantized: LinearFormat) -> None:
        self._unquantized = unquantized

    def linear(self, shape: LinearShape, build: BuildOptions) -> LinearMethod:
        group = math.gcd(shape.inputs, GROUP)
        if group < LEAST_GROUP:
            return self._unquantized.linear(shape, build)
        return OnlineInt4Method(shape, Form("int4", group, zero=True))


def with_int8_head(methods: LinearMethods, unquantized: LinearFormat, *, tied: bool) -> LinearMethods:
    """Returns the methods with a plain output layer in INT8, and the embeddings with it if both are one matrix.

    Activations stay plain, or a CPU's kernel rounds each 32 of them with a scale. Raises ConfigError if the
    checkpoint's is not plain.
    """
    path = "model.embed_tokens" if tied else "lm_head"
    if methods.of(path) is not unquantized:
        raise ConfigError(
            "head_quantization is int8, but the model's output layer is stored quantized: leave head_quantization out"
        )
    head: LinearFormat = Online("int8")
    matrix = re.compile(rf"^{re.escape(path)}$")  # tables of layer inputs stay plain: no row of theirs is a head's
    return replace(methods, rules=((matrix, head), (HEAD, head), *methods.rules))


def made_online(quantization: str, unquantized: LinearFormat) -> LinearMethods:
    """The methods for online quantization: all linear layers except routers, embeddings and the head are quantized.

    `with_int8_head` is for the head.

    With FP8 and INT8 activations are rounded for each token. Raises ConfigError.
    """
    if quantization == "int4":
        return all_but([], OnlineInt4(unquantized), unquantized)
    if quantization not in CODES:
        raise ConfigError(f"quantization is {quantization!r:.40}: it must be one of {', '.join((*CODES, 'int4'))}")
    code = CODES[quantization]
    return all_but([], Online(code, activations=Rounding(code)), unquantized)
