"""Qwen2 and 2.5 (biased projections), Qwen3 (normalised queries and keys), mixtures of experts, and a classifier."""

from collections.abc import Sequence
from dataclasses import replace

from kvern.errors import UnsupportedModel
from kvern.models.describe import describe, layers_by_type, read_moe, read_rms_norm
from kvern.models.registry import Config
from kvern.spec.model import LayerSpec, ModelSpec, MoeSpec, QueryKeyNormSpec


def layers_from(config: Config, first: int) -> list[str]:
    """The types of layers: given, or a sliding window from layer `first` on."""
    count = config["num_hidden_layers"]
    older = ["sliding_attention" if index >= first else "full_attention" for index in range(count)]
    return config.get("layer_types") or older


def _window(config: Config) -> Config:
    """The configuration without a window, unless it is switched on."""
    return config if config.get("use_sliding_window") else {**config, "sliding_window": None}


def _layers(config: Config) -> tuple[LayerSpec, ...]:
    return layers_by_type(_window(config), layers_from(config, config.get("max_window_layers", 0)))


def read_sparse(config: Config, **fields: object) -> MoeSpec:
    """Qwen's experts, whose weights are renormalised if the configuration says so."""
    given = {"width": config["moe_intermediate_size"], "renormalize": config.get("norm_topk_prob", False)}
    return read_moe(config, **(given | fields))


def _sparse_layers(config: Config, kinds: Sequence[str], moe: MoeSpec) -> tuple[LayerSpec, ...]:
    """Layers with experts in every `decoder_sparse_step`-th layer, except those listed as dense."""
    step, dense = config["decoder_sparse_step"], config.get("mlp_only_layers") or ()
    return tuple(
        replace(layer, mlp=moe) if index not in dense and (index + 1) % step == 0 else layer
        for index, layer in enumerate(layers_by_type(_window(config), kinds))
    )


def qwen2(config: Config) -> ModelSpec:
    return describe(config, _layers(config), qkv_bias=True, output_bias=False)


def qwen3(config: Config) -> ModelSpec:
    return describe(config, _layers(config), query_key_norm=QueryKeyNormSpec(read_rms_norm(config)))


def qwen3_classifier(config: Config) -> ModelSpec:
    """A converted reranker with one label; with `classifier_from_token` the language model it was made of."""
    if config.get("classifier_from_token"):
        return qwen3(config)
    if (labels := len(config.get("id2label") or "01")) != 1:  # transformers writes no id2label where there are two
        raise UnsupportedModel(f"id2label names {labels} labels: classifiers of one label, rerankers, are supported")
    spec = qwen3({**config, "tie_word_embeddings": True})
    return replace(spec, ignored=(*spec.ignored, r"^score\.weight$"), is_classifier=True)


def qwen2_moe(config: Config) -> ModelSpec:
    moe = read_sparse(config, shared_width=config["shared_expert_intermediate_size"], shared_gate=True)
    most, count = config["max_window_layers"], config["num_hidden_layers"]
    older = ["full_attention" if index % 2 or index >= most else "sliding_attention" for index in range(count)]
    layers = _sparse_layers(config, config.get("layer_types") or older, moe)
    return describe(config, layers, qkv_bias=config.get("qkv_bias", True), output_bias=False)


def qwen3_moe(config: Config) -> ModelSpec:
    kinds = ["sliding_attention"] * int(config["num_hidden_layers"])
    layers = _sparse_layers(config, kinds, read_sparse(config))
    return describe(config, layers, query_key_norm=QueryKeyNormSpec(read_rms_norm(config)))
