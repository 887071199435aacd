"""Gemma 1, 2 and 3: scaled embeddings, weights stored as w - 1, sandwich norms and local layers since 2."""

from collections.abc import Mapping
from dataclasses import replace

from kvern.errors import UnsupportedModel
from kvern.models.describe import (
    describe,
    layers_by_type,
    read_attention,
    read_layer_types,
    read_rms_norm,
    read_rope,
    uniform_layers,
)
from kvern.models.registry import Config
from kvern.models.text_parts import text_config, text_part
from kvern.spec.model import PRE_NORMS, SANDWICH_NORMS, LayerSpec, ModelSpec, QueryKeyNormSpec, RopeSpec


def _gemma(config: Config, layers: tuple[LayerSpec, ...], **fields: object) -> ModelSpec:
    given: dict[str, object] = {
        "norm": read_rms_norm(config, offset=1.0),
        "block_norms": SANDWICH_NORMS,
        "embedding_scale": config["hidden_size"] ** 0.5,
        "logit_softcap": config.get("final_logit_softcapping"),
        "tie_word_embeddings": config["tie_word_embeddings"],
    }
    return describe(config, layers, **(given | fields))


def gemma(config: Config) -> ModelSpec:
    return _gemma(config, uniform_layers(config), block_norms=PRE_NORMS)


def _alternating(
    config: Config, pattern: int, ropes: Mapping[str, RopeSpec | None] | None = None, softcap: float | None = None
) -> tuple[LayerSpec, ...]:
    """Local layers with a window, and a global one every `pattern` layers; scores are bounded in Gemma 2 alone."""
    attention = read_attention(config, scale=config["query_pre_attn_scalar"] ** -0.5, softcap=softcap)
    kinds = read_layer_types(config, pattern=pattern)
    return layers_by_type(config, kinds, attention=attention, ropes=ropes)


def gemma2(config: Config) -> ModelSpec:
    return _gemma(config, _alternating(config, 2, softcap=config["attn_logit_softcapping"]))


def gemma3_text(config: Config) -> ModelSpec:
    if config.get("use_bidirectional_attention"):
        raise UnsupportedModel("use_bidirectional_attention is true: kvern's models attend to what is before alone")
    layers = _alternating(config, config.get("sliding_window_pattern", 6), gemma3_ropes(config))
    return _gemma(config, layers, query_key_norm=QueryKeyNormSpec(read_rms_norm(config, offset=1.0)))


def gemma3_ropes(config: Config) -> dict[str, RopeSpec]:
    """Rotary embeddings: local layers have their own base, and are stretched only if their settings say so."""
    said = (config.get("rope_parameters") or {}).get("sliding_attention")
    local = {**config, "rope_theta": config["rope_local_base_freq"], "rope_scaling": None, "rope_parameters": said}
    return {
        "full_attention": read_rope(config, "full_attention"),
        "sliding_attention": read_rope(local),
    }


def gemma3(config: Config) -> ModelSpec:
    """The language model of the multimodal checkpoints: tokens of an image see each other in all layers."""
    spec = gemma3_text(text_config(config, "gemma3_text"))
    layers = [replace(layer, mixer=replace(layer.attention, spans=True)) for layer in spec.layers]
    spec = replace(spec, layers=tuple(layers))
    return text_part(config, spec, "vision_tower", "multi_modal_projector")
