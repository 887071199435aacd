"""Llama 2, 3, 3.1 and 3.2, and models that differ from it in one or two settings, or in rotated layers."""

from dataclasses import replace

from kvern.models.describe import (
    describe,
    layers_by_type,
    read_mlp,
    read_rope,
    uniform_layers,
)
from kvern.models.registry import Config
from kvern.spec.model import ModelSpec


def llama(config: Config) -> ModelSpec:
    bias = bool(config.get("attention_bias", config.get("qkv_bias", False)))
    mlp = read_mlp(config, bias=bool(config.get("mlp_bias", config.get("bias", False))))
    return describe(config, uniform_layers(config, mlp=mlp), qkv_bias=bias, output_bias=bias)


def cwm(config: Config) -> ModelSpec:
    older = ["sliding_attention" if index % 4 else "full_attention" for index in range(config["num_hidden_layers"])]
    return describe(config, layers_by_type(config, config.get("layer_types") or older))


def arcee(config: Config) -> ModelSpec:
    """Arcee: Llama with squared ReLU and no gate."""
    mlp = read_mlp(config, gated=False)
    return describe(config, uniform_layers(config, mlp=mlp))


def helium(config: Config) -> ModelSpec:
    rope = read_rope(config, interleaved=True)
    return describe(config, uniform_layers(config, rope=rope), output_bias=False)


def ernie4_5(config: Config) -> ModelSpec:
    bias = bool(config["use_bias"])
    rope = read_rope(config, interleaved=True)
    layers = uniform_layers(config, rope=rope, mlp=read_mlp(config, bias=bias))
    tie = config["tie_word_embeddings"]
    return describe(config, layers, qkv_bias=bias, output_bias=bias, tie_word_embeddings=tie)


def seed_oss(config: Config) -> ModelSpec:
    bias, output_bias = config["attention_bias"], config["attention_out_bias"]
    return describe(config, qkv_bias=bias, output_bias=output_bias)


def smollm3(config: Config) -> ModelSpec:
    """SmolLM3: every fourth layer knows no positions."""
    count, interval = config["num_hidden_layers"], config["no_rope_layer_interval"]
    rotated = config.get("no_rope_layers") or [int((index + 1) % interval != 0) for index in range(count)]
    slides = config.get("use_sliding_window", False) and config.get("sliding_window") is not None
    older = ["sliding_attention" if slides and not turns else "full_attention" for turns in rotated]
    kinds = config.get("layer_types") or older
    rope = read_rope(config)
    layers = layers_by_type(config, kinds, ropes=dict.fromkeys(kinds, rope))
    return describe(
        config,
        tuple(replace(layer, rope=rope if turns else None) for layer, turns in zip(layers, rotated, strict=True)),
        tie_word_embeddings=config["tie_word_embeddings"],
    )
