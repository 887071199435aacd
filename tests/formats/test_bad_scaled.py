"""What is wrong with a checkpoint of FP8 or INT8, or with what is asked of it, is said in a line before it loads."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kvern import LLM
from kvern.config import EngineConfig
from kvern.errors import ConfigError, CorruptCheckpoint, UnsupportedModel
from kvern.formats.choice import checked, paths_matching
from kvern.formats.groups import GroupedFormat
from kvern.layers.linear_format import linear_methods
from kvern.layers.unquantized import Unquantized
from kvern.models.loader import LoadOptions, load_model, outline_model
from kvern.models.precision import shares
from tests.support.families import change_tensors, make_checkpoint
from tests.support.scaled_checkpoints import (
    Packing,
    ao,
    args,
    ct,
    packed_llama,
    quantize,
    quantized,
)


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
        (ct(args("int", "group"), None), r"the block size is \[1, None\]"),
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
        (ao("Int8WeightOnlyConfig", group_size=-1), r"the block size is \[1, -1\]"),
        (ao("Int8WeightOnlyConfig", group_size=1 << 40), r"two numbers, as \[128, 128\], of at most 65536"),
        ({"quant_method": "fp8", "weight_block_size": [128, 1 << 70]}, "the block size is"),
        ({"quant_method": "fp8", "ignored_layers": [r"re:(\w+\.?)+x"]}, "may take forever"),
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
    "config",
    [
        ct(args("int", "group", group_size=32) | {"num_bits": 4}, None, format="pack-quantized"),
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        ao("Int4WeightOnlyConfig", group_size=32),
    ],
)
def test_formats_of_four_bits_are_others(config: dict[str, Any]) -> None:
    plain = Unquantized()
    found = linear_methods({"quantization_config": config}, plain)
    assert isinstance(found.of("model.layers.0.mlp.down_proj"), GroupedFormat)
    assert found.of("model.layers.0.mlp.gate") is plain


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
        ("weight", torch.ones(48, 80).to(torch.float8_e8m0fnu), rf"1 mistyped: {NAME}\.weight is float8_e8m0fnu"),
        ("weight_scale", torch.tensor(torch.nan), rf"{NAME}\.weight_scale in .*: a scale is not finite"),
        ("input_scale", torch.tensor(0.0), rf"{NAME}\.input_scale in .*: the scale of activations is 0\.0"),
        ("input_scale", torch.tensor(-1.0), r"the scale of activations is -1\.0; it has to be above 0"),
        ("input_scale", torch.tensor(torch.nan), "the scale of activations is nan"),
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


def test_weights_that_are_stored_quantized_are_not_quantized_again(tmp_path: Path) -> None:
    folder = packed_llama(tmp_path, "fp8, a scale for each tensor")
    assert quantized(folder, quantization="fp8") == quantized(folder)
    with pytest.raises(
        ConfigError, match="quantization is int8, but the model's weights are stored quantized by 'fp8'"
    ):
        load_model(folder, LoadOptions(quantization="int8"))
    with pytest.raises(ConfigError, match="quantization is 'int3': it must be one of fp8, int8, int4"):
        linear_methods({}, Unquantized(), "int3")


def test_an_engine_refuses_what_the_checkpoint_is_not(tmp_path: Path) -> None:
    folder = packed_llama(tmp_path, "bitsandbytes")
    with pytest.raises(ConfigError, match=r"quantization is fp8, but the model's weights are stored .* 'bitsandbytes'"):
        LLM(str(folder), device="cpu", quantization="fp8")
    with pytest.raises(ConfigError, match=r"quantization is 'fp4': it must be one of fp8, int8, int4$"):
        EngineConfig(quantization="fp4")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("expression", "short"),
    [
        (r".*layers\.[0-9]+\.self_attn\.(q|k|v|o)_proj$", True),
        (r"(?:self_attn|mlp)?\.[^.]*(a|b)?", True),
        ("|".join(["a.*b"] * 20), True),
        (r"[(+*]+\(\+", True),
        (r"(a+)+b", False),
        (r"((?:a+)b)*c", False),
        (r"(a|a)*b", False),
        (r"(?:(x{1,9}){2,}y)", False),
        (".*a" * 6, False),
    ],
)
def test_expressions_that_may_take_forever(expression: str, short: bool) -> None:
    if short:
        assert checked(expression) == expression
        return
    with pytest.raises(UnsupportedModel, match="may take forever"):
        checked(expression)


def test_wildcards_name_what_is_within_them() -> None:
    found = paths_matching(["model.layers.*.self_attn", "*.mlp.gate"], "ignore")
    assert found.search("model.layers.3.self_attn.q_proj") and found.search("model.layers.3.mlp.gate")
    assert not found.search("model.layers.3.mlp.gate_proj")


def test_blocks_that_hold_rows_of_two_layers_are_refused(tmp_path: Path) -> None:
    """Queries, keys and values of 48, 16 and 16 rows in one tensor of blocks of 32."""
    packing = Packing(block=(32, 32), scale="weight_scale_inv")
    config = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    folder = quantize(make_checkpoint("phi3", tmp_path / "model"), tmp_path, packing, config).quantized
    with pytest.raises(CorruptCheckpoint, match=r"_proj\.weight.* a block of 32 rows holds rows of two layers"):
        load_model(folder)


def test_a_report_knows_what_a_checkpoint_calls_its_layers(tmp_path: Path) -> None:
    """As loading does: Mixtral's down projections are plain by their own name, "w2"."""
    packing = Packing(column=True)
    config = ct(args("float", "channel"), None, ignore=["lm_head", "re:.*block_sparse_moe.experts.*w2$"])
    model = make_checkpoint("mixtral", tmp_path / "model", num_hidden_layers=1)
    folder = quantize(model, tmp_path, packing, config, plain=r"down_proj").quantized
    found = {share.format for share in shares(outline_model(folder)) if share.kind == "experts"}
    assert found == {share.format for share in shares(load_model(folder)) if share.kind == "experts"}
    assert "float32" in found and len(found) == 2
