"""GLM-4 and GLM-4-0414: fused gate and up, half of each head rotated in pairs, the latter with sandwich norms."""

from kvern.models.describe import describe, read_rope, uniform_layers
from kvern.models.registry import Config
from kvern.spec.model import PRE_NORMS, LayerSpec, ModelSpec


def _layers(config: Config) -> tuple[LayerSpec, ...]:
    return uniform_layers(config, rope=read_rope(config, interleaved=True))


def glm(config: Config) -> ModelSpec:
    return describe(config, _layers(config), qkv_bias=config["attention_bias"], output_bias=False)


def glm4(config: Config) -> ModelSpec:
    return describe(
        config,
        _layers(config),
        block_norms={
            **PRE_NORMS,
            "attention_out": "post_self_attn_layernorm",
            "mlp_out": "post_mlp_layernorm",
        },
        qkv_bias=config["attention_bias"],
        output_bias=False,
    )
