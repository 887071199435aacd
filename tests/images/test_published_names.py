"""Checkpoints and settings that name things as published models do, or as older or newer versions of transformers."""

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForImageTextToText

from kvern import LLM, SamplingParams
from kvern.errors import UnsupportedModel
from kvern.images.file import read_file
from kvern.images.parts import bytes_of
from kvern.images.settings import settings_of
from kvern.models.image_models import vision_of
from kvern.models.loader import read_config
from kvern.models.registry import spec_from_config
from tests.support import tiled_vision_models as tiled
from tests.support.vision_models import FAMILIES, expected_logprobs, make_vision_model, picture

KINDS = ["qwen2_vl", "qwen2_5_vl", "glm4v", "glm4v_moe", "kimi_k25"]
AS_PUBLISHED = {
    r"^language_model\.model\.blocks\.": "language_model.model.layers.",
    r"^vision_tower\.encoder\.patch_embed\.": "vision_tower.patch_embed.",
    r"^model\.mm_projector\.": "mm_projector.",
}
"""Where Kimi K2.5 is published with other names than `save_pretrained` writes."""


def answered(folder: Path) -> Any:
    with LLM(str(folder), dtype="float32", threads=1, max_model_len=256, max_batch_requests=1) as llm:
        content = [{"type": "image", "image": picture(90, 60)}, {"type": "text", "text": "what"}]
        params = SamplingParams(temperature=0, max_tokens=4, logprobs=1, ignore_eos=True)
        return llm.chat([{"role": "user", "content": content}], params)[0].outputs


def with_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> Path:
    """A copy of a folder with these tensors."""
    other = folder.with_name("other")
    shutil.copytree(folder, other)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, other / "model.safetensors")
    return other


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_have_the_names_of_modules_too(kind: str, tmp_path: Path) -> None:
    folder = make_vision_model(kind, tmp_path / "model")
    tensors = AutoModelForImageTextToText.from_pretrained(folder, dtype="float32").state_dict()
    saved = load_file(folder / "model.safetensors").keys()
    assert kind == "glm4v" or tensors.keys() != saved
    found, expected = (answered(each) for each in (with_tensors(folder, tensors), folder))
    assert found[0].token_ids == expected[0].token_ids


