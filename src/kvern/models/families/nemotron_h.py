"""Nemotron-H and Nemotron 3: layers that are Mamba-2, attention without positions, an MLP or experts alone."""

from kvern.errors import UnsupportedModel
from kvern.models.describe import (
    check_settings,
    describe,
    kinds_of,
    read_activation,
    read_attention,
    read_groups,
    read_moe,
)
from kvern.models.families.granite import check_steps
from kvern.models.registry import Config
from kvern.spec.mixers import Mamba2Spec
from kvern.spec.model import Activation, LayerSpec, MlpSpec, ModelSpec, MoeSpec, NormSpec, Rename

_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_KINDS = {kind: kind for kind in _LETTERS.values()} | {"mamba": "linear_attention", "attention": "full_attention"}
"""The names that kinds of layers have had."""
_AS_PUBLISHED = {
    "attention_bias": False,
    "sliding_window": None,
    "mamba_hidden_act": "silu",
    "residual_in_fp32": False,
}
"""Settings that have the same value in the files of all models."""
_RENAMES = (
    Rename(r"^backbone\.", "model."),
    Rename(r"^model\.embeddings\.", "model.embed_tokens."),
    Rename(r"^model\.norm_f\.", "model.norm."),
    Rename(r"\.mixer\.([qkvo]_proj)\.", r".self_attn.\1."),
    Rename(r"\.mixer\.(in_proj|out_proj|conv1d|norm)\.", r".mamba.\1."),
    Rename(r"\.mixer\.(A_log|D|dt_bias)$", r".mamba.\1"),
    Rename(r"\.mixer\.shared_experts\.", ".mlp.shared_expert."),
    Rename(r"\.mixer\.", ".mlp."),
)


def _kinds(config: Config) -> list[str]:
    names = config.get("layers_block_type") or config.get("layer_types")
    if names is None:
        names = [_LETTERS.get(letter, letter) for letter in config.get("hybrid_override_pattern") or "ME*-"]
    kinds = kinds_of(names, _KINDS)
    if "linear_attention" not in kinds:
        raise UnsupportedModel("no layer is Mamba-2: kvern reads nemotron_h with some")
    return kinds


def _mamba(config: Config, epsilon: float) -> Mamba2Spec:
    """`time_step_min` bounds the steps that weights begin with in training, and none of a trained model."""
    check_steps(config)
    return Mamba2Spec(
        heads=config["mamba_num_heads"],
        head_dim=config["mamba_head_dim"],
        groups=config["n_groups"],
        state_dim=config["ssm_state_size"],
        kernel=config["conv_kernel"],
        epsilon=epsilon,
        bias=bool(config["use_bias"]),
        conv_bias=bool(config["use_conv_bias"]),
    )


def _moe(config: Config) -> MoeSpec:
    if config.get("mlp_bias"):
        raise UnsupportedModel("mlp_bias is true: kvern's experts have no biases")
    groups, top_groups = read_groups(config)
    return read_moe(
        config,
        width=config["moe_intermediate_size"],
        activation=_activation(config),
        scoring="sigmoid",
        groups=groups,
        top_groups=top_groups,
        renormalize=bool(config["norm_topk_prob"]),
        routed_scale=float(config["routed_scaling_factor"]),
        shared_width=config["moe_shared_expert_intermediate_size"],
        gated=False,
        latent=config.get("moe_latent_size") or 0,
    )


def _activation(config: Config) -> Activation:
    return read_activation({"hidden_act": config["mlp_hidden_act"]})


def nemotron_h(config: Config) -> ModelSpec:
    check_settings(config, _AS_PUBLISHED)
    kinds = _kinds(config)
    norm = NormSpec("rms", float(config["layer_norm_epsilon"]))
    head_dim = config.get("attention_head_dim") or config.get("head_dim")
    parts = {"linear_attention": LayerSpec(_mamba(config, norm.epsilon), None, None)}
    if "full_attention" in kinds:
        parts["full_attention"] = LayerSpec(read_attention({**config, "head_dim": head_dim}), None, None)
    if "mlp" in kinds:
        mlp = MlpSpec(config["intermediate_size"], _activation(config), gated=False, bias=bool(config.get("mlp_bias")))
        parts["mlp"] = LayerSpec(None, None, mlp)
    if "moe" in kinds:
        parts["moe"] = LayerSpec(None, None, _moe(config))
    return describe(
        config,
        tuple(parts[kind] for kind in kinds),
        norm=norm,
        block_norms={"attention_in": "norm", "mlp_in": "norm"},
        renames=_RENAMES,
        ignored=(r"^mtp\.",),
    )
