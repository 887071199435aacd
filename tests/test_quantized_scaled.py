"""FP8 and INT8 weights: checkpoints of all who write them, and plain ones that are quantized while they are loaded."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvern import LLM, SamplingParams
from kvern.adapters.bank import AdapterBank
from kvern.adapters.peft import read_adapter
from kvern.config import EngineConfig
from kvern.errors import ConfigError, CorruptCheckpoint, UnsupportedModel
from kvern.layers.linear_format import linear_methods
from kvern.layers.linear_method import LinearShape, Part
from kvern.layers.quantized.method import QuantizedMethod
from kvern.layers.quantized.online import OnlineMethod
from kvern.layers.quantized.rounding import Rounding
from kvern.layers.quantized.scaled import ROWS, TENSOR, Block, Scaled, ScaledMethod
from kvern.layers.unquantized import Unquantized, UnquantizedMethod
from kvern.models.loader import load_model, read_config
from kvern.models.registry import spec_from_config
from kvern.worker.device import weight_bytes
from tests.families import make_checkpoint
from tests.peft_adapters import make_adapter
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


def packed_llama(tmp_path: Path, name: str, family: str = "llama", **config: Any) -> Path:
    """A checkpoint of one of `CHECKPOINTS`, and some other values of its quantization_config."""
    _, packing, described = CHECKPOINTS[name]
    return quantize(make_checkpoint(family, tmp_path / "model"), tmp_path, packing, described | config).quantized


def quantized(folder: Path, **options: Any) -> set[str]:
    """The paths of the layers that are not plain."""
    found = methods(load_model(folder, **options))
    return {path for path, method in found.items() if isinstance(method, QuantizedMethod)}


@pytest.mark.parametrize(
    ("family", "ignored", "plain", "left"),
    [
        ("llama", ["model.layers.1.mlp.down_proj", "lm_head"], r"layers\.1\.mlp\.down", "layers.1.mlp.down_proj"),
        ("llama", ["re:.*layers.2.*attn.*o_"], r"layers\.2\.self_attn\.o_", "layers.2.self_attn.o_proj"),
        ("phi3", ["model.layers.0.self_attn.qkv_proj"], r"layers\.0\.self_attn\.qkv", "layers.0.self_attn.qkv_proj"),
        ("starcoder2", ["re:.*layers.1.mlp.c_fc$"], r"layers\.1\.mlp\.up_proj", "layers.1.mlp.up_proj"),
        ("gpt_neox", ["gpt_neox.layers.2.attention.dense"], r"layers\.2\.self_attn\.o_", "layers.2.self_attn.o_proj"),
    ],
)
def test_layers_that_a_list_names_stay_plain_by_either_name(
    family: str, ignored: list[str], plain: str, left: str, tmp_path: Path
) -> None:
    _, packing, described = CHECKPOINTS["compressed-tensors, dynamic"]
    config = described | {"ignore": [*RE_PLAIN, "lm_head", "re:embed_out", *ignored]}
    made = quantize(make_checkpoint(family, tmp_path / "model"), tmp_path, packing, config, plain)
    found = methods(load_model(made.quantized))
    assert {path for path, method in found.items() if not isinstance(method, QuantizedMethod)} == {
        "embed_tokens",
        "lm_head",
        left,
    }


def test_experts_that_a_list_names_by_the_family_s_own_names_stay_plain(tmp_path: Path) -> None:
    _, packing, described = CHECKPOINTS["fp8 of experts"]
    config = described | {"ignored_layers": ["model.layers.1.block_sparse_moe.experts.0.w1"]}
    model = make_checkpoint("mixtral", tmp_path / "model")
    renamed = {
        re.sub(r"\.mlp\.", ".block_sparse_moe.", name): tensor
        for name, tensor in load_file(model / "model.safetensors").items()
    }
    save_file(renamed, model / "model.safetensors")
    config["ignored_layers"] += ["model.layers.1.block_sparse_moe.experts"]
    made = quantize(model, tmp_path, packing, config, r"layers\.1\.mlp\.experts")
    decoder = load_model(made.quantized)
    kinds = [sum(isinstance(item, QuantizedMethod) for item in layer.mlp.modules()) > 0 for layer in decoder.layers]
    assert kinds == [True, False, True]


def test_formats_of_modelopt_come_from_a_file_of_their_own(tmp_path: Path) -> None:
    _, packing, _ = CHECKPOINTS["fp8, static"]
    made = quantize(make_checkpoint("mixtral", tmp_path / "model"), tmp_path, packing, {}, r"layers\.2\.self_attn")
    config = read_config(made.quantized)
    del config["quantization_config"]
    (made.quantized / "config.json").write_text(json.dumps(config))
    described = {
        "quant_algo": "FP8",
        "kv_cache_quant_algo": None,
        "exclude_modules": ["lm_head", "model.layers.2.self*"],
    }
    (made.quantized / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": described}))
    found = logits(load_model(made.quantized), PROMPT)
    decoder = load_model(made.rounded, unquantized=reference(packing))
    for layer in (decoder.layers[2].self_attn.qkv_proj, decoder.layers[2].self_attn.o_proj):
        layer.method.how = lambda x: x
    assert (found - logits(decoder, PROMPT)).abs().max() < 1e-4


def test_modelopt_gives_each_layer_its_own_format(tmp_path: Path) -> None:
    _, packing, _ = CHECKPOINTS["fp8, static"]
    layers = {
        f"model.layers.{index}.mlp.{name}_proj": {"quant_algo": "FP8"} for index in (0, 2) for name in ("gate", "up")
    }
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    plain = r"self_attn|down_proj|layers\.1\."
    made = quantize(make_checkpoint("llama", tmp_path / "model"), tmp_path, packing, config, plain)
    assert quantized(made.quantized) == {"layers.0.mlp.gate_up_proj", "layers.2.mlp.gate_up_proj"}


def test_groups_of_targets_by_name_expression_and_class(tmp_path: Path) -> None:
    """Names go before expressions, and these before classes; a target may be the embeddings."""
    weights = {"weights": args("float", "channel")}
    config = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "a": {"targets": ["Linear"]},
            "b": {"targets": ["re:.*self_attn.*", "Embedding"], **weights},
            "c": {"targets": ["model.layers.1.self_attn.o_proj"]},
        },
    }
    model = make_checkpoint("llama", tmp_path / "model")
    made = quantize(model, tmp_path, Packing(column=True), config, r"mlp|layers\.1\.self_attn\.o_proj")
    name = "model.embed_tokens.weight"
    packed, dense = Packing().pack(load_file(model / "model.safetensors")[name])
    change_tensors(made.quantized, **{f"model.embed_tokens.{kind}": tensor for kind, tensor in packed.items()})
    change_tensors(made.rounded, **{name: dense})
    assert (logits(load_model(made.quantized), PROMPT) - logits(load_model(made.rounded), PROMPT)).abs().max() < 1e-4
    attention = {f"layers.{index}.self_attn.{part}" for index in range(3) for part in ("qkv_proj", "o_proj")}
    assert quantized(made.quantized) == (attention | {"embed_tokens"}) - {"layers.1.self_attn.o_proj"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2'; kvern reads FP8 of fmt e4m3"),
        ({"quant_method": "fp8", "fmt": "float8_e4m3fnuz"}, "fmt is 'float8_e4m3fnuz'"),
        ({"quant_method": "fp8", "activation_scheme": "none"}, "activation_scheme is 'none'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"block size is \[128\]; it must be two numbers"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "block size is"),
        (
            {"quant_method": "fp8", "weight_block_size": [8, 8], "activation_scheme": "static"},
            "'static' beside a weight",
        ),
        ({"quant_method": "fp8", "ignored_layers": "lm_head"}, "ignored_layers is 'lm_head': it must be a list"),
        ({"quant_method": "fp8", "ignored_layers": ["re:("]}, "cannot be read as 'fp8'"),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": -1}, "activation_scale_ub is -1.0; it must be above 0"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ'; of modelopt's kvern reads"),
        ({"quant_method": "modelopt"}, "quant_algo is 'None'"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "cannot be read as 'modelopt'"),
        ({"quant_method": "compressed-tensors"}, "cannot be read as 'compressed-tensors'"),
        (ct(args("float", "channel"), None, format="marlin-24"), "format is 'marlin-24'; of compressed-tensors"),
        (ct(args("float", "channel") | {"num_bits": 4}, None), "weights of num_bits and type is '4 float'"),
        (ct(args("int", "tensor_group"), None), "weights.strategy is 'tensor_group'; .* reads tensor, channel, group"),
        (ct(args("int", "group"), None), "weights.group_size is 'None'"),
        (ct(args("int", "block"), None), "weights.block_structure is 'None'"),
        (ct(args("int", "group", group_size=8, actorder="group"), None), "weights.actorder is 'group'"),
        (ct(args("float", "channel", symmetric=False), None), "weights.symmetric is 'False'"),
        (ct(args("int", "channel"), args("int", "token")), r"input_activations.strategy \(dynamic False\) is 'token'"),
        (ct(args("int", "channel"), args("int", "tensor", symmetric=False)), "input_activations.symmetric is 'False'"),
        (ct(args("int", "channel"), args("int", "tensor", dynamic="local")), "input_activations.dynamic is 'local'"),
        (
            ct(args("int", "channel"), None, sparsity_config={"format": "sparse-24-bitmask"}),
            "sparsity_config.format is",
        ),
        (
            ct(args("int", "channel"), None, transform_config={"config_groups": {"R1": {}}}),
            "transform_config is 'given'",
        ),
        (ao("Float8StaticActivationFloat8WeightConfig"), "quant_type is 'Float8StaticActivationFloat8WeightConfig'"),
        (ao("Int8WeightOnlyConfig", granularity={"_type": "PerToken"}), "granularity is 'PerToken'"),
        (ao("IntxWeightOnlyConfig", intx_packing_format={"_data": "OPAQUE"}), "intx_packing_format is 'OPAQUE'"),
        ({"quant_method": "torchao", "quant_type": "int8_weight_only"}, "cannot be read as 'torchao'"),
        ({"quant_method": "bitsandbytes"}, "load_in_8bit is False and load_in_4bit is False"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message) as caught:
        linear_methods({"quantization_config": config}, Unquantized())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("module", "function", "config", "given"),
    [
        (
            "packed_tensors",
            "packed_format",
            ct(args("int", "group", group_size=8), None, format="pack-quantized"),
            (args("int", "group", group_size=8), None, "pack-quantized"),
        ),
        ("fp4", "modelopt_nvfp4", {"quant_method": "modelopt", "quant_algo": "NVFP4"}, None),
        ("nf4", "bitsandbytes_nf4", {"quant_method": "bitsandbytes", "load_in_4bit": True}, None),
        ("torchao_int4", "torchao_int4", ao("Int4WeightOnlyConfig", group_size=32), ({"group_size": 32},)),
    ],
)
def test_formats_of_four_bits_are_others(
    module: str, function: str, config: dict[str, Any], given: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, made = [], Scaled("int8")

    def make(*arguments: Any) -> Scaled:
        asked.append(arguments)
        return made

    fake = SimpleNamespace(**{function: make})
    monkeypatch.setitem(sys.modules, f"kvern.layers.quantized.{module}", fake)
    plain = Unquantized()
    found = linear_methods({"quantization_config": config}, plain)
    assert found.of("model.layers.0.mlp.down_proj") is made and found.of("model.layers.0.mlp.gate") is plain
    assert asked == [given or (config, plain)]


def test_classes_of_modules_that_are_not_known_are_refused() -> None:
    config = ct(args("int", "channel"), None)
    config["config_groups"]["group_0"]["targets"] = ["LlamaAttention"]
    with pytest.raises(UnsupportedModel, match=r"a target is 'LlamaAttention'; .* reads Linear, Embedding, names"):
        linear_methods({"quantization_config": config}, Unquantized())


NAME = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("kind", "tensor", "message"),
    [
        ("weight_scale", None, rf"1 missing: {NAME}\.weight_scale \[\]"),
        ("input_scale", None, rf"1 missing: {NAME}\.input_scale"),
        (
            "weight_scale",
            torch.ones(3),
            rf"1 misshapen: {NAME}\.weight_scale has \[3\], the configuration asks for \[\]",
        ),
        (
            "weight",
            torch.ones(48, 80).to(torch.float8_e5m2),
            rf"1 mistyped: {NAME}\.weight is float8_e5m2, .* float8_e4m3fn",
        ),
        ("weight", torch.ones(48, 80), rf"1 mistyped: {NAME}\.weight is float32"),
        ("weight", torch.ones(48, 80, dtype=torch.int8), rf"1 mistyped: {NAME}\.weight is int8"),
        ("weight", torch.ones(80, 48).to(torch.float8_e4m3fn), rf"1 misshapen: {NAME}\.weight has \[80, 48\]"),
        ("weight_zero_point", torch.ones(48, dtype=torch.int8), rf"1 unexpected: {NAME}\.weight_zero_point"),
    ],
)
def test_tensors_that_disagree_are_named(kind: str, tensor: torch.Tensor | None, message: str, tmp_path: Path) -> None:
    folder = packed_llama(tmp_path, "fp8, static")
    change_tensors(folder, **{f"{NAME}.{kind}": tensor})
    with pytest.raises(CorruptCheckpoint, match=message):
        load_model(folder)


def test_codes_without_a_configuration_are_refused(tmp_path: Path) -> None:
    model = make_checkpoint("llama", tmp_path)
    change_tensors(model, **{f"{NAME}.weight": torch.ones(48, 80).to(torch.float8_e4m3fn)})
    with pytest.raises(CorruptCheckpoint, match=rf"1 mistyped: {NAME}\.weight is float8_e4m3fn"):
        load_model(model)


def test_weights_stored_in_another_order_are_refused(tmp_path: Path) -> None:
    folder = packed_llama(tmp_path, "bitsandbytes")
    change_tensors(folder, **{f"{NAME}.weight_format": torch.tensor(2, dtype=torch.uint8)})
    with pytest.raises(CorruptCheckpoint, match="weight_format of a layer is 2"):
        load_model(folder)


CPU = torch.device("cpu")


def test_parts_with_scales_of_their_own_are_one_matrix() -> None:
    """Scales of tensors become those of rows; the activations of all have the largest scale."""
    method = ScaledMethod(LinearShape(10, 4, torch.float32, CPU), Scaled("e4m3", TENSOR, Rounding("e4m3"), static=True))
    for first, rows, number in ((0, 6, 2.0), (6, 4, 8.0)):
        part = Part(first, range(rows), range(4))
        method.load("weight", torch.full((rows, 4), 1.5).to(torch.float8_e4m3fn), part)
        method.load("weight_scale", torch.tensor(number), part)
        method.load("input_scale", torch.tensor([number / 4]), part)
    assert method.dequantize()[:, 0].tolist() == [3.0] * 6 + [12.0] * 4
    assert method.input_scale.item() == 2.0
    packed = method.packed()
    assert (packed.group, packed.outputs_per_scale, packed.scale.shape) == (4, 1, (10, 1))  # type: ignore[union-attr]


@pytest.mark.parametrize("run", [1, 3, 100])
@pytest.mark.parametrize("form", [Scaled("e4m3"), Scaled("e4m3", Block(4, 8)), Scaled("int8", Block(1, 8), zeros=True)])
def test_shards_take_their_slices(form: Scaled, run: int) -> None:
    """The second of two shards of a matrix, cut along its outputs or along its inputs, from runs of rows."""
    whole = torch.randn(16, 32)
    packing = Packing(
        form.code, (form.block.outputs, form.block.inputs), zero="weight_zero_point" if form.zeros else ""
    )
    tensors, dense = packing.pack(whole)
    for outputs, inputs in ((range(16), range(32)), (range(8, 16), range(32)), (range(16), range(16, 32))):
        method = ScaledMethod(LinearShape(len(outputs), len(inputs), torch.float32, CPU), form)
        for kind, tensor in tensors.items():
            for row in range(0, len(tensor), run):
                method.load(kind, tensor[row : row + run], Part(0, outputs, inputs), row)
        method.finish()
        expected = dense[outputs.start : outputs.stop, inputs.start : inputs.stop]
        torch.testing.assert_close(method.dequantize(), expected)
        torch.testing.assert_close(method.embed(torch.tensor([3, 1, 3])), expected[[3, 1, 3]])


@pytest.mark.parametrize(("quantization", "code"), [("fp8", "e4m3"), ("int8", "int8")])
@pytest.mark.parametrize("family", ["llama_bias", "phi3", "qwen2_moe", "gemma3"])
def test_plain_weights_are_quantized_while_they_are_loaded(
    family: str, quantization: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_checkpoint(family, tmp_path / "model")
    packing = Packing(code, round=FP8 if code == "e4m3" else INT8)
    made = quantize(model, tmp_path, packing, {})
    monkeypatch.setattr("kvern.models.checkpoint.RUN_BYTES", 2000)
    decoder = load_model(model, quantization=quantization)
    plain = load_model(made.rounded, unquantized=reference(packing))
    assert (logits(decoder, PROMPT) - logits(plain, PROMPT)).abs().max() < 1e-4
    assert decoder.weight_bytes < plain.weight_bytes / 2
    kinds = {path: type(method) for path, method in methods(decoder).items()}
    assert kinds["embed_tokens"] == kinds["lm_head"] == UnquantizedMethod
    assert OnlineMethod in kinds.values()
    again = [logits(load_model(model, quantization=quantization, load_format="dummy"), PROMPT) for _ in range(2)]
    assert torch.equal(*again) and again[0].std() > 0


def test_weights_that_are_stored_quantized_are_not_quantized_again(tmp_path: Path) -> None:
    folder = packed_llama(tmp_path, "fp8, a scale for each tensor")
    assert quantized(folder, quantization="fp8") == quantized(folder)
    with pytest.raises(
        ConfigError, match="quantization is int8, but the model's weights are stored quantized by 'fp8'"
    ):
        load_model(folder, quantization="int8")
    with pytest.raises(ConfigError, match="quantization is 'int3': it must be one of fp8, int8"):
        linear_methods({}, Unquantized(), "int3")


def test_rows_of_zeros_and_of_huge_numbers() -> None:
    method = OnlineMethod(LinearShape(3, 4, torch.float32, CPU), Scaled("e4m3", ROWS))
    weight = torch.tensor([[0.0] * 4, [1e30, -1e30, 0, 1e28], [1e-8, 0, -1e-8, 0]])
    method.load("weight", weight, Part(0, range(3), range(4)))
    found = method.dequantize()
    assert found.isfinite().all() and (found[0] == 0).all()
    torch.testing.assert_close(found[1:], weight[1:], rtol=0.05, atol=0)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # within PEFT
def test_adapters_add_to_rounded_products(tmp_path: Path) -> None:
    model = make_checkpoint("llama_bias", tmp_path / "model")
    _, packing, config = CHECKPOINTS["fp8, a scale for each tensor"]
    made = quantize(model, tmp_path, packing, config)
    adapter = make_adapter(model, tmp_path / "adapter", 3, r=5)
    found = []
    for decoder in (load_model(made.quantized), load_model(made.rounded, unquantized=reference(packing))):
        bank = AdapterBank(decoder, places=1, rank=8, kernels=False)
        bank.load(0, read_adapter(adapter, decoder.spec, bank.targets, 8, torch.float32))
        plain = logits(decoder, PROMPT)
        found.append(logits(decoder, PROMPT, bank.select([0], [len(PROMPT)], None)))
        assert (found[-1] - plain).abs().max() > 0.1
    assert (found[0] - found[1]).abs().max() < 1e-4


@pytest.mark.parametrize("quantization", ["fp8", "int8"])
def test_the_engine_answers_alike_whatever_it_keeps(quantization: Literal["fp8", "int8"], tmp_path: Path) -> None:
    """Rounding is each token's own: chunks, cached prefixes and other requests change nothing."""
    model = make_checkpoint("qwen3", tmp_path / "model")
    prompts = [[*PROMPT, token] for token in (5, 9, 5)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    answers = []
    for prefix_cache, tokens in ((True, None), (False, 7)):
        llm = LLM(
            str(model),
            device="cpu",
            quantization=quantization,
            prefix_cache=prefix_cache,
            max_batch_tokens=tokens,
            max_batch_requests=3,
            kv_cache_tokens=256,
        )
        answers.append([llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in prompts])
        answers.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
        llm.close()
    assert all(answer == answers[0] for answer in answers)


def test_bytes_of_weights_are_known_before_they_are_loaded(tmp_path: Path) -> None:
    model = make_checkpoint("llama", tmp_path)
    spec = spec_from_config(read_config(model))
    for quantization in ("fp8", "int8"):
        methods = linear_methods(read_config(model), Unquantized(), quantization)
        expected = weight_bytes(spec, torch.float32, methods)
        assert load_model(model, quantization=quantization).weight_bytes == expected
    shape = LinearShape(4096, 4096, torch.bfloat16, torch.device("meta"))
    for form in (Scaled("e4m3"), Scaled("e4m3", Block(128, 128)), Scaled("int8", zeros=True), Scaled("e4m3", TENSOR)):
        assert sum(item.nbytes for item in ScaledMethod(shape, form).parameters()) < 1.002 * 4096 * 4096


def test_an_engine_refuses_what_the_checkpoint_is_not(tmp_path: Path) -> None:
    folder = packed_llama(tmp_path, "bitsandbytes")
    with pytest.raises(ConfigError, match=r"quantization is fp8, but the model's weights are stored .* 'bitsandbytes'"):
        LLM(str(folder), device="cpu", quantization="fp8")
    with pytest.raises(ConfigError, match=r"quantization is 'fp4': it must be one of fp8, int8$"):
        EngineConfig(quantization="fp4")  # type: ignore[arg-type]
