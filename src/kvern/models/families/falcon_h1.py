"""Falcon-H1: attention and Mamba-2 on the same rows in every layer, with multipliers on most products."""

from dataclasses import replace

from kvern.models.describe import check_settings, describe, read_attention, read_mlp, read_rope
from kvern.models.families.granite import read_mamba
from kvern.models.registry import Config
from kvern.spec.mixers import Gating, Mamba2Scales, Mamba2Spec, TwoMixersSpec
from kvern.spec.model import LayerSpec, ModelSpec, Rename

_AS_PUBLISHED = {
    "attention_bias": False,
    "mamba_proj_bias": False,
    "projectors_bias": False,
    "attn_layer_indices": None,
    "mamba_use_mlp": True,
}
"""Settings with one value in all published models; biases would need their own multipliers."""


def _mamba(config: Config) -> Mamba2Spec:
    inner = config.get("mamba_d_ssm")
    if inner is not None:
        config = {**config, "mamba_d_head": inner // config["mamba_n_heads"]}
    gate, value, key, query, step = (
        config["ssm_in_multiplier"] * scale for scale in config.get("ssm_multipliers") or (1.0,) * 5
    )
    gating: Gating = "without_norm"
    if config["mamba_rms_norm"]:
        gating = "after_norm" if config["mamba_norm_before_gate"] else "before_norm"
    return replace(
        read_mamba(config),
        gating=gating,
        scales=Mamba2Scales(gate, value, key, query, step, config["ssm_out_multiplier"]),
    )


def falcon_h1(config: Config) -> ModelSpec:
    check_settings(config, _AS_PUBLISHED)
    attention = read_attention(config)
    into = config["attention_in_multiplier"]
    of_scores = into * into * config["key_multiplier"]
    mixers = TwoMixersSpec(
        replace(attention, scale=attention.scale * of_scores),
        _mamba(config),
        into * config["attention_out_multiplier"],
    )
    gate, out = config.get("mlp_multipliers") or (1.0, 1.0)
    layer = LayerSpec(mixers, read_rope(config), read_mlp(config, gate_scale=gate, out_scale=out))
    return describe(
        config,
        (layer,) * int(config["num_hidden_layers"]),
        block_norms={"attention_in": "input_layernorm", "mlp_in": "pre_ff_layernorm"},
        embedding_scale=config["embedding_multiplier"],
        logit_scale=config["lm_head_multiplier"],
        renames=(Rename(r"\.feed_forward\.", ".mlp."), Rename(r"^model\.final_layernorm\.", "model.norm.")),
    )
