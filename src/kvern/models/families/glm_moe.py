"""GLM-4 and GLM-4-0414 (half of each head rotated in pairs), GLM-4.5 and 4.6, dots.llm1, and what reads images.

The latter begin with dense layers; the others have experts with sigmoid scores and a shared expert.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvern.models.describe import (
    describe,
    layers_by_type,
    read_groups,
    read_moe,
    read_rms_norm,
    read_rope,
    uniform_layers,
)
from kvern.models.families.qwen import layers_from
from kvern.models.registry import Config
from kvern.models.text_parts import text_config, text_part
from kvern.spec.model import (
    PRE_NORMS,
    HeadLayerSpec,
    LayerSpec,
    ModelSpec,
    MoeSpec,
    Placement,
    QueryKeyNormSpec,
    Rename,
)


def read_sigmoid_moe(config: Config) -> MoeSpec:
    """Experts with sigmoid scores, within groups if there are any, and shared ones of the same width."""
    groups, top_groups = read_groups(config)
    return read_moe(
        config,
        width=config["moe_intermediate_size"],
        scoring="sigmoid",
        groups=groups,
        top_groups=top_groups,
        renormalize=config["norm_topk_prob"],
        routed_scale=config["routed_scaling_factor"],
        shared_width=config["moe_intermediate_size"] * (config.get("n_shared_experts") or 0),
    )


def _sparse(config: Config, layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """Layers after the dense ones have experts, if there are any."""
    dense = config["first_k_dense_replace"]
    moe = read_sigmoid_moe(config) if dense < len(layers) else None
    return layers[:dense] + tuple(replace(layer, mlp=moe) for layer in layers[dense:])


def tensor_names(config: Config) -> dict[str, Any]:
    """Renames and ignored tensors: layers after the last predict further tokens and do not belong to the model."""
    first = config["num_hidden_layers"]
    path = f"model.layers.{first}"
    drafting = range(first, first + (config.get("num_nextn_predict_layers") or 1))
    return {
        "renames": (Rename(r"\.mlp\.shared_experts\.", ".mlp.shared_expert."),),
        "ignored": (rf"^model\.layers\.({'|'.join(map(str, drafting))})\.",),
        "draft_head": HeadLayerSpec(
            layer=path,
            joined=f"{path}.eh_proj",
            embedding_norm=f"{path}.enorm",
            hidden_norm=f"{path}.hnorm",
            norm=f"{path}.shared_head.norm",
        ),
    }


def glm4_moe(config: Config) -> ModelSpec:
    return describe(
        config,
        _sparse(config, uniform_layers(config)),
        query_key_norm=QueryKeyNormSpec(read_rms_norm(config)) if config.get("use_qk_norm") else None,
        output_bias=False,
        **tensor_names(config),
    )


def dots1(config: Config) -> ModelSpec:
    kinds = layers_from(config, config["max_window_layers"])
    return describe(
        config,
        _sparse(config, layers_by_type(config, kinds)),
        query_key_norm=QueryKeyNormSpec(read_rms_norm(config)),
        **tensor_names(config),
    )


def glm(config: Config, block_norms: Mapping[Placement, str] = PRE_NORMS) -> ModelSpec:
    layers = uniform_layers(config, rope=read_rope(config, interleaved=True))
    bias = config["attention_bias"]
    return describe(config, layers, block_norms=block_norms, qkv_bias=bias, output_bias=False)


def glm4(config: Config) -> ModelSpec:
    """GLM-4-0414: norms after attention and MLP as well."""
    sandwiched: Mapping[Placement, str] = {"attention_out": "post_self_attn_layernorm", "mlp_out": "post_mlp_layernorm"}
    return glm(config, {**PRE_NORMS, **sandwiched})


def glm4v(config: Config) -> ModelSpec:
    """The language model of GLM-4.1V and others, GLM-4's, whose queries, keys and values always have biases."""
    text = text_config(config, "glm4v_text")
    return text_part(config, glm4({**text, "attention_bias": True, "head_dim": None}), "visual")


def glm4v_moe(config: Config) -> ModelSpec:
    """The language model of GLM-4.5V and 4.6V: GLM-4.5's."""
    return text_part(config, glm4_moe(text_config(config, "glm4v_moe_text")), "visual")


def glm46v(config: Config) -> ModelSpec:
    """Either of them, as its `text_config` says."""
    inner = (config.get("text_config") or {}).get("model_type")
    return glm4v_moe(config) if inner == "glm4v_moe_text" else glm4v(config)
