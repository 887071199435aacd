"""SmolLM3: Llama in which every fourth layer knows no positions."""

from dataclasses import replace

from kvern.models.describe import describe, layers_by_type, read_rope
from kvern.models.registry import Config
from kvern.spec.model import ModelSpec


def smollm3(config: Config) -> ModelSpec:
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
