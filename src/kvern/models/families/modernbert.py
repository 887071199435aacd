"""ModernBERT (Warner et al. 2024): an encoder with rotated queries and keys, gated MLPs, and local layers."""

from dataclasses import replace

from kvern.errors import UnsupportedModel
from kvern.models.describe import describe, read_head_dim, read_mlp, read_rope
from kvern.models.families.bert import check_encoder, is_classifier
from kvern.models.registry import Config
from kvern.spec.mixers import AttentionSpec
from kvern.spec.model import PRE_NORMS, EncoderSpec, HeadSpec, LayerSpec, ModelSpec, NormSpec, Rename

_LAYER = r"^model\.layers\.(\d+)\."
_RENAMES = (
    Rename(r"^(model\.)?embeddings\.tok_embeddings\.", "model.embed_tokens."),
    Rename(r"^(model\.)?embeddings\.norm\.", "model.embed_norm."),
    Rename(r"^(model\.)?final_norm\.", "model.norm."),
    Rename(_LAYER + r"attn_norm\.", r"model.layers.\1.input_layernorm."),
    Rename(_LAYER + r"mlp_norm\.", r"model.layers.\1.post_attention_layernorm."),
    Rename(_LAYER + r"attn\.Wqkv\.", r"model.layers.\1.self_attn.qkv_proj."),
    Rename(_LAYER + r"attn\.Wo\.", r"model.layers.\1.self_attn.o_proj."),
    Rename(_LAYER + r"mlp\.Wi\.", r"model.layers.\1.mlp.gate_up_proj."),
    Rename(_LAYER + r"mlp\.Wo\.", r"model.layers.\1.mlp.down_proj."),
    Rename(r"^classifier\.", "head.out."),
)


def _layers(config: Config) -> tuple[LayerSpec, ...]:
    """Every third layer sees all tokens, the others half a window on each side."""
    heads, head_dim = config["num_attention_heads"], read_head_dim(config)
    period, window = config.get("global_attn_every_n_layers", 3), config["local_attention"] // 2 + 1
    attention = AttentionSpec(heads, heads, head_dim, head_dim**-0.5, causal=False)
    mlp = read_mlp(config)
    local = config.get("local_rope_theta") or config["rope_local_base_freq"]
    kinds = config.get("layer_types") or [
        "sliding_attention" if index % period else "full_attention" for index in range(config["num_hidden_layers"])
    ]
    layers = {
        "full_attention": LayerSpec(
            attention, read_rope({"rotary_emb_base": config.get("global_rope_theta"), **config}, "full_attention"), mlp
        ),
        "sliding_attention": LayerSpec(
            replace(attention, window=window),
            read_rope({**config, "rope_theta": local}, "sliding_attention"),
            mlp,
        ),
    }
    if unknown := set(kinds) - set(layers):
        raise UnsupportedModel(f"layer type {sorted(unknown)[0]!r:.60} is unknown; known: {', '.join(layers)}")
    return tuple(layers[kind] for kind in kinds)


def _head(config: Config, norm: NormSpec) -> HeadSpec:
    if (activation := config["classifier_activation"]) != "gelu":
        raise UnsupportedModel(f"classifier_activation is {activation!r:.60}: gelu is supported")
    return HeadSpec("gelu", bool(config["classifier_bias"]), norm)


def modernbert(config: Config) -> ModelSpec:
    check_encoder(config)
    classifies = is_classifier(config)
    norm = NormSpec("layer", float(config["norm_eps"]), bias=bool(config["norm_bias"]))
    pooling = config["classifier_pooling"]
    if pooling not in ("cls", "mean"):
        raise UnsupportedModel(f"classifier_pooling is {pooling!r:.60}: cls and mean are supported")
    return describe(
        config,
        _layers(config),
        norm=norm,
        block_norms=PRE_NORMS,
        generates=False,
        renames=_RENAMES,
        ignored=() if classifies else (r"^head\.", r"^decoder\."),
        is_classifier=classifies,
        encoder=EncoderSpec(
            pooling=pooling if classifies else "mean", head=_head(config, norm) if classifies else None
        ),
    )
