"""Mistral, Ministral 3, Mixtral, and the language model of Mistral 3."""

from dataclasses import replace

from kvern.errors import UnsupportedModel
from kvern.models.describe import (
    describe,
    layers_by_type,
    read_attention,
    read_layer_types,
    read_moe,
    read_rope,
    rope_settings,
    uniform_layers,
)
from kvern.models.registry import Config
from kvern.models.text_parts import text_config, text_part
from kvern.spec.model import ModelSpec, QueryScaling, Rename


def mistral(config: Config) -> ModelSpec:
    return describe(config, layers_by_type(config, read_layer_types(config)))


def ministral3(config: Config) -> ModelSpec:
    """Queries grow by the logarithm of how often their position exceeds the trained context."""
    given = rope_settings(config)
    rope = read_rope(config)
    kinds = read_layer_types(config)
    if given.get("llama_4_scaling_beta"):
        trained = given.get("original_max_position_embeddings", config["max_position_embeddings"])
        scaling = QueryScaling(given["llama_4_scaling_beta"], trained)
        rope = replace(rope, query_scaling=scaling)
    return describe(config, layers_by_type(config, kinds, ropes=dict.fromkeys(kinds, rope)))


def mistral3(config: Config) -> ModelSpec:
    """The language model of the multimodal checkpoints; `families/pixtral.py` describes their encoder of images."""
    text = text_config(config, "mistral")
    families = {"mistral": mistral, "ministral3": ministral3}
    if text["model_type"] not in families:
        raise UnsupportedModel(
            f"text_config's model_type {text['model_type']!r:.60} is unknown; known within mistral3: "
            + ", ".join(families)
        )
    return text_part(config, families[text["model_type"]](text), "vision_tower", "multi_modal_projector")


RENAMES = (
    Rename(r"\.block_sparse_moe\.", ".mlp."),
    Rename(r"\.w1\.", ".gate_proj."),
    Rename(r"\.w3\.", ".up_proj."),
    Rename(r"\.w2\.", ".down_proj."),
)


def mixtral(config: Config) -> ModelSpec:
    attention = read_attention(config, window=config.get("sliding_window"))
    return describe(config, uniform_layers(config, attention=attention, mlp=read_moe(config)), renames=RENAMES)
