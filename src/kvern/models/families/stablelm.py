"""StableLM: layer norms, a quarter of each head rotated, optionally attention and MLP side by side."""

from kvern.errors import UnsupportedModel
from kvern.models.describe import describe, read_layer_norm, uniform_layers
from kvern.models.registry import Config
from kvern.spec.model import PRE_NORMS, ModelSpec


def stablelm(config: Config) -> ModelSpec:
    if config.get("qk_layernorm"):
        raise UnsupportedModel("qk_layernorm is true: kvern does not read StableLM's norms of single heads")
    parallel = config["use_parallel_residual"]
    return describe(
        config,
        uniform_layers(config),
        norm=read_layer_norm(config),
        block_norms={"attention_in": "input_layernorm"} if parallel else PRE_NORMS,
        parallel=parallel,
        qkv_bias=config["use_qkv_bias"],
        output_bias=False,
    )
