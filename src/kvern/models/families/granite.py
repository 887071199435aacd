"""Granite, dense, with experts, and with Mamba-2: multipliers on embeddings, residuals, attention scores and logits."""

from kvern.errors import UnsupportedModel
from kvern.models.describe import (
    describe,
    kinds_of,
    read_activation,
    read_attention,
    read_moe,
    read_rope,
    uniform_layers,
)
from kvern.models.registry import Config
from kvern.spec.mixers import AttentionSpec, Mamba2Spec
from kvern.spec.model import LayerSpec, MlpSpec, ModelSpec, MoeSpec, Rename

RENAMES = (
    Rename(r"\.block_sparse_moe\.input_linear\.weight$", ".mlp.experts.gate_up_proj"),
    Rename(r"\.block_sparse_moe\.output_linear\.weight$", ".mlp.experts.down_proj"),
    Rename(r"\.block_sparse_moe\.router\.layer\.", ".mlp.gate."),
)
"""Renames of experts."""


def describe_granite(config: Config, layers: tuple[LayerSpec, ...], renames: tuple[Rename, ...] = ()) -> ModelSpec:
    """A model of these layers with Granite's multipliers."""
    return describe(
        config,
        layers,
        renames=renames,
        embedding_scale=config["embedding_multiplier"],
        residual_scale=config["residual_multiplier"],
        logit_scale=1.0 / config["logits_scaling"],
    )


def granite(config: Config) -> ModelSpec:
    attention = read_attention(config, scale=config["attention_multiplier"])
    return describe_granite(config, uniform_layers(config, attention=attention))


def granitemoe(config: Config) -> ModelSpec:
    attention = read_attention(config, scale=config["attention_multiplier"])
    return describe_granite(config, uniform_layers(config, attention=attention, mlp=read_moe(config)), RENAMES)


_KINDS = {
    "mamba": "linear_attention",
    "linear_attention": "linear_attention",
    "attention": "full_attention",
    "full_attention": "full_attention",
}
"""The names that kinds of layers have had."""


def check_steps(config: Config) -> None:
    """Raise UnsupportedModel if the steps of Mamba-2 are bounded."""
    low, high = config.get("time_step_limit") or (0.0, float("inf"))
    if low or high not in (float("inf"), "Infinity", {"__float__": "Infinity"}):
        raise UnsupportedModel(f"time_step_limit is {[low, high]!r:.60}: kvern's Mamba-2 takes steps of any length")


def read_mamba(config: Config) -> Mamba2Spec:
    """The Mamba-2 of a configuration whose names begin with `mamba_`."""
    check_steps(config)
    if read_activation(config) != "silu":
        raise UnsupportedModel(f"hidden_act {config['hidden_act']!r:.60}: Mamba-2 is known with silu alone")
    heads, head_dim = config["mamba_n_heads"], config["mamba_d_head"]
    if head_dim == "auto":
        head_dim = config["mamba_expand"] * config["hidden_size"] // heads
    return Mamba2Spec(
        heads=heads,
        head_dim=head_dim,
        groups=config["mamba_n_groups"],
        state_dim=config["mamba_d_state"],
        kernel=config["mamba_d_conv"],
        epsilon=float(config["rms_norm_eps"]),
        bias=bool(config["mamba_proj_bias"]),
        conv_bias=bool(config["mamba_conv_bias"]),
    )


def _kinds(config: Config) -> list[str]:
    names = config.get("layer_types") or config.get("layers_block_type")
    return kinds_of(["mamba"] * int(config["num_hidden_layers"]) if names is None else names, _KINDS)


def granitemoehybrid(config: Config) -> ModelSpec:
    kinds = _kinds(config)
    width = config["shared_intermediate_size"]
    activation = read_activation(config)
    mixers: dict[str, AttentionSpec | Mamba2Spec] = {
        "full_attention": read_attention(config, scale=config["attention_multiplier"]),
    }
    if "linear_attention" in kinds:
        mixers["linear_attention"] = read_mamba(config)
    turns = config.get("position_embedding_type") == "rope"
    mlp: MlpSpec | MoeSpec = MlpSpec(width, activation)
    shared = ".mlp."
    if config.get("num_local_experts"):
        mlp = read_moe(config, shared_width=width)
        shared = ".mlp.shared_expert."
    layers = tuple(
        LayerSpec(mixers[kind], read_rope(config) if turns and kind == "full_attention" else None, mlp)
        for kind in kinds
    )
    renames = (
        *RENAMES,
        Rename(r"\.shared_mlp\.input_linear\.", f"{shared}gate_up_proj."),
        Rename(r"\.shared_mlp\.output_linear\.", f"{shared}down_proj."),
    )
    return describe_granite(config, layers, renames)