def test_kimi_is_read_as_it_is_published(tmp_path: Path) -> None:
    folder = make_vision_model("kimi_k25", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    for pattern, replacement in AS_PUBLISHED.items():
        assert any(re.search(pattern, name) for name in tensors)
        tensors = {re.sub(pattern, replacement, name): tensor for name, tensor in tensors.items()}
    other = with_tensors(folder, tensors)
    config = json.loads((other / "config.json").read_text())
    vision = config["vision_config"]
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers"):
        vision[f"vt_{name}"] = vision.pop(name)
    for side in ("height", "width"):
        vision[f"init_pos_emb_{side}"] = vision.pop(f"pos_emb_{side}")
    vision["projector_ln_eps"] = config.pop("projection_layer_norm_eps")
    config["media_placeholder_token_id"] = config.pop("image_token_id")
    config["text_config"]["model_type"] = "kimi_k2"
    (other / "config.json").write_text(json.dumps(config))
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    limits = {"in_patch_limit": settings["max_patches"], "patch_limit_on_one_side": settings["size"]["max_height"]}
    colours = {name: settings[name] for name in ("image_mean", "image_std")}
    given = {"media_proc_cfg": limits | colours | {"fixed_output_tokens": None}}
    (other / "preprocessor_config.json").write_text(json.dumps(given))
    assert answered(other) == answered(folder)
    vision["merge_type"] = "another"
    with pytest.raises(UnsupportedModel, match="merge_type is 'another': kvern reads kimi_k25_vision with 'sd2_tpool'"):
        vision_of(config)


CHAT_NAMES = {
    r"\.layer\.(\d+)\.": r".layers.\1.",
    r"cls_token$": "class_embedding",
    r"position_embeddings$": "position_embedding",
    r"patch_embeddings\.projection\.": "patch_embedding.",
    r"\.lambda_([12])$": r".ls\1",
    r"attention\.projection_layer\.": "attn.proj.",
    r"attention\.": "attn.",
    r"layernorm_before\.": "norm1.",
    r"layernorm_after\.": "norm2.",
    r"^(model\.)?vision_tower\.": "vision_model.",
    r"^(model\.)?multi_modal_projector\.layer_norm\.": "mlp1.0.",
    r"^(model\.)?multi_modal_projector\.linear_1\.": "mlp1.1.",
    r"^(model\.)?multi_modal_projector\.linear_2\.": "mlp1.3.",
}
"""How OpenGVLab names InternVL's tensors, by their names in transformers."""
CHAT_TEMPLATE = "{% for message in messages %}{{ message.role + ': ' + message.content + ';' }}{% endfor %}"


def as_internvl_chat(folder: Path) -> Path:
    """A copy of InternVL's folder in the format of OpenGVLab, with a template that takes texts alone."""
    tensors = dict(load_file(folder / "model.safetensors"))
    for pattern, replacement in CHAT_NAMES.items():
        assert any(re.search(pattern, name) for name in tensors)
        tensors = {
            name if "language_model" in name else re.sub(pattern, replacement, name): tensor
            for name, tensor in tensors.items()
        }
    for name in [name for name in tensors if ".attn.q_proj." in name]:
        parts = [tensors.pop(name.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj")]
        tensors[name.replace("q_proj", "qkv")] = torch.cat(parts)
    text = {name: name.replace("model.language_model.", "language_model.model.") for name in tensors}
    text |= {name: f"language_model.{name}" for name in tensors if name.startswith("lm_head.")}
    other = with_tensors(folder, {text[name]: tensor for name, tensor in tensors.items()})
    config = json.loads((other / "config.json").read_text())
    vision = config.pop("vision_config")
    vision |= {"qkv_bias": vision.pop("attention_bias"), "qk_normalization": vision.pop("use_qk_norm")}
    vision |= {"image_size": 32, "patch_size": 8, "model_type": "intern_vit_6b"}
    given = {"architectures": ["InternVLChatModel"], "model_type": "internvl_chat", "vision_config": vision}
    given |= {"llm_config": config["text_config"], "select_layer": -1, "downsample_ratio": 0.5, "ps_version": "v2"}
    given |= {"max_dynamic_patch": 12, "min_dynamic_patch": 1, "use_thumbnail": True, "dynamic_image_size": True}
    (other / "config.json").write_text(json.dumps(given | {"tie_word_embeddings": False}))
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    colours = {name: settings[name] for name in ("image_mean", "image_std")}
    (other / "preprocessor_config.json").write_text(json.dumps(colours | {"crop_size": 32, "size": 32, "resample": 3}))
    (other / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return other


def test_internvl_is_read_as_it_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_vision_model("internvl", tmp_path / "model")
    other = as_internvl_chat(folder)
    monkeypatch.setitem(
        FAMILIES, "internvl", replace(FAMILIES["internvl"], processor=partial(tiled.internvl_processor, 12))
    )
    images = [picture(60, 140), picture(30, 20)]
    parts = [
        {"type": "image", "image": images[0]},
        {"type": "text", "text": "what"},
        {"type": "image", "image": images[1]},
    ]
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=1, ignore_eos=True)
    with LLM(str(other), dtype="float32", threads=1, max_model_len=256, max_batch_requests=1) as llm:
        [output] = llm.chat([{"role": "user", "content": parts}], params)
        shown = ["<img>" + "<IMG_CONTEXT>" * 4 * tiles + "</img>" for tiles in (11, 7)]
        assert output.prompt_token_ids == llm.tokenizer.encode(f"user: {shown[0]}\nwhat{shown[1]}\n;")
    answer = output.outputs[0]
    expected = expected_logprobs("internvl", folder, [*output.prompt_token_ids, *answer.token_ids], images)
    for place, (token, entry) in enumerate(zip(answer.token_ids, answer.logprobs or [], strict=True)):
        assert entry[token].logprob == pytest.approx(
            float(expected[len(output.prompt_token_ids) + place - 1, token]), abs=1e-4
        )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ps_version": "v1"}, "ps_version is 'v1': 'v2' is supported for internvl_chat"),
        ({"max_dynamic_patch": 6}, "max_dynamic_patch is 6: 12 is supported"),
        ({"vision_config": {"model_type": "another"}}, "model_type is 'another': intern_vit_6b is supported"),
    ],
    ids=["shuffle", "tiles", "tower"],
)
def test_other_forms_of_internvl_are_refused_by_name(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    config = read_config(as_internvl_chat(make_vision_model("internvl", tmp_path / "model")))
    with pytest.raises(UnsupportedModel, match=said):
        vision_of(config | changes)
    with pytest.raises(UnsupportedModel, match="model_type is 'internlm2': known are qwen2"):
        spec_from_config(config | {"llm_config": {"model_type": "internlm2"}})


@pytest.mark.parametrize(
    "limits",
    [
        {"min_pixels": 3136, "max_pixels": 9000},
        {"size": {"min_pixels": 3136, "max_pixels": 9000}},
        {"size": {"shortest_edge": 3136, "longest_edge": 12845056}, "min_pixels": 3136, "max_pixels": 9000},
    ],
    ids=["plain", "in size", "both"],
)
def test_limits_of_pixels_have_older_names(limits: dict[str, Any], tmp_path: Path) -> None:
    folder = make_vision_model("qwen2_vl", tmp_path / "model")
    spec = vision_of(read_config(folder))
    assert spec is not None
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    del settings["size"]
    (folder / "preprocessor_config.json").write_text(json.dumps(settings | limits))
    file = read_file(bytes_of({"image": picture(100, 80)}, "x"), "x")
    assert settings_of(folder, spec).tokens(file) == (3, 3)
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    with pytest.raises(UnsupportedModel, match=r"no preprocessor_config\.json with the size"):
        settings_of(folder, spec)
