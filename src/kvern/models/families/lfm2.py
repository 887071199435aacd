"""LFM2, dense and with experts: gated short convolutions, and attention with normalised queries and keys."""

from collections.abc import Sequence

from kvern.models.describe import describe, kinds_of, read_attention, read_moe, read_rope
from kvern.models.registry import Config
from kvern.spec.mixers import AttentionSpec, ShortConvSpec
from kvern.spec.model import LayerSpec, MlpSpec, ModelSpec, MoeSpec, NormSpec, QueryKeyNormSpec, Rename

_RENAMES = (
    Rename(r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
    Rename(r"\.self_attn\.(q|k)_layernorm\.", r".self_attn.\1_norm."),
    Rename(r"\.feed_forward\.expert_bias$", ".mlp.gate.e_score_correction_bias"),
    Rename(r"\.feed_forward\.", ".mlp."),
    Rename(r"(\.mlp\.(?:experts\.\d+\.)?)w1\.", r"\1gate_proj."),
    Rename(r"(\.mlp\.(?:experts\.\d+\.)?)w2\.", r"\1down_proj."),
    Rename(r"(\.mlp\.(?:experts\.\d+\.)?)w3\.", r"\1up_proj."),
    Rename(r"^model\.embedding_norm\.", "model.norm."),
)


def _kinds(config: Config) -> list[str]:
    """The types of layers from `layer_types` or, in older files, from the indices of attention layers."""
    names = config.get("layer_types")
    if names is None:
        layers = range(config["num_hidden_layers"])
        attending = layers if config.get("full_attn_idxs") is None else config["full_attn_idxs"]
        names = ["full_attention" if index in attending else "conv" for index in layers]
    return kinds_of(names, {"conv": "conv", "full_attention": "full_attention"})


def _lfm2(config: Config, mlps: Sequence[MlpSpec | MoeSpec]) -> ModelSpec:
    mixers: dict[str, AttentionSpec | ShortConvSpec] = {
        "full_attention": read_attention(config),
        "conv": ShortConvSpec(config["hidden_size"], config["conv_L_cache"], bool(config["conv_bias"])),
    }
    rope = read_rope(config)
    layers = tuple(
        LayerSpec(mixers[kind], rope if kind == "full_attention" else None, mlp)
        for kind, mlp in zip(_kinds(config), mlps, strict=True)
    )
    norm = NormSpec("rms", float(config["norm_eps"]))
    return describe(
        config,
        layers,
        norm=norm,
        block_norms={"attention_in": "operator_norm", "mlp_in": "ffn_norm"},
        query_key_norm=QueryKeyNormSpec(norm),
        tie_word_embeddings=bool(config.get("tie_embedding", config["tie_word_embeddings"])),
        renames=_RENAMES,
    )


def lfm2(config: Config) -> ModelSpec:
    width = config.get("block_ff_dim") or config["intermediate_size"]
    if config["block_auto_adjust_ff_dim"]:
        multiplier, multiple = config["block_ffn_dim_multiplier"], config["block_multiple_of"]
        width = int(2 * width / 3)
        if multiplier is not None:
            width = -(-int(multiplier * width) // multiple) * multiple
    return _lfm2(config, [MlpSpec(width)] * int(config["num_hidden_layers"]))


def lfm2_moe(config: Config) -> ModelSpec:
    moe = read_moe(
        config,
        width=config["moe_intermediate_size"],
        activation="silu",
        scoring="sigmoid",
        corrected=bool(config["use_expert_bias"]),
        renormalize=bool(config["norm_topk_prob"]),
        routed_scale=float(config["routed_scaling_factor"]),
    )
    dense = MlpSpec(config["intermediate_size"])
    count = int(config["num_hidden_layers"])
    return _lfm2(config, [dense if index < config["num_dense_layers"] else moe for index in range(count)])
