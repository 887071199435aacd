"""Cohere's Command: attention and MLP side by side under one layer norm without bias, scaled logits."""

from kvern.models.describe import (
    describe,
    layers_by_type,
    read_layer_norm,
    read_layer_types,
    read_rope,
    uniform_layers,
)
from kvern.models.registry import Config
from kvern.spec.model import LayerSpec, ModelSpec, QueryKeyNormSpec


def _cohere(config: Config, layers: tuple[LayerSpec, ...]) -> ModelSpec:
    norm = read_layer_norm(config, bias=False)
    return describe(
        config,
        layers,
        norm=norm,
        block_norms={"attention_in": "input_layernorm"},
        query_key_norm=QueryKeyNormSpec(norm, "each_head") if config.get("use_qk_norm") else None,
        parallel=True,
        logit_scale=config["logit_scale"],
        tie_word_embeddings=config["tie_word_embeddings"],
    )


def cohere(config: Config) -> ModelSpec:
    return _cohere(config, uniform_layers(config, rope=read_rope(config, interleaved=True)))


def cohere2(config: Config) -> ModelSpec:
    """Local layers are rotated; every fourth is global and knows no positions."""
    ropes = {"sliding_attention": read_rope(config, interleaved=True), "full_attention": None}
    kinds = read_layer_types(config, pattern=config.get("sliding_window_pattern", 4))
    return _cohere(config, layers_by_type(config, kinds, ropes=ropes))
