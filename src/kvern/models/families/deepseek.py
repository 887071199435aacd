"""DeepSeek-V2, V3 and R1, Kimi K2, GLM-4.7-Flash: latent attention; dense layers, then experts with shared ones.

V2 routes by a softmax, the others by sigmoid scores; within groups, if there are several. V3.2 attends to the keys that
an indexer selects.
"""

import math
from collections.abc import Callable
from dataclasses import replace

from kvern.errors import UnsupportedModel
from kvern.models.describe import check_settings, describe, kinds_of, read_mlp, read_rope, rope_settings
from kvern.models.families.glm_moe import read_sigmoid_moe, tensor_names
from kvern.models.registry import Config
from kvern.models.text_parts import text_config, text_part
from kvern.spec.mixers import IndexerSpec, LatentAttentionSpec
from kvern.spec.model import LayerSpec, MlpSpec, ModelSpec, MoeSpec, Rename

_AS_SAVED = Rename(r"^language_model\.model\.blocks\.", "model.layers.")
"""Transformers saves the layers of Kimi K2.5 under another name than they are published with, and loads both."""


def _scale(config: Config) -> float:
    """The attention scale of the heads, increased by `mscale_all_dim` where positions are stretched."""
    rope = rope_settings(config)
    weight, factor = rope.get("mscale_all_dim") or 0.0, float(rope.get("factor") or 1.0)
    growth = 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
    return float((config["qk_nope_head_dim"] + config["qk_rope_head_dim"]) ** -0.5 * growth**2)


def _latent_attention(config: Config) -> LatentAttentionSpec:
    """Latent attention; the epsilon of its norms is fixed."""
    if config.get("attention_bias") and config.get("q_lora_rank") is None:
        raise UnsupportedModel("attention_bias without q_lora_rank: keys' projections would have one and queries' none")
    return LatentAttentionSpec(
        heads=config["num_attention_heads"],
        q_lora_rank=config.get("q_lora_rank"),
        kv_lora_rank=config["kv_lora_rank"],
        qk_nope_head_dim=config["qk_nope_head_dim"],
        qk_rope_head_dim=config["qk_rope_head_dim"],
        v_head_dim=config["v_head_dim"],
        scale=_scale(config),
    )


def _kinds(config: Config) -> list[str]:
    """ "dense" or "sparse" for each layer."""
    if config.get("moe_layer_freq") not in (None, 1):
        raise UnsupportedModel(
            f"moe_layer_freq {config['moe_layer_freq']!r:.60}: all layers after the dense ones are sparse"
        )
    count = config["num_hidden_layers"]
    kinds = config.get("mlp_layer_types") or []
    if not kinds:
        dense = min(config["first_k_dense_replace"], count)
        kinds = ["dense"] * dense + ["sparse"] * (count - dense)
    return kinds_of(kinds, {kind: kind for kind in ("dense", "sparse")})


def _describe(config: Config, read_experts: Callable[[], MoeSpec], *, interleaved: bool) -> ModelSpec:
    attention = _latent_attention(config)
    rope = read_rope({**config, "head_dim": attention.qk_rope_head_dim}, interleaved=interleaved)
    kinds = _kinds(config)
    mlps: dict[str, MlpSpec | MoeSpec] = {"dense": read_mlp(config)}
    if "sparse" in kinds:
        mlps["sparse"] = read_experts()
    layers = tuple(LayerSpec(attention, rope, mlps[kind]) for kind in kinds)
    return describe(config, layers, **tensor_names(config))


def _only(config: Config, name: str, known: str) -> None:
    if config.get(name) not in (None, known):
        raise UnsupportedModel(f"{name} {config[name]!r:.60} is unknown; known: {known}")


def deepseek_v2(config: Config) -> ModelSpec:
    _only(config, "scoring_func", "softmax")
    check_settings(config, {"use_mla": True, "norm_topk_prob": False})
    method = config.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedModel(f"topk_method {method!r:.60} is unknown; known: greedy, group_limited_greedy")
    without_groups = {"n_group": 1, "topk_group": 1} if method == "greedy" else {}

    def experts() -> MoeSpec:
        return replace(read_sigmoid_moe({**config, **without_groups}), scoring="softmax")

    return _describe(config, experts, interleaved=True)


def deepseek_v3(config: Config) -> ModelSpec:
    _only(config, "scoring_func", "sigmoid")
    _only(config, "topk_method", "noaux_tc")
    return _describe(config, lambda: read_sigmoid_moe(config), interleaved=bool(config["rope_interleave"]))


def deepseek_v32(config: Config) -> ModelSpec:
    kinds_of(config.get("layer_types") or (), {"indexed_attention": "indexed_attention"})
    spec = deepseek_v3({**config, "rope_interleave": True})
    indexer = IndexerSpec(config["index_n_heads"], config["index_head_dim"], config["index_topk"])
    mixer = replace(_latent_attention(config), indexer=indexer)
    return replace(spec, layers=tuple(replace(layer, mixer=mixer) for layer in spec.layers))


def kimi_k25(config: Config) -> ModelSpec:
    """The language model of Kimi K2.5 and later, which see images, too."""
    spec = deepseek_v3(text_config(config, "deepseek_v3"))
    spec = replace(spec, renames=(_AS_SAVED, *spec.renames))
    return text_part(config, spec, "vision_tower", "mm_projector")
