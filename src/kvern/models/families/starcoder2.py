"""StarCoder2: layer norms, biases everywhere, an MLP without a gate."""

from kvern.models.describe import describe, read_attention, read_layer_norm, read_mlp, uniform_layers
from kvern.models.registry import Config
from kvern.spec.model import ModelSpec, Rename


def starcoder2(config: Config) -> ModelSpec:
    bias = config["use_bias"]
    attention = read_attention(config, window=config.get("sliding_window"))
    mlp = read_mlp(config, gated=False, bias=bias)
    return describe(
        config,
        uniform_layers(config, attention=attention, mlp=mlp),
        norm=read_layer_norm(config, "norm_epsilon"),
        qkv_bias=bias,
        output_bias=bias,
        tie_word_embeddings=config["tie_word_embeddings"],
        renames=(Rename(r"\.mlp\.c_fc\.", ".mlp.up_proj."), Rename(r"\.mlp\.c_proj\.", ".mlp.down_proj.")),
    )
