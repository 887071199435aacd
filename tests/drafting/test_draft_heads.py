"""Draft heads compute what their formats' papers and authors say, from the files that others write."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvern.drafting.models.choice import is_draft_head
from kvern.drafting.models.formats import load_draft_head
from kvern.errors import CorruptCheckpoint, UnsupportedModel
from kvern.models.loader import load_model, read_config
from tests.support.draft_heads import (
    add_prediction,
    eagle3_enter,
    eagle3_logits,
    eagle3_states,
    eagle_states,
    rms_norm,
    write_eagle,
)
from tests.support.families import make_checkpoint
from tests.support.head_drafting import TOKENS, drafted, states_of

FAMILIES = {
    "qwen3_next": ("qwen", {"num_hidden_layers": 1, "layer_types": ["full_attention"]}),
    "qwen3_5": ("qwen", {"num_hidden_layers": 1, "layer_types": ["full_attention"]}),
    "qwen3_5_moe": ("qwen", {"num_hidden_layers": 1, "layer_types": ["full_attention"]}),
    "glm4_moe": ("deepseek", {"num_hidden_layers": 1, "first_k_dense_replace": 0}),
    "glm4_moe_lite": ("deepseek", {"num_hidden_layers": 1, "mlp_layer_types": ["sparse"]}),
    "deepseek_v3": ("deepseek", {"num_hidden_layers": 1, "first_k_dense_replace": 0}),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_layers_for_multi_token_prediction(family: str, tmp_path: Path) -> None:
    folder = make_checkpoint(family, tmp_path)
    names, changes = FAMILIES[family]
    alone = add_prediction(folder, family, names, **changes)
    decoder = load_model(folder)
    head, hidden = load_draft_head(folder, decoder), states_of(decoder)
    states, logits = drafted(head, hidden)
    base = getattr(alone.base_model, "language_model", alone.base_model)
    offset, epsilon = float(names == "qwen"), decoder.spec.norm.epsilon
    embedded, before = decoder.embed_tokens(TOKENS[1:]), hidden[:-1]
    both = (
        rms_norm(embedded, alone.joined["embedding_norm"] + offset, epsilon),
        rms_norm(before, alone.joined["hidden_norm"] + offset, epsilon),
    )
    joined = torch.cat(both, -1) @ alone.joined["joined"].T
    normal = base(inputs_embeds=joined[None]).last_hidden_state[0]
    assert normal.std() > 0.1
    torch.testing.assert_close(logits, decoder.logits(normal), rtol=1e-4, atol=1e-4)
    if names == "qwen":
        torch.testing.assert_close(states, normal, rtol=1e-4, atol=1e-4)
    else:
        torch.testing.assert_close(head.norm_output(states), normal, rtol=1e-4, atol=1e-4)
        assert (states - normal).abs().max() > 0.01, "what it goes on from is without its norm"


@pytest.mark.parametrize(
    "changes",
    [{}, {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}],
    ids=["as in EAGLE's code", "as in speculators"],
)
@torch.inference_mode()
def test_eagle3(changes: dict[str, Any], tmp_path: Path) -> None:
    target = make_checkpoint("qwen3", tmp_path / "target")
    weights = write_eagle(tmp_path / "head", target, drafted=40, **changes)
    config = read_config(tmp_path / "head")
    decoder = load_model(target)
    head = load_draft_head(tmp_path / "head", decoder)
    layers = len(decoder.spec.layers)
    inputs = states_of(decoder, (2, layers // 2, layers - 3))
    states, logits = drafted(head, inputs)
    entered = eagle3_enter(weights, config, inputs[:-1])
    torch.testing.assert_close(head.enter(inputs[:-1]), entered)
    expected = eagle3_states(weights, config, decoder.embed_tokens(TOKENS[1:]), entered)
    scores = eagle3_logits(weights, config, expected)
    torch.testing.assert_close(logits, scores, rtol=1e-4, atol=1e-4)
    assert (logits > float("-inf")).sum(-1).eq(40).all()
    if changes:
        expected = rms_norm(expected, weights["norm.weight"], config["rms_norm_eps"])
    torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_eagle(tmp_path: Path) -> None:
    target = make_checkpoint("llama", tmp_path / "target")
    weights = write_eagle(tmp_path / "head", target)
    decoder = load_model(target)
    head, hidden = load_draft_head(tmp_path / "head", decoder), states_of(decoder)
    states, logits = drafted(head, hidden)
    expected = eagle_states(weights, read_config(tmp_path / "head"), TOKENS[1:], hidden[:-1])
    torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits, decoder.logits(expected), rtol=1e-4, atol=1e-4)


def test_speculators_nest_the_layer_and_number_layers_by_what_they_are_given(tmp_path: Path) -> None:
    target = make_checkpoint("llama", tmp_path / "target")
    write_eagle(tmp_path / "head", target, drafted=40)
    config = read_config(tmp_path / "head")
    nested = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 40,
        "transformer_layer_config": config | {"architectures": ["LlamaForCausalLM"]},
        "eagle_aux_hidden_state_layer_ids": [0, 1, 3],
    }
    (tmp_path / "head" / "config.json").write_text(json.dumps(nested))
    head = load_draft_head(tmp_path / "head", load_model(target))
    assert head.head.eagle3 is not None
    assert head.head.eagle3.entries == (0, 1, 3)
    assert head.head.eagle3.normal_residual, "the default of that format"
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    (tmp_path / "head" / "config.json").write_text(json.dumps(config))
    head = load_draft_head(tmp_path / "head", load_model(target))
    assert head.head.eagle3 is not None
    assert head.head.eagle3.entries == (1, 2, 3)


@torch.inference_mode()
def test_what_comes_out_of_the_last_layer_can_be_had(tmp_path: Path) -> None:
    decoder = load_model(make_checkpoint("llama", tmp_path))
    torch.testing.assert_close(decoder.norm(states_of(decoder, (len(decoder.spec.layers),))), states_of(decoder))


def test_heads_are_told_from_models(tmp_path: Path) -> None:
    target = make_checkpoint("llama", tmp_path / "target")
    write_eagle(tmp_path / "eagle3", target, drafted=40)
    write_eagle(tmp_path / "eagle", target, architectures=["LlamaForCausalLM"])
    found = {name: is_draft_head(tmp_path / name) for name in ("target", "eagle3", "eagle")}
    assert found == {"target": False, "eagle3": True, "eagle": True}


def test_heads_that_do_not_fit(tmp_path: Path) -> None:
    target = make_checkpoint("llama", tmp_path / "target")
    decoder = load_model(target)
    with pytest.raises(UnsupportedModel, match="llama has no layer that predicts further tokens"):
        load_draft_head(target, decoder)
    folder = make_checkpoint("glm4_moe", tmp_path / "glm4_moe")
    with pytest.raises(UnsupportedModel, match=r"no layer for multi-token prediction \(model.layers.3\)"):
        load_draft_head(folder, load_model(folder))
    assert load_draft_head(folder, load_model(folder), load_format="dummy").head.parts.layer == "model.layers.3"
    write_eagle(tmp_path / "head", target, drafted=40, vocab_size=77)
    with pytest.raises(UnsupportedModel, match="for a vocabulary of 77 tokens"):
        load_draft_head(tmp_path / "head", decoder)
    write_eagle(tmp_path / "head", target, drafted=40, eagle_aux_hidden_state_layer_ids=[1, 2, 9])
    with pytest.raises(UnsupportedModel, match=r"\[1, 2, 9\]: the model has 3 layers"):
        load_draft_head(tmp_path / "head", decoder)
    write_eagle(tmp_path / "head", target, drafted=40, draft_vocab_size=1000)
    with pytest.raises(UnsupportedModel, match="draft_vocab_size is 1000: it must be from 1 to 131"):
        load_draft_head(tmp_path / "head", decoder)
    write_eagle(tmp_path / "head", target, drafted=40, num_hidden_layers=2)
    with pytest.raises(UnsupportedModel, match="with 2 layers"):
        load_draft_head(tmp_path / "head", decoder)
    weights = write_eagle(tmp_path / "head", target, drafted=40)
    file = tmp_path / "head" / "model.safetensors"
    save_file(weights | {"d2t": weights["d2t"] + 500}, file)
    with pytest.raises(CorruptCheckpoint, match=r"d2t.*names tokens outside of the vocabulary"):
        load_draft_head(tmp_path / "head", decoder)
    save_file({name: tensor for name, tensor in load_file(file).items() if "o_proj" not in name}, file)
    with pytest.raises(CorruptCheckpoint, match=r"1 missing: model.layers.0.self_attn.o_proj.weight"):
        load_draft_head(tmp_path / "head", decoder)
