"""Granite, dense and with experts: Llama with multipliers on embeddings, residuals, attention scores and logits."""

from kvern.models.describe import describe, read_attention, read_moe, uniform_layers
from kvern.models.registry import Config
from kvern.spec.model import LayerSpec, ModelSpec, Rename

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
