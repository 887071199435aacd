"""The encoder of images of Pixtral and Mistral 3 (https://arxiv.org/abs/2410.07073)."""

from collections.abc import Mapping
from typing import Any

from kvern.errors import UnsupportedModel
from kvern.models.describe import read_activation
from kvern.models.families.vit import flat
from kvern.models.registry import Config
from kvern.spec.mixers import AttentionSpec
from kvern.spec.model import LayerSpec, MlpSpec, ModelSpec, NormSpec, Rename, RopeSpec
from kvern.spec.vision import ImageTokens, MergingSpec, PatchRopeSpec, VisionSpec

_LAYER = r"^(model\.)?vision_tower\.transformer\.layers\.(\d+)\."
_RENAMES = (
    Rename(_LAYER + r"attention_norm\.", r"model.layers.\2.input_layernorm."),
    Rename(_LAYER + r"ffn_norm\.", r"model.layers.\2.post_attention_layernorm."),
    Rename(_LAYER + r"attention\.", r"model.layers.\2.self_attn."),
    Rename(_LAYER + r"feed_forward\.", r"model.layers.\2.mlp."),
    Rename(r"^(model\.)?vision_tower\.patch_conv\.", "model.patches.patch_proj.", flat),
    Rename(r"^(model\.)?vision_tower\.ln_pre\.", "model.ln_pre."),
    Rename(r"^(model\.)?multi_modal_projector\.patch_merger\.", "model.projector."),
    Rename(r"^(model\.)?multi_modal_projector\.", "model.projector."),
)


def mistral3(config: Config) -> VisionSpec:
    """The encoder beside Mistral 3's language model. Raises UnsupportedModel."""
    vision: Mapping[str, Any] = config["vision_config"]
    if vision.get("model_type", "pixtral") != "pixtral":
        raise UnsupportedModel(f"vision_config's model_type is {vision['model_type']!r:.60}: pixtral is supported")
    if config.get("vision_feature_layer", -1) != -1:
        raise UnsupportedModel(f"vision_feature_layer is {config['vision_feature_layer']}: -1 is supported")
    hidden, heads = int(vision["hidden_size"]), int(vision["num_attention_heads"])
    head_dim = int(vision.get("head_dim") or hidden // heads)
    rope = vision.get("rope_parameters") or vision
    mlp = MlpSpec(int(vision["intermediate_size"]), read_activation(vision))
    attention = AttentionSpec(heads, heads, head_dim, head_dim**-0.5, causal=False)
    layer = LayerSpec(attention, RopeSpec(float(rope["rope_theta"]), head_dim), mlp)
    tower = ModelSpec(
        model_type="pixtral",
        vocab_size=1,
        hidden_size=hidden,
        layers=(layer,) * int(vision["num_hidden_layers"]),
        max_position_embeddings=1,
        norm=NormSpec("rms", 1e-5),
        dtype=config.get("dtype") or config.get("torch_dtype"),
        renames=_RENAMES,
        ignored=(r"^(model\.)?(language_model|lm_head)\.", r"^lm_head\.", r"^model\.(layers|embed_tokens|norm)\."),
    )
    merge = int(config["spatial_merge_size"])
    text = config["text_config"]
    return VisionSpec(
        tower,
        int(vision["patch_size"]),
        PatchRopeSpec(float(rope["rope_theta"]), head_dim, "alternate"),
        MergingSpec(
            int(text["hidden_size"]),
            int(text["hidden_size"]),
            merge,
            config.get("projector_hidden_act", "gelu"),
            NormSpec("rms", float(text.get("rms_norm_eps", 1e-6))),
            bool(config.get("multimodal_projector_bias", False)),
            reduces=True,
        ),
        ImageTokens("[IMG]", "[IMG_BREAK]", "[IMG_END]", special=("[IMG_BREAK]", "[IMG_END]")),
        int(config.get("image_token_id", config.get("image_token_index", 10))),
        "kvern.images.pixtral:pixtral",
        first_norm=True,
    )
