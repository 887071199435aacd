"""Gemma 3n (text): several residual streams, inputs of each layer's own, borrowed caches, MLPs of several kinds."""

from collections.abc import Sequence
from dataclasses import replace

from kvern.models.describe import (
    check_settings,
    describe,
    layers_by_type,
    read_activation,
    read_attention,
    read_layer_types,
    read_mlp,
    read_rms_norm,
)
from kvern.models.families.gemma import gemma3_ropes
from kvern.models.families.gemma4 import cache_owners, tensors_without_use
from kvern.models.registry import Config
from kvern.models.text_parts import text_config, text_part
from kvern.spec.model import SANDWICH_NORMS, AltUpSpec, LayerSpec, ModelSpec, PerLayerSpec, QueryKeyNormSpec, Rename

_RENAMES = (
    Rename(r"^((model\.)?language_model\.)?(model\.)?(?=(embed_tokens_per_layer|(per_layer|altup)_\w+)\.)", "model."),
)


def gemma3n_text(config: Config) -> ModelSpec:
    check_settings(config, {"altup_active_idx": 0, "altup_correct_scale": True})
    owners = cache_owners(config, read_layer_types(config, pattern=5))
    norm = read_rms_norm(config)
    return describe(
        config,
        _layers(config, owners),
        norm=norm,
        block_norms=SANDWICH_NORMS,
        query_key_norm=QueryKeyNormSpec(norm, values=True),
        embedding_scale=config["hidden_size"] ** 0.5,
        logit_softcap=config["final_logit_softcapping"],
        per_layer=PerLayerSpec(
            config["hidden_size_per_layer_input"],
            config["vocab_size_per_layer_input"],
            read_activation(config),
        ),
        altup=AltUpSpec(config["altup_num_inputs"], config["laurel_rank"]),
        renames=_RENAMES,
        ignored=tensors_without_use(owners),
    )


def _layers(config: Config, owners: Sequence[int | None]) -> tuple[LayerSpec, ...]:
    kinds, attention = read_layer_types(config, pattern=5), read_attention(config, scale=1.0)
    mlp = read_mlp(config, activation=read_activation(config))
    layers = layers_by_type(config, kinds, attention=attention, ropes=gemma3_ropes(config), mlp=mlp)
    count = len(layers)
    width, sparse = config["intermediate_size"], config.get("activation_sparsity_pattern")
    if sparse is None:
        sparse = [0.95 if count > 10 and place < 10 else 0.0 for place in range(count)]
    widths = width if isinstance(width, list) else [width] * count
    mlps = [replace(mlp, width=size, sparsity=part) for size, part in zip(widths, sparse, strict=True)]
    return tuple(
        replace(layer, mixer=replace(layer.attention, cache_of=owner), mlp=own)
        for layer, owner, own in zip(layers, owners, mlps, strict=True)
    )


def gemma3n(config: Config) -> ModelSpec:
    """The language model of the published checkpoints; images and sounds are not read."""
    spec = gemma3n_text(text_config(config, "gemma3n_text"))
    return text_part(config, spec, "vision_tower", "embed_vision", "audio_tower", "embed_audio")
