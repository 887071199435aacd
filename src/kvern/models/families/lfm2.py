"""LFM2, dense and with experts: gated short convolutions, and attention with normalised queries and keys."""

from collections.abc import Sequence

from kvern.errors import UnsupportedModel
from kvern.mixer_spec import AttentionSpec, ShortConvSpec
from kvern.model_spec import LayerSpec, MlpSpec, ModelSpec, MoeSpec, NormSpec, QueryKeyNormSpec, Rename
from kvern.models.describe import describe, kinds_of, read_attention, read_experts, read_rope
from kvern.models.registry import Config, register_family

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
    """By `layer_types`, or by the places of layers that attend, as older files have it."""
    names = config.get("layer_types")
    if names is None:
        attending = config.get("full_attn_idxs")
        if attending is None:
            raise KeyError("layer_types")
        names = ["full_attention" if index in attending else "conv" for index in range(config["num_hidden_layers"])]
    return kinds_of(names, {"conv": "conv", "full_attention": "full_attention"})


def _lfm2(config: Config, mlps: Sequence[MlpSpec | MoeSpec]) -> ModelSpec:
    mixers: dict[str, AttentionSpec | ShortConvSpec] = {
        "full_attention": read_attention(config),
        "conv": ShortConvSpec(config["hidden_size"], config["conv_L_cache"], bool(config.get("conv_bias", False))),
    }
    rope = read_rope(config, theta=1e6)
    layers = tuple(
        LayerSpec(mixers[kind], rope if kind == "full_attention" else None, mlp)
        for kind, mlp in zip(_kinds(config), mlps, strict=True)
    )
    norm = NormSpec("rms", float(config.get("norm_eps", 1e-5)))
    return describe(
        config,
        layers,
        norm=norm,
        block_norms={"attention_in": "operator_norm", "mlp_in": "ffn_norm"},
        query_key_norm=QueryKeyNormSpec(norm),
        tie_word_embeddings=bool(config.get("tie_embedding", config.get("tie_word_embeddings", True))),
        renames=_RENAMES,
    )


@register_family("lfm2", "Lfm2ForCausalLM")
def lfm2(config: Config) -> ModelSpec:
    width = config.get("block_ff_dim") or config["intermediate_size"]
    if config.get("block_auto_adjust_ff_dim", True):
        multiplier, multiple = config.get("block_ffn_dim_multiplier", 1.0), config.get("block_multiple_of", 256)
        width = int(2 * width / 3)
        if multiplier is not None:
            width = -(-int(multiplier * width) // multiple) * multiple
    return _lfm2(config, [MlpSpec(width)] * int(config["num_hidden_layers"]))


@register_family("lfm2_moe", "Lfm2MoeForCausalLM")
def lfm2_moe(config: Config) -> ModelSpec:
    if not config.get("use_expert_bias", True):
        raise UnsupportedModel("use_expert_bias is false: kvern reads lfm2_moe with a bias of experts")
    moe = MoeSpec(
        experts=read_experts(config),
        top_k=config["num_experts_per_tok"],
        width=config["moe_intermediate_size"],
        scoring="sigmoid",
        renormalize=bool(config.get("norm_topk_prob", True)),
        routed_scale=float(config.get("routed_scaling_factor", 1.0)),
    )
    dense = MlpSpec(config["intermediate_size"])
    count = int(config["num_hidden_layers"])
    return _lfm2(config, [dense if index < config.get("num_dense_layers", 2) else moe for index in range(count)])
