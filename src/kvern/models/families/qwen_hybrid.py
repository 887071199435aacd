"""Qwen3-Next and Qwen3.5 (its text): gated delta nets, and gated full attention in every fourth layer."""

from dataclasses import replace

from kvern.errors import UnsupportedModel
from kvern.models.describe import (
    describe,
    kinds_of,
    read_activation,
    read_attention,
    read_mlp,
    read_rms_norm,
    read_rope,
)
from kvern.models.families.qwen import read_sparse
from kvern.models.registry import Config
from kvern.models.text_parts import text_config, text_part
from kvern.spec.mixers import AttentionSpec, DeltaNetSpec
from kvern.spec.model import HeadLayerSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec, QueryKeyNormSpec

_DRAFT_HEAD = HeadLayerSpec(
    layer="mtp.layers.0",
    joined="mtp.fc",
    embedding_norm="mtp.pre_fc_norm_embedding",
    hidden_norm="mtp.pre_fc_norm_hidden",
    norm="mtp.norm",
    normal=True,
)


def _delta_net(config: Config, *, grouped: bool) -> DeltaNetSpec:
    if read_activation(config) != "silu":
        raise UnsupportedModel(f"hidden_act {config['hidden_act']!r:.60}: gated delta nets are known with silu alone")
    if (gate := config.get("output_gate_type", "swish")) not in ("swish", "silu"):
        raise UnsupportedModel(f"output_gate_type {gate!r:.60}: gated delta nets are known with swish alone")
    return DeltaNetSpec(
        key_heads=config["linear_num_key_heads"],
        value_heads=config["linear_num_value_heads"],
        key_dim=config["linear_key_head_dim"],
        value_dim=config["linear_value_head_dim"],
        kernel=config["linear_conv_kernel_dim"],
        epsilon=float(config["rms_norm_eps"]),
        grouped=grouped,
    )


def _kinds(config: Config) -> list[str]:
    count, interval = config["num_hidden_layers"], config.get("full_attention_interval") or 4
    kinds = config.get("layer_types") or [
        "linear_attention" if (index + 1) % interval else "full_attention" for index in range(count)
    ]
    return kinds_of(kinds, {kind: kind for kind in ("linear_attention", "full_attention")})


def _hybrid(config: Config, mlps: list[MlpSpec | MoeSpec], *, grouped: bool) -> ModelSpec:
    """Layers by their types, with these MLPs; `grouped` as in `DeltaNetSpec`."""
    mixers: dict[str, AttentionSpec | DeltaNetSpec] = {
        "linear_attention": _delta_net(config, grouped=grouped),
        "full_attention": replace(read_attention(config), gated=True),
    }
    rope = read_rope(config)
    layers = tuple(
        LayerSpec(mixers[kind], rope if kind == "full_attention" else None, mlp)
        for kind, mlp in zip(_kinds(config), mlps, strict=True)
    )
    norm = read_rms_norm(config, offset=1.0)
    return describe(
        config,
        layers,
        norm=norm,
        query_key_norm=QueryKeyNormSpec(norm),
        ignored=(r"^mtp\.",),
        draft_head=_DRAFT_HEAD,
    )


def _shared_moe(config: Config, *, renormalize: bool) -> MoeSpec:
    width = config["shared_expert_intermediate_size"]
    return read_sparse(config, renormalize=renormalize, shared_width=width, shared_gate=True)


def qwen3_next(config: Config) -> ModelSpec:
    step, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
    sparse = [
        bool(config.get("num_experts")) and index not in dense and (index + 1) % step == 0
        for index in range(config["num_hidden_layers"])
    ]
    moe = _shared_moe(config, renormalize=config["norm_topk_prob"]) if any(sparse) else None
    mlps: list[MlpSpec | MoeSpec] = [moe if moe and is_sparse else read_mlp(config) for is_sparse in sparse]
    return _hybrid(config, mlps, grouped=True)


def qwen3_5_text(config: Config) -> ModelSpec:
    return _hybrid(config, [read_mlp(config)] * int(config["num_hidden_layers"]), grouped=False)


def qwen3_5_moe_text(config: Config) -> ModelSpec:
    moe = _shared_moe(config, renormalize=True)
    return _hybrid(config, [moe] * int(config["num_hidden_layers"]), grouped=False)


def qwen3_5(config: Config) -> ModelSpec:
    """The language model of the published checkpoints; `families/qwen_vision.py` describes their encoder of images."""
    return text_part(config, qwen3_5_text(text_config(config, "qwen3_5_text")), "visual")


def qwen3_5_moe(config: Config) -> ModelSpec:
    return text_part(config, qwen3_5_moe_text(text_config(config, "qwen3_5_moe_text")), "visual")
