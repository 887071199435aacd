"""Gemma 1, 2 and 3 (text): scaled embeddings, weights stored as w - 1, sandwich norms and local layers since 2."""

from collections.abc import Mapping

from kvern.errors import UnsupportedModel
from kvern.model_spec import PRE_NORMS, SANDWICH_NORMS, LayerSpec, ModelSpec, QueryKeyNormSpec, RopeSpec
from kvern.models.describe import (
    describe,
    layers_by_type,
    read_attention,
    read_layer_types,
    read_mlp,
    read_rms_norm,
    read_rope,
    uniform_layers,
)
from kvern.models.registry import Config, register_family
from kvern.models.text_part import text_config, text_part


def _gemma(config: Config, layers: tuple[LayerSpec, ...], **fields: object) -> ModelSpec:
    given: dict[str, object] = {
        "norm": read_rms_norm(config, offset=1.0),
        "block_norms": SANDWICH_NORMS,
        "embedding_scale": config["hidden_size"] ** 0.5,
        "logit_softcap": config.get("final_logit_softcapping"),
        "tie_word_embeddings": config.get("tie_word_embeddings", True),
    }
    return describe(config, layers, **(given | fields))


@register_family("gemma", "GemmaForCausalLM")
def gemma(config: Config) -> ModelSpec:
    layers = uniform_layers(config, mlp=read_mlp(config, activation="gelu_tanh"))
    return _gemma(config, layers, block_norms=PRE_NORMS)


def _alternating(
    config: Config, pattern: int, ropes: Mapping[str, RopeSpec | None] | None = None
) -> tuple[LayerSpec, ...]:
    """Local layers with a window, and a global one every `pattern` layers."""
    scale = config.get("query_pre_attn_scalar", 256) ** -0.5
    attention = read_attention(config, scale=scale, softcap=config.get("attn_logit_softcapping"))
    kinds = read_layer_types(config, pattern=pattern)
    return layers_by_type(config, kinds, attention=attention, ropes=ropes, mlp=read_mlp(config, activation="gelu_tanh"))


@register_family("gemma2", "Gemma2ForCausalLM")
def gemma2(config: Config) -> ModelSpec:
    return _gemma(config, _alternating(config, 2))


@register_family("gemma3_text", "Gemma3ForCausalLM")
def gemma3_text(config: Config) -> ModelSpec:
    if config.get("use_bidirectional_attention"):
        raise UnsupportedModel("use_bidirectional_attention is true: kvern's models attend to what is before alone")
    layers = _alternating(config, config.get("sliding_window_pattern", 6), gemma3_ropes(config))
    return _gemma(config, layers, query_key_norm=QueryKeyNormSpec(read_rms_norm(config, offset=1.0)))


def gemma3_ropes(config: Config) -> dict[str, RopeSpec]:
    """Global layers have a base of a million and may be stretched; local ones never are."""
    if "full_attention" in (config.get("rope_parameters") or {}):
        return {kind: read_rope(config, kind) for kind in ("full_attention", "sliding_attention")}
    local = {**config, "rope_theta": config.get("rope_local_base_freq", 10000.0), "rope_scaling": None}
    return {"full_attention": read_rope(config, theta=1e6), "sliding_attention": read_rope(local)}


@register_family("gemma3", "Gemma3ForConditionalGeneration")
def gemma3(config: Config) -> ModelSpec:
    """The language model of the multimodal checkpoints; images are not read."""
    spec = gemma3_text(text_config(config, **_TEXT_DEFAULTS))
    return text_part(config, spec, "vision_tower", "multi_modal_projector")


# The first multimodal checkpoints state only what differs from these.
_TEXT_DEFAULTS = {
    "model_type": "gemma3_text",
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
    "rms_norm_eps": 1e-6,
}
