"""A format of weights: float16 numbers, and a float32 scale for each row. What a format takes, and no more.

folder = quantize(make_checkpoint("llama", tmp_path / "model"), tmp_path, "mlp|lm_head")
folder.quantized        # a checkpoint whose layers of these paths are stored so
folder.rounded          # the same numbers as plain weights
"""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvern.layers.build import Build
from kvern.layers.linear_format import LINEAR_METHODS, LinearFormat, LinearMethods
from kvern.layers.linear_method import INPUTS, OUTPUTS, LinearMethod, LinearShape, TensorLayout
from kvern.models.loader import llama_name, read_config
from kvern.models.registry import spec_from_config

NAME = "scaled_rows"


class ScaledRowsMethod(LinearMethod):
    """`qweight [outputs, inputs]` float16 times `scale [outputs]` float32."""

    name = NAME
    qweight: Tensor
    scale: Tensor

    def layouts(self) -> Mapping[str, TensorLayout]:
        return {
            "qweight": TensorLayout(torch.float16, (OUTPUTS, INPUTS)),
            "scale": TensorLayout(torch.float32, (OUTPUTS,)),
        }

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.dequantize(), bias)

    def dequantize(self) -> Tensor:
        return (self.qweight * self.scale[:, None]).to(self.shape.dtype)


class ScaledRows(LinearFormat):
    def linear(self, shape: LinearShape, build: Build) -> LinearMethod:
        return ScaledRowsMethod(shape)


@LINEAR_METHODS.register(NAME)
def scaled_rows(quantization: Mapping[str, Any], unquantized: LinearFormat) -> LinearMethods:
    return LinearMethods(unquantized, ((re.compile(quantization["layers"]), ScaledRows()),))


class Checkpoints(NamedTuple):
    quantized: Path
    rounded: Path


def quantize(model: Path, folder: Path, layers: str) -> Checkpoints:
    """Store the weights of layers whose paths match the regular expression with 31 values a row, in two ways."""
    made = Checkpoints(folder / "quantized", folder / "rounded")
    config = read_config(model)
    renames = spec_from_config(config).renames
    stored: dict[str, Tensor] = {}
    rounded = load_file(model / "model.safetensors")
    for name, weight in rounded.items():
        path = llama_name(name, renames)[0].removesuffix(".weight")
        if weight.dim() < 2 or not re.search(layers, path):
            stored[name] = weight
            continue
        scale = weight.abs().amax(-1).clamp_min(1e-3) / 15
        codes = (weight / scale[..., None]).round().half()
        rounded[name] = codes * scale[..., None]
        stem = name.removesuffix(".weight")
        stored |= {f"{stem}.qweight": codes, f"{stem}.scale": scale}
    for target, tensors in zip(made, (stored, rounded), strict=True):
        shutil.copytree(model, target)
        save_file(tensors, target / "model.safetensors")
    config["quantization_config"] = {"quant_method": NAME, "layers": layers}
    (made.quantized / "config.json").write_text(json.dumps(config))
    return made
