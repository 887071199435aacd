"""InternVL (https://arxiv.org/abs/2412.05271): InternViT over tiles, 2 x 2 patches a token, beside a language model.

OpenGVLab publishes checkpoints as `internvl_chat`, which are those of transformers' `internvl` under other names.
"""

from dataclasses import replace
from typing import Any

from kvern.errors import UnsupportedModel, shown
from kvern.models.families.gpt_oss import gpt_oss
from kvern.models.families.llama import llama
from kvern.models.families.qwen import qwen2, qwen3, qwen3_moe
from kvern.models.families.vit import Vit, chosen_layers, flat
from kvern.models.limits import check_config
from kvern.models.registry import Config
from kvern.models.text_parts import text_config, text_part
from kvern.spec.model import BiasSpec, BlockSpec, ModelSpec, NormSpec, QueryKeyNormSpec, Rename
from kvern.spec.vision import ImageTokens, MergingSpec, VisionSpec

TEXTS = {"qwen2": qwen2, "qwen3": qwen3, "qwen3_moe": qwen3_moe, "llama": llama, "gpt_oss": gpt_oss}
"""The language models by their model type."""
_LAYER = r"^(model\.)?vision_tower\.encoder\.layer\.(\d+)\."
_TOWER = r"^(model\.)?vision_tower\."
_RENAMES = (
    Rename(_LAYER + r"layernorm_before\.", r"model.layers.\2.input_layernorm."),
    Rename(_LAYER + r"layernorm_after\.", r"model.layers.\2.post_attention_layernorm."),
    Rename(_LAYER + r"lambda_1$", r"model.layers.\2.attention_gain"),
    Rename(_LAYER + r"lambda_2$", r"model.layers.\2.mlp_gain"),
    Rename(_LAYER + r"attention\.projection_layer\.", r"model.layers.\2.self_attn.o_proj."),
    Rename(_LAYER + r"attention\.", r"model.layers.\2.self_attn."),
    Rename(_LAYER + r"mlp\.fc1\.", r"model.layers.\2.mlp.up_proj."),
    Rename(_LAYER + r"mlp\.fc2\.", r"model.layers.\2.mlp.down_proj."),
    Rename(_TOWER + r"embeddings\.patch_embeddings\.projection\.weight$", "model.patches.patch_proj.weight", flat),
    Rename(_TOWER + r"embeddings\.patch_embeddings\.projection\.bias$", "model.patches.patch_proj.bias"),
    Rename(_TOWER + r"embeddings\.position_embeddings$", "model.pos_embed.weight"),
    Rename(_TOWER + r"embeddings\.cls_token$", "model.lead.weight"),
    Rename(_TOWER + r"layernorm\.", "model.last_norm."),
    Rename(r"^(model\.)?multi_modal_projector\.layer_norm\.", "model.projector.norm."),
    Rename(r"^(model\.)?multi_modal_projector\.", "model.projector."),
)
_CHAT_LAYER = r"^vision_model\.encoder\.layers\.(\d+)\."
_CHAT_TOWER = r"^vision_model\.embeddings\."
_CHAT_RENAMES = (
    Rename(_CHAT_LAYER + r"norm1\.", r"model.layers.\1.input_layernorm."),
    Rename(_CHAT_LAYER + r"norm2\.", r"model.layers.\1.post_attention_layernorm."),
    Rename(_CHAT_LAYER + r"ls1$", r"model.layers.\1.attention_gain"),
    Rename(_CHAT_LAYER + r"ls2$", r"model.layers.\1.mlp_gain"),
    Rename(_CHAT_LAYER + r"attn\.qkv\.", r"model.layers.\1.self_attn.qkv_proj."),
    Rename(_CHAT_LAYER + r"attn\.proj\.", r"model.layers.\1.self_attn.o_proj."),
    Rename(_CHAT_LAYER + r"attn\.", r"model.layers.\1.self_attn."),
    Rename(_CHAT_LAYER + r"mlp\.fc1\.", r"model.layers.\1.mlp.up_proj."),
    Rename(_CHAT_LAYER + r"mlp\.fc2\.", r"model.layers.\1.mlp.down_proj."),
    Rename(_CHAT_TOWER + r"patch_embedding\.weight$", "model.patches.patch_proj.weight", flat),
    Rename(_CHAT_TOWER + r"patch_embedding\.bias$", "model.patches.patch_proj.bias"),
    Rename(_CHAT_TOWER + r"position_embedding$", "model.pos_embed.weight"),
    Rename(_CHAT_TOWER + r"class_embedding$", "model.lead.weight"),
    Rename(r"^mlp1\.0\.", "model.projector.norm."),
    Rename(r"^mlp1\.1\.", "model.projector.linear_1."),
    Rename(r"^mlp1\.3\.", "model.projector.linear_2."),
)
_CHAT_SETTINGS = {
    "ps_version": "v2",
    "dynamic_image_size": True,
    "use_thumbnail": True,
    "min_dynamic_patch": 1,
    "max_dynamic_patch": 12,
    "pad2square": False,
}
"""Settings of `internvl_chat` and their only supported values."""


