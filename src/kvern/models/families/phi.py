"""Phi 1.5 and 2 (parallel, biased, partly rotated), and Phi-3, 3.5 and 4 (Llama with fused projections)."""

from kvern.models.describe import (
    describe,
    read_attention,
    read_layer_norm,
    read_mlp,
    uniform_layers,
)
from kvern.models.registry import Config
from kvern.spec.model import ModelSpec, QueryKeyNormSpec, Rename


def phi(config: Config) -> ModelSpec:
    norm = read_layer_norm(config)
    mlp = read_mlp(config, gated=False, bias=True)
    return describe(
        config,
        uniform_layers(config, mlp=mlp),
        norm=norm,
        block_norms={"attention_in": "input_layernorm"},
        query_key_norm=QueryKeyNormSpec(norm) if config.get("qk_layernorm") else None,
        parallel=True,
        qkv_bias=True,
        output_bias=True,
        lm_head_bias=True,
        renames=(
            Rename(r"\.self_attn\.dense\.", ".self_attn.o_proj."),
            Rename(r"\.([qk])_layernorm\.", r".\1_norm."),
            Rename(r"\.mlp\.fc1\.", ".mlp.up_proj."),
            Rename(r"\.mlp\.fc2\.", ".mlp.down_proj."),
            Rename(r"^model\.final_layernorm\.", "model.norm."),
        ),
    )


def phi3(config: Config) -> ModelSpec:
    attention = read_attention(config, window=config.get("sliding_window"))
    return describe(config, uniform_layers(config, attention=attention))
