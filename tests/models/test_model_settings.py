"""Settings other than the defaults of model types: read as transformers reads them, or refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvern.models.loader import load_model, read_config
from tests.support.families import make_checkpoint
from tests.support.model_outputs import TOLERANCE, error

SLIDING = {"use_sliding_window": True, "sliding_window": 9}
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("gemma2", {"hidden_activation": "relu"}),
    ("gemma3", {"attn_logit_softcapping": 0.5}),
    ("qwen3_moe", {**SLIDING, "max_window_layers": 2}),
    ("qwen2_moe", {**SLIDING, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
    ("gemma4_experts", {"per_layer_config": {}}),
    ("lfm2_moe", {"use_expert_bias": False}),
    ("nemotron_h", {"tie_word_embeddings": True}),
    ("dots1", {"first_k_dense_replace": 3, "n_routed_experts": None}),
    ("gpt_neox", {"num_attention_heads": 8}),
]
BY_NIGHT: list[tuple[str, dict[str, Any]]] = [
    ("gemma", {"hidden_act": "gelu"}),
    ("gemma3", {"hidden_activation": "silu"}),
    ("arcee", {"hidden_act": "gelu"}),
    ("qwen3_moe", SLIDING),
    ("qwen2_moe", {**SLIDING, "max_window_layers": 2}),
    ("qwen2", {**SLIDING, "max_window_layers": 0}),
    ("qwen3", {**SLIDING, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
    ("dots1", {"layer_types": None, "max_window_layers": 1}),
    ("gemma4_experts", {"global_head_dim": 16, "attention_k_eq_v": False}),
    ("deepseek_v3", {"rope_interleave": None}),
    ("deepseek_v2", {"first_k_dense_replace": 3}),
]
"""The same of other models and other values."""


def change_head(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the tensors of a model, and have its configuration tie them."""
    config, tensors = read_config(folder), load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))


@pytest.mark.parametrize(("family", "name"), [("llama", "lm_head.weight"), ("gpt_neox", "embed_out.weight")])
def test_a_tied_head_that_differs_is_used(
    family: str, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As transformers does: a fine-tuned one may differ in few rows."""
    folder = make_checkpoint(family, tmp_path)
    change_head(folder, lambda tensors: None)
    decoder = load_model(folder)
    assert "lm_head.weight is not equal to the embeddings: it is used" in caplog.text
    assert not decoder.spec.tie_word_embeddings and error(decoder, folder) < TOLERANCE


def test_a_tied_head_that_is_stored_as_well_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_checkpoint("llama", tmp_path)
    name = "model.embed_tokens.weight"
    change_head(folder, lambda tensors: tensors.update({"lm_head.weight": tensors[name].clone()}))
    decoder = load_model(folder)
    assert decoder.spec.tie_word_embeddings and not caplog.text and error(decoder, folder) < TOLERANCE
    change_head(folder, lambda tensors: tensors.pop(name))
    assert error(load_model(folder), folder) < TOLERANCE, "the output layer has the embeddings"


@pytest.mark.parametrize(
    ("family", "changes"),
    [*SETTINGS, *(pytest.param(*setting, marks=pytest.mark.nightly) for setting in BY_NIGHT)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings_are_read_as_transformers_reads_them(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    folder = make_checkpoint(family, tmp_path, **changes)
    assert error(load_model(folder), folder) < TOLERANCE
