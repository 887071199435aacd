"""LLaVA 1.5 (https://arxiv.org/abs/2310.03744) and LLaVA-NeXT: CLIP or SigLIP beside a language model."""

from dataclasses import replace

from kvern.errors import UnsupportedModel
from kvern.models.families.llama import llama
from kvern.models.families.mistral import mistral
from kvern.models.families.qwen import qwen2, qwen3
from kvern.models.families.vit import Vit, chosen_layers, clip_renames
from kvern.models.registry import Config
from kvern.models.text_parts import text_config, text_part
from kvern.spec.model import ModelSpec, Rename
from kvern.spec.vision import ImageTokens, MergingSpec, VisionSpec

TEXTS = {"llama": llama, "mistral": mistral, "qwen2": qwen2, "qwen3": qwen3}
"""The language models by their model type."""


def llava(config: Config) -> ModelSpec:
    """The language model. Raises UnsupportedModel."""
    text = text_config(config, "llama")
    if text["model_type"] not in TEXTS:
        raise UnsupportedModel(f"text_config's model_type is {text['model_type']!r:.60}: known are {', '.join(TEXTS)}")
    spec = text_part(config, TEXTS[text["model_type"]](text), "vision_tower", "multi_modal_projector")
    return replace(spec, ignored=(*spec.ignored, r"^(model\.)?image_newline$"))


def llava_vision(config: Config) -> VisionSpec:
    """The encoder of images. Raises UnsupportedModel."""
    vit = Vit.of(config["vision_config"], "clip_vision_model", "siglip_vision_model")
    is_clip = vit.kind == "clip_vision_model"
    strategy = config.get("vision_feature_select_strategy", "default")
    if strategy != ("default" if is_clip else "full"):
        raise UnsupportedModel(
            f"vision_feature_select_strategy is {strategy!r:.60}: 'default' is supported for CLIP, 'full' for SigLIP"
        )
    layers = chosen_layers({"vision_feature_layer": -2, **config}, vit.layers)
    tower = r"vision_tower\.(vision_model\.)?"
    renames = (
        *clip_renames(r"vision_tower(?:\.vision_model)?"),
        Rename(r"^(model\.)?multi_modal_projector\.", "model.projector."),
        Rename(r"^(model\.)?image_newline$", "model.newline.weight"),
    )
    spec = vit.tower(layers, renames, config.get("dtype") or config.get("torch_dtype"))
    hidden = int(config["text_config"].get("hidden_size", 4096))
    return VisionSpec(
        replace(spec, ignored=(*spec.ignored, rf"{tower}(post_layernorm|head|embeddings\.position_ids)\b")),
        vit.patch,
        None,
        MergingSpec(
            hidden,
            hidden,
            1,
            config.get("projector_hidden_act", "gelu"),
            None,
            bias=bool(config.get("multimodal_projector_bias", True)),
        ),
        ImageTokens("<image>"),
        int(config.get("image_token_index", config.get("image_token_id", 32000))),
        "kvern.images.square:square",
        table=vit.patches,
        patch_bias=not is_clip,
        first_norm=is_clip,
        learned=("lead",) if is_clip else (),
    )


def llava_next_vision(config: Config) -> VisionSpec:
    """LLaVA's encoder over tiles. Raises UnsupportedModel."""
    spec = llava_vision(config)
    return replace(spec, settings="kvern.images.anyres:anyres", learned=(*spec.learned, "newline"))
