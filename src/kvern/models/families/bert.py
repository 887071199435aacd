"""Encoders: BERT (Devlin et al. 2018), RoBERTa (Liu et al. 2019), XLM-RoBERTa (Conneau et al. 2020) and ModernBERT.

ModernBERT (Warner et al. 2024) has rotated queries and keys, gated MLPs, and local layers.

`check_encoder` and `labels_of` read what configurations of all encoders share.
"""

from dataclasses import replace

from kvern.errors import UnsupportedModel
from kvern.models.describe import describe, read_activation, read_head_dim, read_mlp, read_rope
from kvern.models.registry import Config
from kvern.spec.mixers import AttentionSpec
from kvern.spec.model import (
    POST_NORMS,
    PRE_NORMS,
    EncoderSpec,
    HeadSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    NormSpec,
    Rename,
)

TASKS = ("Model", "ForMaskedLM", "ForPreTraining", "ForSequenceClassification")
"""Ends of the names of supported architectures."""


def check_encoder(config: Config) -> None:
    """Refuses architectures other than embeddings and classifiers. Raises UnsupportedModel."""
    for name in _architectures(config):
        if not name.endswith(TASKS):
            raise UnsupportedModel(f"{name} is not supported: of encoders those for embeddings and classifiers are")
    for name in ("is_decoder", "add_cross_attention"):
        if config.get(name):
            raise UnsupportedModel(f"{name} is true: {config.get('model_type')} is supported as an encoder alone")


def labels_of(config: Config) -> int:
    """Returns the number of a classifier's labels; 0 for a model that is none."""
    if not any(name.endswith("ForSequenceClassification") for name in _architectures(config)):
        return 0
    return len(config.get("id2label") or "01")  # transformers writes no id2label where there are two


def _architectures(config: Config) -> list[str]:
    given = config.get("architectures") or []
    return given if isinstance(given, list) else [given]


_LAYER = r"^encoder\.layer\.(\d+)\."
_RENAMES = (
    Rename(r"^(bert|roberta)\.", ""),
    Rename(r"LayerNorm\.gamma$", "LayerNorm.weight"),
    Rename(r"LayerNorm\.beta$", "LayerNorm.bias"),
    Rename(r"^embeddings\.word_embeddings\.", "model.embed_tokens."),
    Rename(r"^embeddings\.position_embeddings\.", "model.embed_positions."),
    Rename(r"^embeddings\.token_type_embeddings\.", "model.embed_types."),
    Rename(r"^embeddings\.LayerNorm\.", "model.embed_norm."),
    Rename(_LAYER + r"attention\.self\.query\.", r"model.layers.\1.self_attn.q_proj."),
    Rename(_LAYER + r"attention\.self\.key\.", r"model.layers.\1.self_attn.k_proj."),
    Rename(_LAYER + r"attention\.self\.value\.", r"model.layers.\1.self_attn.v_proj."),
    Rename(_LAYER + r"attention\.output\.dense\.", r"model.layers.\1.self_attn.o_proj."),
    Rename(_LAYER + r"attention\.output\.LayerNorm\.", r"model.layers.\1.post_attention_layernorm."),
    Rename(_LAYER + r"intermediate\.dense\.", r"model.layers.\1.mlp.up_proj."),
    Rename(_LAYER + r"output\.dense\.", r"model.layers.\1.mlp.down_proj."),
    Rename(_LAYER + r"output\.LayerNorm\.", r"model.layers.\1.post_feedforward_layernorm."),
)
_HEADLESS = (r"(^|\.)pooler\.", r"^cls\.", r"^lm_head\.", r"embeddings\.position_ids$")
"""The pooler of a model that classifies nothing, and heads for masked words: no embedding needs them."""


