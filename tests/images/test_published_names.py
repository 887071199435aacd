"""Checkpoints and settings that name things as published models do, or as older or newer versions of transformers."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from kvern import LLM, SamplingParams
from kvern.errors import UnsupportedModel
from kvern.images.file import read_file
from kvern.images.parts import bytes_of
from kvern.images.settings import settings_of
from kvern.models.image_models import vision_of
from kvern.models.loader import read_config
from tests.support.vision_models import make_vision_model, picture

NESTED = {r"^visual\.": "model.visual.", r"^model\.(?!visual)": "model.language_model."}
NAMES = {"qwen2_vl": [NESTED], "qwen2_5_vl": [NESTED]}
"""Other names of tensors than those of `save_pretrained`, as patterns and what takes their places."""
CASES = [(kind, number) for kind, forms in NAMES.items() for number in range(len(forms))]


def answered(folder: Path) -> Any:
    with LLM(str(folder), dtype="float32", threads=1, max_model_len=256, max_batch_requests=1) as llm:
        content = [{"type": "image", "image": picture(90, 60)}, {"type": "text", "text": "what"}]
        params = SamplingParams(temperature=0, max_tokens=4, logprobs=1, ignore_eos=True)
        return llm.chat([{"role": "user", "content": content}], params)[0].outputs


@pytest.mark.parametrize(("kind", "number"), CASES)
def test_names_of_tensors_have_several_forms(kind: str, number: int, tmp_path: Path) -> None:
    folder = make_vision_model(kind, tmp_path / "model")
    expected = answered(folder)
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    tensors = load_file(other / "model.safetensors")
    for pattern, replacement in NAMES[kind][number].items():
        tensors = {re.sub(pattern, replacement, name): tensor for name, tensor in tensors.items()}
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    assert load_file(folder / "model.safetensors").keys() != tensors.keys()
    assert answered(other) == expected


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
    assert settings_of(folder, spec).size(file) == (84, 84)
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    with pytest.raises(UnsupportedModel, match=r"no preprocessor_config\.json with the size"):
        settings_of(folder, spec)
