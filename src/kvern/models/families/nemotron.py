"""Nemotron: layer norms whose weights are stored as w - 1, half of each head rotated, squared ReLU without a gate."""

from kvern.models.describe import describe, read_layer_norm, read_mlp, uniform_layers
from kvern.models.registry import Config
from kvern.spec.model import ModelSpec


def nemotron(config: Config) -> ModelSpec:
    mlp = read_mlp(config, gated=False)
    return describe(
        config,
        uniform_layers(config, mlp=mlp),
        norm=read_layer_norm(config, "norm_eps", offset=1.0),
    )
