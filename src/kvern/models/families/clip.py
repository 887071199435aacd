"""Encoders of texts and images into one space: CLIP (Radford et al. 2021), SigLIP (Zhai et al. 2023) and SigLIP 2.

CLIP's texts end with a token whose state is read, and each token sees those before it. SigLIP's are padded, and the
last token's state is read, padding or not.
"""

from collections.abc import Mapping
from typing import Any

from kvern.models.defaults import completed
from kvern.models.describe import describe, read_activation, read_layer_norm
from kvern.models.families.bert import check_encoder
from kvern.models.families.vit import layer_renames
from kvern.models.registry import Config
from kvern.spec.mixers import AttentionSpec
from kvern.spec.model import EncoderSpec, LayerSpec, MlpSpec, ModelSpec, ProjectionSpec, Rename

_RENAMES = (
    *layer_renames("text_model"),
    Rename(r"^text_model\.embeddings\.token_embedding\.", "model.embed_tokens."),
    Rename(r"^text_model\.embeddings\.position_embedding\.", "model.embed_positions."),
    Rename(r"^text_model\.final_layer_norm\.", "model.norm."),
    Rename(r"^(text_projection|text_model\.head)\.", "model.projection."),
)
_OF_IMAGES = (r"^(vision_model|visual_projection)\.", r"^logit_(scale|bias)$", r"embeddings\.position_ids$")


def _text_config(config: Config, kind: str) -> dict[str, Any]:
    """The settings of the encoder of texts; those in a `text_config_dict` of old files take precedence."""
    text: Mapping[str, Any] = config.get("text_config") or {}
    if old := config.get("text_config_dict"):
        text = {**text, **completed({"eos_token_id": 49407, **old}, kind)}
    return completed(text, kind)


def _encoder(config: Config, text: Mapping[str, Any], encoder: EncoderSpec, *, causal: bool) -> ModelSpec:
    check_encoder(config)
    heads = int(text["num_attention_heads"])
    head_dim = int(text["hidden_size"]) // heads
    attention = AttentionSpec(heads, heads, head_dim, head_dim**-0.5, causal=causal)
    mlp = MlpSpec(text["intermediate_size"], read_activation(text), gated=False, bias=True)
    return describe(
        text,
        (LayerSpec(attention, None, mlp),) * int(text["num_hidden_layers"]),
        model_type=config["model_type"],
        norm=read_layer_norm(text),
        qkv_bias=True,
        output_bias=True,
        tie_word_embeddings=False,
        dtype=config.get("dtype") or config.get("torch_dtype"),
        generates=False,
        renames=_RENAMES,
        ignored=_OF_IMAGES,
        encoder=encoder,
    )


def clip(config: Config) -> ModelSpec:
    """CLIP's encoder of texts. Files from before transformers 4.31 name 2 as the token that ends them, which is not
    it: there the highest id is."""
    text = _text_config(config, "clip_text_model")
    end = text.get("eos_token_id", 49407)
    width = config.get("projection_dim")
    encoder = EncoderSpec(
        positions=text["max_position_embeddings"],
        first_norm=False,
        pooling="end",
        end_token=-1 if end == 2 else end,
        projection=ProjectionSpec(512 if width is None else width),
    )
    return _encoder(config, text, encoder, causal=True)


def siglip(config: Config) -> ModelSpec:
    """The encoder of texts of SigLIP, and of SigLIP 2."""
    text = _text_config(config, f"{config['model_type']}_text_model")
    width = text.get("projection_size")
    encoder = EncoderSpec(
        positions=text["max_position_embeddings"],
        padded=text["max_position_embeddings"],
        first_norm=False,
        pooling="lasttoken",
        projection=ProjectionSpec(text["hidden_size"] if width is None else width, bias=True),
    )
    return _encoder(config, text, encoder, causal=False)
