"""GPT-NeoX and Pythia: parallel attention and MLP with separate norms, and interleaved heads."""

from typing import TYPE_CHECKING

from kvern.models.describe import describe, read_layer_norm, read_mlp, uniform_layers
from kvern.models.registry import Config
from kvern.spec.model import ModelSpec, Rename

if TYPE_CHECKING:
    from torch import Tensor


def _ungroup(tensor: "Tensor", spec: ModelSpec) -> "Tensor":
    """From `[head, (query, key, value)]` rows to `[(query, key, value), head]`.

    Raises ValueError if rows are something else, as in formats that store weights the other way round.
    """
    attention = spec.layers[0].attention
    heads = attention.heads
    if len(tensor) != 3 * heads * attention.head_dim:
        raise ValueError(f"{len(tensor)} rows are not queries, keys and values of {heads} heads")
    return tensor.view(heads, 3, -1, *tensor.shape[1:]).transpose(0, 1).flatten(0, 2)


def gpt_neox(config: Config) -> ModelSpec:
    bias = config["attention_bias"]
    config = {**config, "num_key_value_heads": None}  # all heads have their own
    mlp = read_mlp(config, gated=False, bias=True)
    return describe(
        config,
        uniform_layers(config, mlp=mlp),
        norm=read_layer_norm(config),
        parallel=config["use_parallel_residual"],
        qkv_bias=bias,
        output_bias=bias,
        renames=(
            Rename(r"^gpt_neox\.embed_in\.", "model.embed_tokens."),
            Rename(r"^gpt_neox\.final_layer_norm\.", "model.norm."),
            Rename(r"^gpt_neox\.layers\.", "model.layers."),
            Rename(r"^embed_out\.", "lm_head."),
            Rename(r"\.attention\.query_key_value\.", ".self_attn.qkv_proj.", _ungroup),
            Rename(r"\.attention\.dense\.", ".self_attn.o_proj."),
            Rename(r"\.mlp\.dense_h_to_4h\.", ".mlp.up_proj."),
            Rename(r"\.mlp\.dense_4h_to_h\.", ".mlp.down_proj."),
        ),
    )
