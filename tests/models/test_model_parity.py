"""Every family computes what transformers computes, from the files that transformers writes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvern.layers.build import Build
from kvern.layers.linear_method import LinearMethod, LinearShape
from kvern.layers.norm import Norm
from kvern.layers.unquantized import Unquantized, UnquantizedMethod, _packs
from kvern.models.decoder import Decoder
from kvern.models.describe import with_groups
from kvern.models.loader import LoadOptions, load_model, load_weights, read_config
from kvern.models.registry import spec_from_config
from kvern.spec.mixers import IndexerSpec, LatentAttentionSpec
from kvern.spec.model import LayerSpec, ModelSpec, MoeSpec, RopeSpec
from tests.support.families import FAMILIES, make_checkpoint, reference_logits
from tests.support.model_outputs import PROMPT, TOLERANCE, DenseAttend, each_layer, error, logits, with_attention


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_agree_with_transformers(family: str, tmp_path: Path) -> None:
    folder = make_checkpoint(family, tmp_path)
    assert reference_logits(folder, PROMPT).std() > 0.1, "the reference is too flat to tell models apart"
    assert error(load_model(folder), folder) < TOLERANCE


ROPES: dict[str, tuple[dict[str, Any], int | None]] = {
    "linear": ({"rope_type": "linear", "factor": 4.0}, None),
    "dynamic, within": ({"rope_type": "dynamic", "factor": 4.0}, None),
    "dynamic, beyond": ({"rope_type": "dynamic", "factor": 4.0, "max_position_embeddings": 32}, len(PROMPT)),
    "yarn": ({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}, None),
    "yarn, all settings": (
        {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "mscale": 0.7,
            "mscale_all_dim": 1.3,
            "truncate": False,
        },
        None,
    ),
    "yarn, attention factor": (
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "attention_factor": 1.7},
        None,
    ),
    "llama3": (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        None,
    ),
    "longrope, short": ({"rope_type": "longrope", "original_max_position_embeddings": 64}, 64),
    "longrope, long": ({"rope_type": "longrope", "original_max_position_embeddings": 32}, None),
    "proportional": ({"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0}, None),
}


@pytest.mark.parametrize("name", ROPES)
def test_rope_scalings_agree_with_transformers(name: str, tmp_path: Path) -> None:
    rope, max_model_len = {"rope_theta": 5000.0} | ROPES[name][0], ROPES[name][1]
    changes: dict[str, Any] = {"head_dim": 16, "rope_parameters": rope}
    if "max_position_embeddings" in rope:
        changes["max_position_embeddings"] = rope.pop("max_position_embeddings")
    if rope["rope_type"] == "longrope":
        rope |= {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [1.5 + 0.6 * i for i in range(8)]}
    folder = make_checkpoint("llama", tmp_path, **changes)
    decoder = load_model(folder, LoadOptions(max_model_len=max_model_len))
    assert error(decoder, folder) < TOLERANCE
    plain = replace(
        decoder.spec, layers=tuple(replace(layer, rope=RopeSpec(5000.0, 16)) for layer in decoder.spec.layers)
    )
    differs = error(build(plain, folder), folder)
    assert (differs > 100 * TOLERANCE) == (name != "dynamic, within")


def build(spec: ModelSpec, folder: Path) -> Decoder:
    decoder = Decoder(spec, Build(torch.float32, torch.device("cpu"), 256))
    load_weights(decoder, folder)
    decoder.finish()
    return decoder


def with_latent(**fields: Any) -> Callable[[ModelSpec], ModelSpec]:
    def change(layer: LayerSpec) -> LayerSpec:
        assert isinstance(layer.mixer, LatentAttentionSpec)
        return replace(layer, mixer=replace(layer.mixer, **fields))

    return lambda spec: each_layer(spec, change)


def with_rope(**fields: Any) -> Callable[[ModelSpec], ModelSpec]:
    def change(layer: LayerSpec) -> LayerSpec:
        assert layer.rope is not None
        return replace(layer, rope=replace(layer.rope, **fields))

    return lambda spec: each_layer(spec, change)


def with_mlp(**fields: Any) -> Callable[[ModelSpec], ModelSpec]:
    return lambda spec: each_layer(spec, lambda layer: replace(layer, mlp=replace(layer.mlp, **fields)))


def with_fields(**fields: Any) -> Callable[[ModelSpec], ModelSpec]:
    return lambda spec: replace(spec, **with_groups(fields, spec))


def with_experts(**fields: Any) -> Callable[[ModelSpec], ModelSpec]:
    def change(layer: LayerSpec) -> LayerSpec:
        return replace(layer, mlp=replace(layer.mlp, **fields)) if isinstance(layer.mlp, MoeSpec) else layer

    return lambda spec: each_layer(spec, change)


def with_query_key_norm(**fields: Any) -> Callable[[ModelSpec], ModelSpec]:
    def change(spec: ModelSpec) -> ModelSpec:
        assert spec.query_key_norm is not None
        return replace(spec, query_key_norm=replace(spec.query_key_norm, **fields))

    return change


FLIPS: dict[str, tuple[str, Callable[[ModelSpec], ModelSpec]]] = {
    "no window": ("mistral", with_attention(window=None)),
    "window one larger": ("mistral", with_attention(window=10)),
    "other scale": ("gemma3", with_attention(scale=0.25)),
    "no attention softcap": ("gemma2", with_attention(softcap=None)),
    "no logit softcap": ("gemma2", with_fields(logit_softcap=None)),
    "no embedding scale": ("gemma", with_fields(embedding_scale=1.0)),
    "no norm offset": ("gemma", lambda spec: replace(spec, norm=replace(spec.norm, offset=0.0))),
    "no residual scale": ("granite", with_fields(residual_scale=1.0)),
    "no logit scale": ("cohere", with_fields(logit_scale=1.0)),
    "other base": ("llama", with_rope(theta=9000.0)),
    "halves for pairs": ("cohere", with_rope(interleaved=False)),
    "whole heads rotated": ("glm", with_rope(dim=16)),
    "positions in every layer": (
        "smollm3",
        lambda spec: each_layer(spec, lambda layer: replace(layer, rope=spec.layers[0].rope)),
    ),
    "query-key norm after rope": ("qwen3", with_query_key_norm(after_rope=True)),
    "query-key norm before rope": ("hunyuan_v1_dense", with_query_key_norm(after_rope=False)),
    "sequential for parallel": ("gpt_neox", with_fields(parallel=False)),
    "parallel for sequential": ("gpt_neox_sequential", with_fields(parallel=True)),
    "other activation": ("phi", with_mlp(activation="relu")),
    "no renormalization": ("qwen3_moe", with_experts(renormalize=False)),
    "experts not rescaled": ("glm4_moe", with_experts(routed_scale=1.0)),
    "scale of heads alone": ("deepseek_v3", with_latent(scale=20**-0.5)),
    "norms of latents like others": ("deepseek_v3", with_latent(epsilon=1e-2)),
    "halves for pairs of latents": ("deepseek_v2", with_rope(interleaved=False)),
    "softmax over all groups": ("deepseek_v2", with_experts(groups=1)),
    "renormalized experts": ("deepseek_v2", with_experts(renormalize=True)),
    "experts of all groups": ("glm4_moe_groups", with_mlp(groups=1)),
    "more groups": ("glm4_moe_groups", with_mlp(top_groups=3)),
    "queries that do not grow": ("ministral3", with_rope(query_scaling=None)),
    "fewer experts": ("mixtral", with_mlp(top_k=1)),
    "norms swapped": (
        "olmo2",
        with_fields(block_norms={"attention_out": "post_feedforward_layernorm", "mlp_out": "post_attention_layernorm"}),
    ),
    "more keys than are selected": ("deepseek_v32", with_latent(indexer=IndexerSpec(14, 12, 8))),
    "dense for sparse MLPs": ("gemma3n", with_mlp(sparsity=0.0)),
    "layer norm for rms": ("llama", lambda spec: replace(spec, norm=replace(spec.norm, kind="layer"))),
}


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", FLIPS)
def test_a_wrong_specification_is_seen(name: str, tmp_path: Path) -> None:
    family, flip = FLIPS[name]
    folder = make_checkpoint(family, tmp_path)
    spec = flip(spec_from_config(read_config(folder)))
    assert error(build(spec, folder), folder) > 10 * TOLERANCE


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3", "olmo2"])
def test_the_norms_of_other_devices_agree_too(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvern.layers.norm.is_on_cpu", lambda build: False)
    folder = make_checkpoint(family, tmp_path)
    decoder = load_model(folder)
    assert all(module.gain == 1.0 for module in decoder.modules() if isinstance(module, Norm))
    assert error(decoder, folder) < TOLERANCE


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    expected = reference_logits(folder, PROMPT)
    rough = logits(load_model(folder, LoadOptions(dtype="bf16")), PROMPT)
    assert rough.dtype == torch.float32
    assert 1e-4 < (rough - expected).std() < 0.05 * expected.std()


class Plain(Unquantized):
    def linear(self, shape: LinearShape, build: Build) -> LinearMethod:
        return UnquantizedMethod(shape)


def test_packed_weights_give_the_products_of_plain_ones(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen2", tmp_path)
    plain = load_model(folder, LoadOptions(dtype="bf16", unquantized=Plain()))
    packed = load_model(folder, LoadOptions(dtype="bf16"))
    assert ("PackedMethod" in repr(packed)) == _packs()  # some processors lack the instructions
    assert "PackedMethod" not in repr(plain)
    torch.testing.assert_close(logits(packed, PROMPT), logits(plain, PROMPT), rtol=0.05, atol=0.1)


def test_a_token_does_not_depend_on_its_batch(tmp_path: Path) -> None:
    """Two prompts in one flat run, with attention confined to each, give what each gives alone."""
    decoder = load_model(make_checkpoint("gemma3", tmp_path))
    first, second = PROMPT[:17], PROMPT[17:]
    dense = DenseAttend(decoder)

    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        runs = (slice(0, 17), slice(17, None))
        return torch.cat([dense(layer, query[run], key[run], value[run]) for run in runs])

    positions = torch.cat((torch.arange(17), torch.arange(len(second))))
    with torch.inference_mode():
        together = decoder.logits(decoder(torch.tensor(PROMPT), positions, attend))
    torch.testing.assert_close(
        together, torch.cat((logits(decoder, first), logits(decoder, second))), rtol=0, atol=2e-5
    )
