"""Gemma 4's language model: two head sizes, shared KV caches, per-layer inputs, experts in addition to the MLP."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvern.errors import UnsupportedModel
from kvern.models.describe import (
    describe,
    layers_by_type,
    read_activation,
    read_attention,
    read_layer_types,
    read_mlp,
    read_moe,
    read_rms_norm,
    read_rope,
)
from kvern.models.registry import Config
from kvern.models.text_parts import text_config, text_part
from kvern.spec.model import (
    SANDWICH_NORMS,
    LayerSpec,
    ModelSpec,
    MoeSpec,
    PerLayerSpec,
    QueryKeyNormSpec,
    Rename,
)

if TYPE_CHECKING:
    from torch import Tensor

_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}
_OF_ONE_LAYER = ("head_dim", "num_key_value_heads")


def _scaled_by_width(scale: "Tensor", spec: ModelSpec) -> "Tensor":
    return scale.float().mul(spec.hidden_size**-0.5)


_RENAMES = (
    Rename(r"^((model\.)?language_model\.)?(model\.)?(?=(embed_tokens_per_layer|per_layer_\w+)\.)", "model."),
    Rename(r"(?<=\.layers)(\.\d+)\.experts\.", r"\1.moe.experts."),
    Rename(r"(?<=\.layers)(\.\d+)\.router\.proj\.", r"\1.moe.gate."),
    Rename(r"(?<=\.layers)(\.\d+)\.router\.per_expert_scale$", r"\1.moe.gate.per_expert_scale"),
    Rename(r"(?<=\.layers)(\.\d+)\.router\.scale$", r"\1.moe.norm.weight", _scaled_by_width),
)


def gemma4_text(config: Config) -> ModelSpec:
    if config.get("use_bidirectional_attention") == "all":
        raise UnsupportedModel("use_bidirectional_attention is all: kvern's models attend to what is before alone")
    kinds = [*read_layer_types(config, pattern=6)[:-1], "full_attention"]
    owners = cache_owners(config, kinds)
    layers = [_layer(config, *place) for place in zip(kinds, _settings(config, kinds), owners, strict=True)]
    norm = read_rms_norm(config)
    return describe(
        config,
        tuple(layers),
        norm=norm,
        block_norms=SANDWICH_NORMS,
        query_key_norm=QueryKeyNormSpec(norm, values=True),
        embedding_scale=config["hidden_size"] ** 0.5,
        logit_softcap=config.get("final_logit_softcapping"),
        tie_word_embeddings=config["tie_word_embeddings"],
        per_layer=_per_layer(config),
        layer_scalars=True,
        renames=_RENAMES,
        ignored=tensors_without_use(owners),
    )


def cache_owners(config: Config, kinds: Sequence[str]) -> list[int | None]:
    """For each layer, the layer whose keys and values it shares: the last own one of its type; None: its own."""
    shared = config.get("num_kv_shared_layers") or 0
    own = len(kinds) - shared
    last = {kind: place for place, kind in enumerate(kinds[: max(own, 0)])}
    if missing := set(kinds) - set(last):
        raise UnsupportedModel(
            f"num_kv_shared_layers is {shared}: of {len(kinds)} layers none of type {min(missing)!r:.60} has keys of "
            "its own"
        )
    return [None] * own + [last[kind] for kind in kinds[own:]]


def tensors_without_use(owners: Sequence[int | None]) -> tuple[str, ...]:
    """Expressions of tensors that a checkpoint may have: keys and values of layers that attend to another's."""
    borrowing = "|".join(str(place) for place, owner in enumerate(owners) if owner is not None)
    return (rf"layers\.({borrowing})\.self_attn\.[kv]_(proj|norm)\.",) if borrowing else ()


def _settings(config: Config, kinds: Sequence[str]) -> list[Mapping[str, Any]]:
    """The settings that differ in each layer: listed by layer, or, as published, for full attention only."""
    if "per_layer_config" in config:
        given = config["per_layer_config"] or {}
        found: list[Mapping[str, Any]] = [given.get(str(place), {}) for place in range(len(kinds))]
        if unknown := {name for settings in given.values() for name in settings} - set(_OF_ONE_LAYER):
            raise UnsupportedModel(
                f"per_layer_config has {min(unknown)!r:.60}; known of one layer: {', '.join(_OF_ONE_LAYER)}"
            )
        return found
    full: dict[str, Any] = {"head_dim": config.get("global_head_dim") or 512}
    if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads"):
        full["num_key_value_heads"] = config["num_global_key_value_heads"]
    return [full if kind == "full_attention" else {} for kind in kinds]


def _layer(config: Config, kind: str, settings: Mapping[str, Any], owner: int | None) -> LayerSpec:
    """A layer of a kind with its own settings that attends to the cache of the `owner`."""
    ropes = config.get("rope_parameters") or _ROPES
    own = {**config, "rope_parameters": {kind: ropes[kind]}, **settings}
    keys_are_values = bool(config.get("attention_k_eq_v")) and kind == "full_attention"
    spans = kind == "sliding_attention" and config.get("use_bidirectional_attention") == "vision"
    attention = replace(read_attention(own, scale=1.0), keys_are_values=keys_are_values, cache_of=owner, spans=spans)
    mlp = read_mlp(own, activation=read_activation(config))
    if owner is not None and config.get("use_double_wide_mlp"):
        mlp = replace(mlp, width=2 * mlp.width)
    [layer] = layers_by_type(own, [kind], attention=attention, ropes={kind: read_rope(own, kind)}, mlp=mlp)
    return replace(layer, experts=_experts(config) if config.get("enable_moe_block") else None)


def _experts(config: Config) -> MoeSpec:
    width, top_k = config["moe_intermediate_size"], config["top_k_experts"]
    return read_moe(config, experts=config["num_experts"], top_k=top_k, width=width, expert_scales=True)


def _per_layer(config: Config) -> PerLayerSpec | None:
    if not (width := config["hidden_size_per_layer_input"]):
        return None
    tokens = config["vocab_size_per_layer_input"]
    if tokens < config["vocab_size"]:
        raise UnsupportedModel(
            f"vocab_size_per_layer_input is {tokens}, below vocab_size {config['vocab_size']}: every token needs a row"
        )
    return PerLayerSpec(width, tokens, read_activation(config))


MEDIA = {"image_token_id": 258_880, "audio_token_id": 258_881, "video_token_id": 258_884}
"""The tokens that stand for content other than text, where a configuration does not say."""


def gemma4(config: Config) -> ModelSpec:
    """The language model of the published checkpoints, without its encoders."""
    text = text_config(config, "gemma4_text")
    spec = gemma4_text(text)
    if (per_layer := spec.additions.per_layer) is not None:
        media = [config.get(name, token) for name, token in MEDIA.items()]
        padding = (int(text.get("pad_token_id") or 0), *sorted(filter(None, media)))
        spec = replace(spec, additions=replace(spec.additions, per_layer=replace(per_layer, padding=padding)))
    return text_part(config, spec, "vision_tower", "embed_vision", "audio_tower", "embed_audio")
