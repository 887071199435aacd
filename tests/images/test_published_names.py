"""Checkpoints and settings that name things as published models do, or as older or newer versions of transformers."""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
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
from tests.support.vision_models import make_vision_model, picture

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
