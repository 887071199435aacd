"""Hunyuan dense: queries and keys are normalised after the rotation."""

from dataclasses import replace

from kvern.models.describe import describe, read_head_dim, read_rms_norm, read_rope, rope_settings, uniform_layers
from kvern.models.registry import Config
from kvern.spec.model import ModelSpec, QueryKeyNormSpec, Rename, RopeSpec
from kvern.spec.rope_scaling import LinearScaling


def _read_rope(config: Config) -> RopeSpec:
    """The rotary embedding; "dynamic" with an `alpha` means a fixed, higher base here."""
    rope = read_rope(config)
    parameters = rope_settings(config)
    if not parameters.get("alpha"):
        return rope
    dim = read_head_dim(config)
    return replace(rope, theta=rope.theta * parameters["alpha"] ** (dim / (dim - 2)), scaling=LinearScaling())


def hunyuan_v1_dense(config: Config) -> ModelSpec:
    return describe(
        config,
        uniform_layers(config, rope=_read_rope(config)),
        query_key_norm=QueryKeyNormSpec(read_rms_norm(config), after_rope=True),
        renames=(
            Rename(r"\.query_layernorm\.", ".q_norm."),
            Rename(r"\.key_layernorm\.", ".k_norm."),
        ),
    )
