"""Weights of four bits that cannot be read: what is said, and when."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from kvern.errors import CorruptCheckpoint, UnsupportedModel
from kvern.formats.bitsandbytes import bitsandbytes_nf4
from kvern.formats.compressed_tensors import packed_format
from kvern.formats.torchao import torchao_int4
from kvern.layers.linear_format import linear_methods
from kvern.layers.unquantized import Unquantized
from kvern.models.loader import load_model, read_config
from tests.support.families import change_tensors, make_checkpoint
from tests.support.four_bit_checkpoints import AWQ, GPTQ, make, of_tests
from tests.support.packers import awq, gptq, nf4, nvfp4


@pytest.mark.parametrize("family", ["llama_bias", "mixtral"])
def test_shapes_of_parts_follow_from_the_format(family: str, tmp_path: Path) -> None:
    """Whatever tensor of a layer has another shape, or is missing, is named before anything is read."""
    pack = partial(gptq, bias=family == "mixtral")
    folder = make(family, tmp_path, pack, GPTQ | {"desc_act": True}, num_hidden_layers=1).quantized
    tensors = load_file(folder / "model.safetensors")
    stem = "self_attn.k_proj" if family == "llama_bias" else "block_sparse_moe.experts.3.w3"
    for kind in ("qweight", "qzeros", "scales", "g_idx"):
        name = f"model.layers.0.{stem}.{kind}"
        for changed, message in ((None, "1 missing: model.layers.0"), (tensors[name][:-1], f"1 misshapen: {name}")):
            change_tensors(folder, **{name: changed})
            with pytest.raises(CorruptCheckpoint, match=re.escape(message)):
                load_model(folder)
        change_tensors(folder, **{name: tensors[name]})
    load_model(folder)


def damage(name: str, change: Callable[[Tensor], Tensor], folder: Path) -> str:
    """What is said of a checkpoint of which one tensor is changed."""
    change_tensors(folder, **{name: change(load_file(folder / "model.safetensors")[name])})
    with pytest.raises(CorruptCheckpoint) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_groups_of_inputs_that_cannot_be(tmp_path: Path) -> None:
    folder = make("llama", tmp_path, partial(gptq, act_order=3), GPTQ | {"desc_act": True}, num_hidden_layers=1)[0]
    name = "model.layers.0.mlp.down_proj.g_idx"
    good = load_file(folder / "model.safetensors")[name]
    for bad, said in ((8, "an input is in group 8 of 8 groups"), (-1, "an input is in group -1 of 8 groups")):
        message = damage(name, lambda groups, bad=bad: torch.where(groups == 7, bad, groups), folder)
        assert f"{name} in {folder / 'model.safetensors'}: {said}" in message
        change_tensors(folder, **{name: good})
    message = damage(name, lambda groups: torch.where(groups == 7, 6, groups), folder)
    assert "model.layers.0.mlp (down_proj): groups of inputs have 0 to 32, not 16 each" in message
    change_tensors(folder, **{name: good})
    config = read_config(folder)
    config["quantization_config"]["desc_act"] = False
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CorruptCheckpoint, match="its inputs are not in the order of their groups"):
        load_model(folder)


def test_a_bias_that_no_layer_has_or_that_is_missing(tmp_path: Path) -> None:
    folder = make("llama", tmp_path / "llama", partial(gptq, bias=True), GPTQ, num_hidden_layers=1).quantized
    name = "model.layers.0.mlp.down_proj.bias"
    assert "it is not zero" in damage(name, lambda bias: bias + 1, folder)
    folder = make("llama_bias", tmp_path / "llama_bias", gptq, GPTQ, num_hidden_layers=1).quantized
    change_tensors(folder, **{name: None})
    with pytest.raises(CorruptCheckpoint, match=f"1 missing: {name}"):
        load_model(folder)


def test_scales_that_are_no_numbers(tmp_path: Path) -> None:
    folder = make("llama", tmp_path / "awq", awq, AWQ, num_hidden_layers=1).quantized
    name = "model.layers.0.mlp.down_proj.scales"
    assert f"{name} in" in damage(name, lambda scales: scales * torch.inf, folder)
    folder = make("llama", tmp_path / "nvfp4", nvfp4, of_tests("nvfp4"), num_hidden_layers=1).quantized
    name = "model.layers.0.self_attn.k_proj.weight_scale"
    good = load_file(folder / "model.safetensors")[name]
    assert "a scale is not finite" in damage(name, lambda scale: (scale.float() * torch.nan).to(scale.dtype), folder)
    change_tensors(folder, **{name: good})
    name = "model.layers.0.self_attn.q_proj.weight_scale_2"
    assert f"{name} in {folder / 'model.safetensors'}: the scale of the whole weight is -" in damage(
        name, torch.neg, folder
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [("blocksize", 128), ("quant_type", "fp4"), ("nested_blocksize", 128), ("shape", [64, 64]), (None, None)],
)
def test_a_state_of_nf4_that_disagrees(key: str | None, value: object, tmp_path: Path) -> None:
    folder = make("llama", tmp_path, partial(nf4, nested=True), of_tests("nested nf4"), num_hidden_layers=1).quantized
    name = "model.layers.0.mlp.down_proj.weight.quant_state.bitsandbytes__nf4"

    def change(state: Tensor) -> Tensor:
        text = json.dumps(json.loads(bytes(state.tolist())) | {key: value}) if key else "[1"
        return torch.tensor(list(text.encode()), dtype=torch.uint8)

    message = damage(name, change, folder)
    assert "model.layers.0.mlp (down_proj): its quant_state" in message
    assert (f"the {key} {value!r}" if key else "no JSON") in message


def test_nested_scales_of_nf4_that_disagree(tmp_path: Path) -> None:
    folder = make("llama", tmp_path, partial(nf4, nested=True), of_tests("nested nf4"), num_hidden_layers=1).quantized
    stem = "model.layers.0.mlp.down_proj.weight"
    good = load_file(folder / "model.safetensors")
    changes: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
        "nested_absmax": (lambda absmax: absmax.repeat(2), "its nested_absmax has 2 entries, and there are 128 blocks"),
        "quant_map": (torch.neg, "its quant_map is not that of NF4"),
        "absmax": (torch.Tensor.float, "absmax"),
    }
    for kind, (change, said) in changes.items():
        assert said in damage(f"{stem}.{kind}", change, folder)
        change_tensors(folder, **{f"{stem}.{kind}": good[f"{stem}.{kind}"]})


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (GPTQ | {"bits": 2}, "GPTQ weights of 2 bits"),
        (GPTQ | {"bits": 3}, "GPTQ weights of 3 bits are not supported: those of 4 and 8 are"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        (GPTQ | {"pack_dtype": "int16"}, "packed into 'int16'"),
        (GPTQ | {"group_size": 12}, "group size 12"),
        (GPTQ | {"group_size": "128"}, "group size '128'"),
        (GPTQ | {"dynamic": {r".*\.1\.": {"bits": 3}}}, "GPTQ weights of 3 bits"),
        (GPTQ | {"dynamic": {"(": {}}}, "cannot be read as 'gptq'"),
        (GPTQ | {"dynamic": [1]}, "cannot be read as 'gptq'"),
        (AWQ | {"bits": 8}, "AWQ weights of 8 bits"),
        (AWQ | {"version": "gemv"}, "version 'gemv'"),
        (AWQ | {"version": "marlin"}, "version 'marlin'"),
        (AWQ | {"version": 3}, "version 3"),
        (AWQ | {"zero_point": False}, "without zero points"),
        (AWQ | {"modules_to_not_convert": 3}, "modules_to_not_convert is '3': it must be a list of names of layers"),
        (AWQ | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert is 'lm_head': it must be a list"),
        (GPTQ | {"dynamic": {r"(\w+\.?)+x": {}}}, "may take forever"),
    ],
)
def test_configurations_that_are_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        linear_methods({"quantization_config": config}, Unquantized())
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (GPTQ | {"group_size": 48}, "a weight of 64 inputs cannot be cut into groups of 48, as GPTQ of 4 bits is"),
        (AWQ | {"group_size": 48}, "a weight of 64 inputs cannot be cut into groups of 48, as AWQ is"),
        (of_tests("nf4"), "model.layers.0.mlp: a weight of 80 inputs cannot be cut into groups of 64, as NF4 is"),
    ],
)
def test_group_sizes_that_do_not_divide(config: dict[str, Any], said: str, tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path, hidden_size=64)
    (folder / "config.json").write_text(json.dumps(read_config(folder) | {"quantization_config": config}))
    with pytest.raises(UnsupportedModel, match=re.escape(said)):
        load_model(folder)


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        ({"load_in_4bit": True}, "bnb_4bit_quant_type 'fp4'"),
        ({"bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": "bfloat16"}, "stored as 'bfloat16'"),
    ],
)
def test_bitsandbytes_of_other_kinds_is_refused(quantization: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        bitsandbytes_nf4(quantization, Unquantized())


@pytest.mark.parametrize(
    ("weights", "form", "said"),
    [
        ({"num_bits": 3, "type": "int", "strategy": "group", "group_size": 32}, "pack-quantized", "of 3 bits"),
        ({"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}, "pack-quantized", "type 'float'"),
        ({"num_bits": 4, "type": "int", "strategy": "tensor"}, "pack-quantized", "strategy 'tensor'"),
        ({"num_bits": 4, "type": "int", "strategy": "group"}, "pack-quantized", "group_size None"),
        ({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 7}, "pack-quantized", "group size 7"),
        ({"num_bits": 4, "type": "float", "group_size": 32}, "nvfp4-pack-quantized", "groups of 32"),
        ({"num_bits": 4, "type": "float", "group_size": 16}, "marlin-24", "format 'marlin-24'"),
    ],
)
def test_packed_forms_that_are_refused(weights: dict[str, Any], form: str, said: str) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        packed_format(weights, None, form)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"int4_packing_format": {"_type": "Int4PackingFormat", "_data": "TILE_PACKED_TO_4D"}}, "'TILE_PACKED_TO_4D'"),
        ({"int4_packing_format": "preshuffled"}, "int4_packing_format 'preshuffled'"),
        ({"group_size": 20}, "group size 20"),
    ],
)
def test_torchao_packings_that_are_refused(data: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        torchao_int4(data)


def test_fused_rows_that_cannot_be_brought_in_order_are_refused(tmp_path: Path) -> None:
    """GPT-NeoX stores queries, keys and values by head, GPTQ outputs as columns: they would be mixed up."""
    folder = make("gpt_neox", tmp_path, gptq, GPTQ, num_hidden_layers=1).quantized
    with pytest.raises(CorruptCheckpoint, match=r"misshapen: gpt_neox\.layers\.0\.attention\.query_key_value\."):
        load_model(folder)
