"""Checkpoints that see images load as their language models, by whatever names and settings they were saved."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvern.errors import CorruptCheckpoint, UnsupportedModel
from kvern.models.loader import load_model, read_config
from kvern.models.registry import spec_from_config
from kvern.quantize.checkpoint import Checkpoint
from tests.support.families import FAMILIES, make_checkpoint
from tests.support.model_outputs import TOLERANCE, error

WRAPPERS = [family for family, (_, fields) in FAMILIES.items() if "text_config" in fields]
CALLED = {
    "inside": ("model.language_model.", "model.visual.", "lm_head."),
    "beside": ("language_model.model.", "visual.", "language_model.lm_head."),
    "as alone": ("model.", "visual.", "lm_head."),
}
"""What checkpoints call the language model, the tower and the head."""
TOWERS = ("vision_tower", "multi_modal", "embed_vision", "audio_tower", "embed_audio")
"""What has one name everywhere."""


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load_model(folder).named_parameters())


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")


def change_config(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    (folder / "config.json").write_text(json.dumps(change(read_config(folder))))


@pytest.mark.sample(5)
@pytest.mark.parametrize("family", WRAPPERS)
def test_tensors_are_found_by_all_the_names_they_have_had(family: str, tmp_path: Path) -> None:
    folder = make_checkpoint(family, tmp_path)
    expected = weights(folder)
    stored = load_file(folder / "model.safetensors")
    names = {name: re.sub(r"^(model\.)?(language_model\.)?(model\.)?", "", name) for name in stored}
    for model, tower, head in CALLED.values():

        def called(name: str, model: str = model, tower: str = tower, head: str = head) -> str:
            if name.startswith(("embed_tokens", "per_layer", "layers", "norm")):
                return model + name
            if name.startswith("lm_head."):
                return head + name.removeprefix("lm_head.")
            return name if name.startswith(TOWERS) else tower + name.removeprefix("visual.")

        save_file({called(names[name]): tensor for name, tensor in stored.items()}, folder / "model.safetensors")
        found = weights(folder)
        assert found.keys() == expected.keys()
        assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize("family", WRAPPERS)
def test_what_is_neither_text_nor_a_known_tower_is_refused(family: str, tmp_path: Path) -> None:
    folder = make_checkpoint(family, tmp_path)
    more = {"model.fancy_tower.visual.weight": torch.zeros(3), "model.language_model.vision_tower.x": torch.zeros(2)}
    change_tensors(folder, lambda tensors: tensors | more)
    with pytest.raises(CorruptCheckpoint) as caught:
        load_model(folder)
    assert "2 unexpected: model.fancy_tower.visual.weight [3], model.language_model.vision_tower.x [2]" in str(
        caught.value
    )


@pytest.mark.parametrize("family", ["qwen3_vl", "mistral3", "gemma3_vision"])
@pytest.mark.parametrize(
    ("outer", "inner", "tied"),
    [(True, None, True), (None, True, True), (False, None, False), (None, False, False), (False, True, False)],
)
def test_the_head_is_tied_as_either_level_says(
    family: str, outer: bool | None, inner: bool | None, tied: bool, tmp_path: Path
) -> None:
    """The outer one goes before; the inner one may be a default that was written down."""
    config = read_config(make_checkpoint(family, tmp_path))
    for level, value in ((config, outer), (config["text_config"], inner)):
        level.pop("tie_word_embeddings", None)
        level |= {} if value is None else {"tie_word_embeddings": value}
    assert spec_from_config(config).tie_word_embeddings == tied


def test_a_tied_head_is_passed_over_by_either_name(tmp_path: Path) -> None:
    folder = make_checkpoint("mistral3", tmp_path)
    change_config(folder, lambda config: config | {"tie_word_embeddings": True})

    def equal(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        [embeddings] = (tensor for name, tensor in tensors.items() if name.endswith("embed_tokens.weight"))
        return {name: embeddings.clone() if "lm_head" in name else tensor for name, tensor in tensors.items()}

    change_tensors(folder, equal)
    decoder = load_model(folder)
    assert decoder.lm_head.method is decoder.embed_tokens.method


def test_the_first_files_of_qwen2_5_vl_say_all_in_one_place(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen2_5_vl", tmp_path)
    expected = spec_from_config(read_config(folder))

    def flat(config: dict[str, Any]) -> dict[str, Any]:
        text = config.pop("text_config") | {"model_type": "qwen2_5_vl"}
        rope = text.pop("rope_parameters")
        older = {"type": "mrope", **{name: rope[name] for name in ("mrope_section", "mrope_interleaved")}}
        return text | config | {"rope_theta": rope["rope_theta"], "rope_scaling": older}

    change_config(folder, flat)
    assert spec_from_config(read_config(folder)) == expected
    load_model(folder)


def test_experts_are_read_as_published_and_as_saved(tmp_path: Path) -> None:
    """Published with the inputs of all matrices before their outputs, saved the other way round."""
    folder = make_checkpoint("qwen3_vl_moe", tmp_path)
    expected = weights(folder)
    pieces = {piece.name: Checkpoint(folder, torch.device("cpu")).read(piece) for piece in _experts(folder)}

    def transposed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
            for name, tensor in tensors.items()
        }

    change_tensors(folder, transposed)
    found = weights(folder)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    again = {piece.name: Checkpoint(folder, torch.device("cpu")).read(piece) for piece in _experts(folder)}
    assert "model.language_model.layers.1.mlp.experts.5.up_proj.weight" in again
    assert again.keys() == pieces.keys()
    assert all(torch.equal(pieces[name], again[name]) for name in pieces)


def test_square_experts_are_refused(tmp_path: Path) -> None:
    """Nothing says whether their inputs or outputs come first."""
    folder = make_checkpoint("qwen3_vl_moe", tmp_path, moe_intermediate_size=48)
    with pytest.raises(UnsupportedModel, match="stacked experts are square"):
        weights(folder)


def _experts(folder: Path) -> list[Any]:
    return [piece for piece in Checkpoint(folder, torch.device("cpu")).pieces if piece.place is not None]


def test_mistral3_may_hold_ministral3(tmp_path: Path) -> None:
    rope = FAMILIES["ministral3"][1]["rope_parameters"]
    folder = make_checkpoint("mistral3", tmp_path, model_type="ministral3", rope_parameters=rope)
    assert error(load_model(folder), folder) < TOLERANCE


def test_an_unknown_language_model_is_named(tmp_path: Path) -> None:
    config = read_config(make_checkpoint("mistral3", tmp_path))
    config["text_config"]["model_type"] = "fancy"
    with pytest.raises(UnsupportedModel, match="text_config's model_type 'fancy' is unknown"):
        spec_from_config(config)