def internvl(config: Config) -> ModelSpec:
    """The language model. Raises UnsupportedModel."""
    text = text_config(config, "qwen2")
    if text["model_type"] not in TEXTS:
        raise UnsupportedModel(f"text_config's model_type is {text['model_type']!r:.60}: known are {', '.join(TEXTS)}")
    towers = ("vision_tower", "vision_model", "multi_modal_projector", "mlp1")
    return text_part(config, TEXTS[text["model_type"]](text), *towers)


def internvl_chat(config: Config) -> ModelSpec:
    """The language model of a checkpoint as OpenGVLab publishes it. Raises UnsupportedModel."""
    check_config(config["llm_config"], "llm_config.")
    return internvl(_renamed(config))


def _renamed(config: Config) -> dict[str, Any]:
    """The settings of `internvl_chat` under the names that they have in `internvl`."""
    vision = dict(config.get("vision_config") or {})
    names = {"qkv_bias": "attention_bias", "qk_normalization": "use_qk_norm"}
    vision = {names.get(name, name): value for name, value in vision.items()}
    given = {"text_config": config["llm_config"], "vision_config": vision | {"model_type": "internvl_vision"}}
    return {**config, **given, "vision_feature_layer": config.get("select_layer", -1)}


def internvl_chat_vision(config: Config) -> VisionSpec:
    """The encoder of a checkpoint as OpenGVLab publishes it. Raises UnsupportedModel."""
    for name, value in _CHAT_SETTINGS.items():
        if config.get(name, value) != value:
            raise UnsupportedModel(f"{name} is {shown(config[name])}: {value!r} is supported for internvl_chat")
    kind = config["vision_config"].get("model_type")
    if kind != "intern_vit_6b":
        raise UnsupportedModel(f"vision_config's model_type is {shown(kind)}: intern_vit_6b is supported")
    return replace(internvl_vision(_renamed(config), _CHAT_RENAMES), image_id=int(config.get("image_token_id", -1)))


def internvl_vision(config: Config, renames: tuple[Rename, ...] = _RENAMES) -> VisionSpec:
    """The encoder of images. Raises UnsupportedModel."""
    vit = Vit.of(config["vision_config"], "internvl_vision")
    given, strategy = vit.given, config.get("vision_feature_select_strategy", "default")
    ratio = float(config.get("downsample_ratio", 0.5))
    merge = round(1 / ratio)
    if strategy != "default" or merge * ratio != 1.0:
        raise UnsupportedModel(
            f"vision_feature_select_strategy and downsample_ratio are {strategy!r:.60} and {ratio}: 'default' and one "
            "part of a whole number are supported"
        )
    layers = chosen_layers(config, vit.layers)
    has_norm = layers == vit.layers and not given.get("use_mean_pooling", True)
    tower = vit.tower(
        layers,
        renames,
        config.get("dtype") or config.get("torch_dtype"),
        block=BlockSpec(gains={"attention_out": "attention_gain", "mlp_out": "mlp_gain"}),
        biases=BiasSpec(qkv=bool(given.get("attention_bias", False)), output=True),
        query_key_norm=QueryKeyNormSpec(NormSpec(), scope="row") if given.get("use_qk_norm") else None,
    )
    hidden = int(config["text_config"].get("hidden_size", 4096))
    return VisionSpec(
        replace(tower, ignored=(*tower.ignored, r"vision_tower\.(embeddings\.mask_token|layernorm\.)")),
        vit.patch,
        None,
        MergingSpec(
            hidden,
            hidden,
            merge,
            config.get("projector_hidden_act", "gelu"),
            NormSpec("layer", 1e-5, bias=True),
            bias=True,
            late=True,
        ),
        ImageTokens("<IMG_CONTEXT>", begin="<img>", end="</img>", special=("<img>", "</img>")),
        int(config.get("image_token_id", 151667)),
        "kvern.images.internvl:internvl",
        table=vit.patches,
        patch_bias=True,
        last_norm=has_norm,
        learned=("lead",),
    )
