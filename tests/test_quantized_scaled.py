"""FP8 and INT8 weights: checkpoints of all who write them, and plain ones that are quantized while they are loaded."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvern.errors import ConfigError, CorruptCheckpoint, UnsupportedModel
from kvern.layers.build import Build
from kvern.layers.linear_format import linear_methods
from kvern.layers.linear_method import LinearShape, Part
from kvern.layers.quantized.method import QuantizedMethod
from kvern.layers.quantized.online import OnlineMethod
from kvern.layers.quantized.rounding import Rounding
from kvern.layers.quantized.scaled import ROWS, TENSOR, Block, Scaled, ScaledMethod
from kvern.layers.unquantized import Unquantized, UnquantizedMethod
from kvern.models.loader import load_model, read_config
from tests.families import make_checkpoint
from tests.scaled_checkpoints import NOT_PACKED, Packing, asymmetric, by_scale, by_token, quantize, reference
from tests.test_linear_methods import methods
from tests.test_loader import change_tensors
from tests.test_model_parity import PROMPT, logits

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


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_are_those_of_the_plain_numbers(name: str, tmp_path: Path) -> None:
    family, packing, config = CHECKPOINTS[name]
    made = quantize(make_checkpoint(family, tmp_path / "model"), tmp_path, packing, config)
    decoder, plain = load_model(made.quantized), load_model(made.rounded, unquantized=reference(packing))
    found, expected = logits(decoder, PROMPT), logits(plain, PROMPT)
    assert (found - expected).abs().max() < 1e-4
    if packing.round:
        unrounded = logits(load_model(made.rounded), PROMPT)
        assert (found - unrounded).abs().max() > 0.01, "activations are not rounded"
    assert sum(isinstance(method, QuantizedMethod) for method in decoder.modules()) >= 4
    assert decoder.weight_bytes < plain.weight_bytes / 2
