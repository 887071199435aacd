"""Checkpoints whose weights take a byte, packed here as the formats' documents say, and the same numbers as plain ones.

made = quantize(make_checkpoint("llama", tmp_path / "model"), tmp_path, packing, quantization_config)
made.quantized          # its linear layers are packed, but for routers, embeddings, and the head
made.rounded            # the same numbers as plain weights: load them with `reference(packing)`
"""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvern.formats.method import QuantizedMethod
from kvern.layers.build import Build
from kvern.layers.linear_format import LinearFormat
from kvern.layers.linear_method import LinearMethod, LinearShape
from kvern.layers.unquantized import UnquantizedMethod
from kvern.models.loader import LoadOptions, llama_name, load_model, read_config
from kvern.models.registry import spec_from_config
from tests.support.families import make_checkpoint
from tests.support.model_outputs import methods_by_path
from tests.support.scaled_rows import Checkpoints

PLAIN = re.compile(r"^lm_head|embed_tokens|\.mlp\.(gate|shared_expert_gate)\.weight$")
NOT_PACKED = "embed_tokens|lm_head|mlp.gate$|shared_expert_gate"
Round = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Packing:
    """Codes of `code` with a scale for each `block` of outputs and inputs (0: all), under these endings of names.

    `extra` tensors stand beside them; `round` is what the format does to activations. `zero`: scales have zero points.
    """

    code: str = "e4m3"
    block: tuple[int, int] = (1, 0)
    scale: str = "weight_scale"
    weight: str = "weight"
    column: bool = False
    zero: str = ""
    factor: float = 1.0
    extra: Mapping[str, Tensor] | None = None
    round: Round | None = None

    def pack(self, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """`weight [outputs, inputs]` as the tensors of a checkpoint, and as the numbers that these stand for."""
        rows, columns = (size or length for size, length in zip(self.block, weight.shape, strict=True))
        padded = F.pad(weight, (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
        blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).transpose(1, 2)
        low, high = blocks.amin((2, 3), True), blocks.amax((2, 3), True)
        zero = torch.zeros_like(low)
        if self.zero:
            scale = (high - low) / 255
            zero = (-128 - low / scale).round().clamp(-128, 127)
        else:
            scale = torch.maximum(high, -low) / (448 if self.code == "e4m3" else 127)
        codes = blocks / scale + zero
        codes = codes.to(torch.float8_e4m3fn) if self.code == "e4m3" else codes.round().clamp(-128, 127).to(torch.int8)

        def whole(tensor: Tensor) -> Tensor:
            return tensor.transpose(1, 2).flatten(2).flatten(0, 1)[: weight.shape[0], : weight.shape[1]].contiguous()

        def beside(tensor: Tensor) -> Tensor:
            table = tensor[..., 0, 0]
            if not self.block[0]:
                return table.reshape(())
            return table if self.block[1] or self.column else table[:, 0].contiguous()

        packed = {self.weight: whole(codes), self.scale: beside(scale) / self.factor}
        if self.zero:
            packed[self.zero] = beside(zero).to(torch.int8)
        packed |= {name: tensor.clone() for name, tensor in (self.extra or {}).items()}
        return packed, whole((codes.float() - zero) * scale)


def quantize(
    model: Path, folder: Path, packing: Packing, config: Mapping[str, Any], plain: str = "(?!)"
) -> Checkpoints:
    """Store the model in two ways; layers whose paths match `plain` stay as they are."""
    made = Checkpoints(folder / "quantized", folder / "rounded")
    described = read_config(model)
    renames = spec_from_config(described).renames
    stored: dict[str, Tensor] = {}
    rounded = load_file(model / "model.safetensors")
    for name, weight in rounded.items():
        path = llama_name(name, renames)[0]
        stem, _, kind = name.rpartition(".")
        if weight.dim() < 2 or PLAIN.search(path) or re.search(plain, path):
            stored[name] = weight
        elif weight.dim() == 2:
            packed, rounded[name] = packing.pack(weight)
            stored |= {f"{stem}.{ending}": tensor for ending, tensor in packed.items()}
        else:
            parts = [packing.pack(expert) for expert in weight]
            rounded[name] = torch.stack([dense for _, dense in parts])
            for ending in parts[0][0]:
                suffix = "" if ending == "weight" else f"_{ending}"
                stored[f"{stem}.{kind}{suffix}"] = torch.stack([packed[ending] for packed, _ in parts])
    for target, tensors in zip(made, (stored, rounded), strict=True):
        shutil.copytree(model, target)
        save_file(tensors, target / "model.safetensors")
    (made.quantized / "config.json").write_text(json.dumps({**described, "quantization_config": dict(config)}))
    return made


class RoundingMethod(UnquantizedMethod):
    """Plain weights that multiply rounded activations."""

    def __init__(self, shape: LinearShape, how: Round) -> None:
        super().__init__(shape)
        self.how = how

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        product = F.linear(self.how(x), self.weight)
        return product if bias is None else product + bias


@dataclass(frozen=True)
class Reference(LinearFormat):
    """Plain weights: of the packed layers, they multiply rounded activations. Small ones are routers."""

    round: Round | None = None

    def linear(self, shape: LinearShape, build: Build) -> LinearMethod:
        plain = self.round is None or build.path == "" or shape.outputs < 8
        return UnquantizedMethod(shape) if plain or self.round is None else RoundingMethod(shape, self.round)

    def embedding(self, shape: LinearShape, build: Build) -> LinearMethod:
        return UnquantizedMethod(shape)


def reference(packing: Packing) -> Reference:
    """The linear format of the rounded checkpoint of a packing."""
    return Reference(packing.round)


def by_token(largest: float, group: int = 0, limit: float = 1e9) -> Round:
    """Dynamic, of e4m3 (448) or int8 (127)."""

    def apply(x: Tensor) -> Tensor:
        runs = x.split(group or x.shape[1], 1)
        return torch.cat(
            [_nearest(run, largest, run.abs().amax(1, True).clamp(1e-9, limit) / largest) for run in runs], 1
        )

    return apply


def by_scale(largest: float, scale: float) -> Round:
    """Static."""
    return lambda x: _nearest(x, largest, torch.tensor(scale))


def _nearest(x: Tensor, largest: float, scale: Tensor) -> Tensor:
    codes = (x / scale).clamp(-largest, largest)
    return (codes.to(torch.float8_e4m3fn).float() if largest == 448 else codes.round()) * scale


def asymmetric(x: Tensor) -> Tensor:
    """Dynamic, of int8 with a zero point for each token."""
    low, high = x.amin(1, True).clamp_max(0), x.amax(1, True).clamp_min(0)
    scale = (high - low) / 255
    zero = (-128 - low / scale).round().clamp(-128, 127)
    return ((x / scale + zero).round().clamp(-128, 127) - zero) * scale


INPUT_SCALE = {"input_scale": torch.tensor(0.02)}
FP8, INT8 = by_token(448), by_token(127)
RE_PLAIN = [f"re:.*({NOT_PACKED})"]


def ct(weights: dict[str, Any], activations: dict[str, Any] | None, **others: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors, one group of all linear layers."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    form = "float-quantized" if weights["type"] == "float" else "int-quantized"
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    return config | {"ignore": RE_PLAIN} | others


def args(kind: str, strategy: str, **others: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False} | others


def ao(kind: str, **data: Any) -> dict[str, Any]:
    described = {"_type": kind, "_version": 2, "_data": data}
    return {"quant_method": "torchao", "quant_type": {"default": described}, "modules_to_not_convert": ["lm_head"]}


AO_NAMES = {"weight": "_weight_qdata", "scale": "_weight_scale", "column": True}
CHECKPOINTS: dict[str, tuple[str, Packing, dict[str, Any]]] = {
    "fp8, a scale for each tensor": ("llama_bias", Packing(block=(0, 0), round=FP8), {"quant_method": "fp8"}),
    "fp8, static": (
        "qwen3",
        Packing(block=(0, 0), extra=INPUT_SCALE, round=by_scale(448, 0.02)),
        {"quant_method": "fp8", "activation_scheme": "static"},
    ),
    "fp8, static, of transformers": (
        "llama",
        Packing(
            block=(0, 0),
            scale="weight_scale_inv",
            extra={"activation_scale": torch.tensor(0.02)},
            round=by_scale(448, 0.02),
        ),
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
    ),
    "fp8 of fused tensors": ("phi3", Packing(block=(0, 0), round=FP8), {"quant_method": "fp8"}),
    "fp8, tied": ("llama3", Packing(block=(0, 0), round=FP8), {"quant_method": "fp8"}),
    "fp8 of experts": ("mixtral", Packing(block=(0, 0), round=FP8), {"quant_method": "fp8"}),
    "fp8 by blocks": (
        "llama_bias",
        Packing(block=(16, 32), scale="weight_scale_inv", round=by_token(448, 32)),
        {"quant_method": "fp8", "weight_block_size": [16, 32]},
    ),
    "fp8 by blocks, of latents": (
        "glm4_moe_lite",
        Packing(block=(16, 32), scale="weight_scale_inv", round=by_token(448, 32)),
        {"quant_method": "fp8", "weight_block_size": [16, 32]},
    ),
    "fp8 by blocks at which no part begins": (
        "mistral",
        Packing(block=(128, 128), scale="weight_scale_inv", round=by_token(448, 128)),
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
    ),
    "fp8 by blocks at which no expert begins": (
        "qwen2_moe",
        Packing(block=(16, 16), scale="weight_scale_inv", round=by_token(448, 16)),
        {"quant_method": "fp8", "weight_block_size": [16, 16], "modules_to_not_convert": ["lm_head", "mlp.gate"]},
    ),
    "fp8 by blocks, of experts called w1, w2, w3": (
        "minimax_m2",
        Packing(block=(16, 16), scale="weight_scale_inv", round=by_token(448, 16)),
        {
            "quant_method": "fp8",
            "weight_block_size": [16, 16],
            "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
        },
    ),
    "fbgemm_fp8": (
        "llama_bias",
        Packing(column=True, round=by_token(448, limit=2.0)),
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 2.0},
    ),
    "compressed-tensors, static": (
        "llama",
        Packing(block=(0, 0), extra={"input_scale": torch.tensor([0.02])}, round=by_scale(448, 0.02)),
        ct(args("float", "tensor"), args("float", "tensor")),
    ),
    "compressed-tensors, dynamic": (
        "starcoder2",
        Packing(column=True, round=FP8),
        ct(args("float", "channel"), args("float", "token", dynamic=True)),
    ),
    "compressed-tensors, blocks": (
        "qwen3_moe",
        Packing(block=(24, 16), round=by_token(448, 16)),
        ct(
            args("float", "block", block_structure=[24, 16]),
            args("float", "group", group_size=16, dynamic=True),
        ),
    ),
    "compressed-tensors, int8": (
        "qwen2",
        Packing("int8", column=True, round=INT8),
        ct(args("int", "channel"), args("int", "token", dynamic=True)),
    ),
    "compressed-tensors, asymmetric int8": (
        "llama_bias",
        Packing("int8", column=True, zero="weight_zero_point", round=asymmetric),
        ct(args("int", "channel", symmetric=False), args("int", "token", dynamic=True, symmetric=False)),
    ),
    "compressed-tensors, weights alone": (
        "mixtral",
        Packing("int8", (1, 16), zero="weight_zero_point"),
        ct(args("int", "group", symmetric=False, group_size=16), None),
    ),
    "bitsandbytes": (
        "qwen2",
        Packing("int8", scale="SCB", factor=1 / 127, extra={"weight_format": torch.tensor(0, dtype=torch.uint8)}),
        {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False, "llm_int8_skip_modules": None},
    ),
    "torchao, int8 weights": ("llama", Packing("int8", **AO_NAMES), ao("Int8WeightOnlyConfig", granularity=None)),
    "torchao, int8 groups": (
        "phi3",
        Packing("int8", (1, 16), zero="_weight_zero_point", **AO_NAMES),
        ao("Int8WeightOnlyConfig", granularity={"_type": "PerGroup", "_data": {"group_size": 16}}),
    ),
    "torchao, int8": (
        "llama_bias",
        Packing("int8", round=INT8, **AO_NAMES),
        ao("Int8DynamicActivationInt8WeightConfig", act_mapping_type={"_type": "MappingType", "_data": "SYMMETRIC"}),
    ),
    "torchao, fp8": (
        "gpt_neox",
        Packing(round=FP8, **AO_NAMES),
        ao("Float8DynamicActivationFloat8WeightConfig", granularity=[{"_type": "PerRow", "_data": {"dim": -1}}] * 2),
    ),
}


def packed_llama(tmp_path: Path, name: str, family: str = "llama", **config: Any) -> Path:
    """A checkpoint of one of `CHECKPOINTS`, and some other values of its quantization_config."""
    _, packing, described = CHECKPOINTS[name]
    return quantize(make_checkpoint(family, tmp_path / "model"), tmp_path, packing, described | config).quantized


def quantized(folder: Path, **options: Any) -> set[str]:
    """The paths of the layers that are not plain."""
    found = methods_by_path(load_model(folder, LoadOptions(**options)))
    return {path for path, method in found.items() if isinstance(method, QuantizedMethod)}
