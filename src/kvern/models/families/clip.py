"""Encoders of texts and images into one space: CLIP (Radford et al. 2021), SigLIP (Zhai et al. 2023) and SigLIP 2.

CLIP's texts end with a token whose state is read, and each token sees those before it. SigLIP's are padded, and the
last token's state is read, padding or not.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvern.errors import UnsupportedModel
from kvern.models.defaults import completed
from kvern.models.describe import describe, read_activation, read_layer_norm
from kvern.models.families.bert import check_encoder
from kvern.models.families.vit import Vit, clip_renames, layer_renames
from kvern.models.registry import Config
from kvern.spec.mixers import AttentionSpec
from kvern.spec.model import EncoderSpec, LayerSpec, MlpSpec, ModelSpec, ProjectionSpec, Rename
from kvern.spec.vision import ImageTokens, LeadSpec, ProbeSpec, VisionSpec

if TYPE_CHECKING:
    from torch import Tensor

NO_TOKENS = ImageTokens("")
"""Images stand in no prompt."""

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


def _projected(config: Config) -> int:
    """The size of CLIP's embeddings."""
    width = config.get("projection_dim")
    return 512 if width is None else width


def clip(config: Config) -> ModelSpec:
    """CLIP's encoder of texts. Files from before transformers 4.31 name 2 as the token that ends them, which is not
    it: there the highest id is."""
    text = _text_config(config, "clip_text_model")
    end = text.get("eos_token_id", 49407)
    encoder = EncoderSpec(
        positions=text["max_position_embeddings"],
        first_norm=False,
        pooling="end",
        end_token=-1 if end == 2 else end,
        projection=ProjectionSpec(_projected(config)),
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


def _settings(config: Config, kind: str) -> Vit:
    """The settings of the encoder of images; those in a `vision_config_dict` of old files take precedence."""
    given = {**(config.get("vision_config") or {}), **(config.get("vision_config_dict") or {})}
    return Vit.of({"model_type": kind, **given}, kind)


def _tower(vit: Vit, config: Config, renames: tuple[Rename, ...]) -> ModelSpec:
    names = (*clip_renames("vision_model"), *renames)
    spec = vit.tower(vit.layers, names, config.get("dtype") or config.get("torch_dtype"))
    ignored = (r"^text_projection\.", r"^logit_(scale|bias)$", r"embeddings\.position_ids$")
    return replace(spec, ignored=(*spec.ignored, *ignored))


def clip_vision(config: Config) -> VisionSpec:
    """CLIP's encoder of images: the state before the patches, through a matrix. Raises UnsupportedModel."""
    vit = _settings(config, "clip_vision_model")
    tower = _tower(vit, config, (Rename(r"^visual_projection\.", "model.projector.linear."),))
    return VisionSpec(
        tower,
        vit.patch,
        None,
        LeadSpec(_projected(config)),
        NO_TOKENS,
        -1,
        "kvern.images.square:square",
        table=vit.patches,
        first_norm=True,
        last_norm=True,
        learned=("lead",),
    )


_HEAD = r"^vision_model\.head\."
_HEAD_RENAMES = (
    Rename(_HEAD + r"probe$", "model.projector.probe.weight"),
    Rename(_HEAD + r"attention\.in_proj_", "model.projector.qkv_proj."),
    Rename(_HEAD + r"attention\.out_proj\.", "model.projector.o_proj."),
    Rename(_HEAD + r"layernorm\.", "model.projector.norm."),
    Rename(_HEAD + r"mlp\.fc1\.", "model.projector.mlp.up_proj."),
    Rename(_HEAD + r"mlp\.fc2\.", "model.projector.mlp.down_proj."),
)


def _channels_first(weight: "Tensor", spec: ModelSpec) -> "Tensor":
    """The matrix of a patch's pixels, whose colours stand side by side in the checkpoint."""
    side = math.isqrt(weight.shape[1] // 3)
    return weight.view(-1, side, side, 3).permute(0, 3, 1, 2).flatten(1)


def siglip_vision(config: Config) -> VisionSpec:
    """The encoder of images of SigLIP, and of SigLIP 2, whose pictures keep their shape. Raises UnsupportedModel."""
    is_2 = config["model_type"] == "siglip2"
    vit = _settings(config, "siglip2_vision_model" if is_2 else "siglip_vision_model")
    if vit.given.get("vision_use_head") is False:
        raise UnsupportedModel("vision_use_head is false: without the head the model has no embeddings of images")
    patches = Rename(r"^(model\.patches\.patch_proj\.weight)$", r"\1", _channels_first)
    tower = _tower(vit, config, (*_HEAD_RENAMES, *((patches,) if is_2 else ())))
    width, mlp = tower.hidden_size, tower.layers[0].mlp
    assert isinstance(mlp, MlpSpec)
    of_texts = siglip(config).encoder
    if of_texts is None or of_texts.projection != ProjectionSpec(width, bias=True):
        raise UnsupportedModel(f"embeddings of images have {width} numbers, and those of texts another number")
    spec = VisionSpec(
        tower,
        vit.patch,
        None,
        ProbeSpec(width, int(vit.given["num_attention_heads"]), mlp, tower.norm),
        NO_TOKENS,
        -1,
        "kvern.images.square:square",
        table=vit.patches,
        patch_bias=True,
        last_norm=True,
    )
    if not is_2:
        return spec
    side = math.isqrt(int(vit.given["num_patches"]))
    return replace(spec, settings="kvern.images.naflex:naflex", table=side, between="centres")
