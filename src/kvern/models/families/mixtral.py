"""Mixtral: Mistral's layers with a mixture of experts."""

from kvern.models.describe import describe, read_attention, read_moe, uniform_layers
from kvern.models.registry import Config
from kvern.spec.model import ModelSpec, Rename

RENAMES = (
    Rename(r"\.block_sparse_moe\.", ".mlp."),
    Rename(r"\.w1\.", ".gate_proj."),
    Rename(r"\.w3\.", ".up_proj."),
    Rename(r"\.w2\.", ".down_proj."),
)


def mixtral(config: Config) -> ModelSpec:
    attention = read_attention(config, window=config.get("sliding_window"))
    return describe(config, uniform_layers(config, attention=attention, mlp=read_moe(config)), renames=RENAMES)