def _encoder(config: Config, first_position: int, head_renames: tuple[Rename, ...], *, marks_second: bool) -> ModelSpec:
    check_encoder(config)
    if (kind := config.get("position_embedding_type", "absolute")) != "absolute":
        raise UnsupportedModel(f"position_embedding_type is {kind!r:.60}: learned positions, absolute, are supported")
    labels, types = labels_of(config), config["type_vocab_size"]
    heads, head_dim = config["num_attention_heads"], read_head_dim(config)
    attention = AttentionSpec(heads, heads, head_dim, head_dim**-0.5, causal=False)
    mlp = MlpSpec(config["intermediate_size"], read_activation(config), gated=False, bias=True)
    return describe(
        config,
        (LayerSpec(attention, None, mlp),) * int(config["num_hidden_layers"]),
        max_position_embeddings=config["max_position_embeddings"] - first_position,
        norm=NormSpec("layer", float(config["layer_norm_eps"]), bias=True),
        block_norms=POST_NORMS,
        qkv_bias=True,
        output_bias=True,
        generates=False,
        renames=(*_RENAMES, *(head_renames if labels else ())),
        ignored=_HEADLESS[-1:] if labels else _HEADLESS,
        is_classifier=bool(labels),
        encoder=EncoderSpec(
            positions=config["max_position_embeddings"],
            first_position=first_position,
            types=types,
            second_type=1 if marks_second and types > 1 else 0,
            post_norm=True,
            pooling="cls" if labels else "mean",
            head=HeadSpec("tanh", labels=labels) if labels else None,
        ),
    )


def bert(config: Config) -> ModelSpec:
    """BERT; a classifier reads the pooled first token."""
    renames = Rename(r"^pooler\.dense\.", "head.dense."), Rename(r"^classifier\.", "head.out.")
    return _encoder(config, 0, renames, marks_second=True)


def roberta(config: Config) -> ModelSpec:
    """RoBERTa: positions begin after the padding's; both texts of a pair have the same token type."""
    renames = Rename(r"^classifier\.dense\.", "head.dense."), Rename(r"^classifier\.out_proj\.", "head.out.")
    return _encoder(config, int(config["pad_token_id"]) + 1, renames, marks_second=False)


_MODERN_LAYER = r"^model\.layers\.(\d+)\."
_MODERN_RENAMES = (
    Rename(r"^(model\.)?embeddings\.tok_embeddings\.", "model.embed_tokens."),
    Rename(r"^(model\.)?embeddings\.norm\.", "model.embed_norm."),
    Rename(r"^(model\.)?final_norm\.", "model.norm."),
    Rename(_MODERN_LAYER + r"attn_norm\.", r"model.layers.\1.input_layernorm."),
    Rename(_MODERN_LAYER + r"mlp_norm\.", r"model.layers.\1.post_attention_layernorm."),
    Rename(_MODERN_LAYER + r"attn\.Wqkv\.", r"model.layers.\1.self_attn.qkv_proj."),
    Rename(_MODERN_LAYER + r"attn\.Wo\.", r"model.layers.\1.self_attn.o_proj."),
    Rename(_MODERN_LAYER + r"mlp\.Wi\.", r"model.layers.\1.mlp.gate_up_proj."),
    Rename(_MODERN_LAYER + r"mlp\.Wo\.", r"model.layers.\1.mlp.down_proj."),
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


def _head(config: Config, norm: NormSpec, labels: int) -> HeadSpec:
    if (activation := config["classifier_activation"]) != "gelu":
        raise UnsupportedModel(f"classifier_activation is {activation!r:.60}: gelu is supported")
    return HeadSpec("gelu", bool(config["classifier_bias"]), norm, labels)


def modernbert(config: Config) -> ModelSpec:
    check_encoder(config)
    labels = labels_of(config)
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
        renames=_MODERN_RENAMES,
        ignored=() if labels else (r"^head\.", r"^decoder\."),
        is_classifier=bool(labels),
        encoder=EncoderSpec(
            pooling=pooling if labels else "mean", head=_head(config, norm, labels) if labels else None
        ),
    )
