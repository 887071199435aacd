"""The encoders of images of Qwen2-VL and Qwen2.5-VL, which sees most of an image through windows."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvern.models.describe import read_activation
from kvern.models.families.qwen_vision import of_stills
from kvern.models.registry import Config
from kvern.spec.mixers import AttentionSpec
from kvern.spec.model import BiasSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec, Rename, RopeSpec
from kvern.spec.vision import ImageTokens, MergingSpec, PatchRopeSpec, VisionSpec, WindowSpec

_BLOCK = r"^(model\.)?visual\.blocks\.(\d+)\."
_VISUAL = r"^(model\.)?visual\."
_RENAMES = (
    Rename(r"^model\.(?=(layers|embed_tokens|norm)\.)", "language_model."),
    Rename(_BLOCK + r"norm1\.", r"model.layers.\2.input_layernorm."),
    Rename(_BLOCK + r"norm2\.", r"model.layers.\2.post_attention_layernorm."),
    Rename(_BLOCK + r"attn\.qkv\.", r"model.layers.\2.self_attn.qkv_proj."),
    Rename(_BLOCK + r"attn\.proj\.", r"model.layers.\2.self_attn.o_proj."),
    Rename(_BLOCK + r"mlp\.fc1\.", r"model.layers.\2.mlp.up_proj."),
    Rename(_BLOCK + r"mlp\.fc2\.", r"model.layers.\2.mlp.down_proj."),
    Rename(_BLOCK + r"mlp\.", r"model.layers.\2.mlp."),
    Rename(_VISUAL + r"patch_embed\.proj\.weight$", "model.patches.patch_proj.weight", of_stills),
    Rename(_VISUAL + r"merger\.ln_q\.", "model.projector.norm."),
    Rename(_VISUAL + r"merger\.mlp\.0\.", "model.projector.linear_1."),
    Rename(_VISUAL + r"merger\.mlp\.2\.", "model.projector.linear_2."),
)
_COMMON = {"depth": 32, "num_heads": 16, "patch_size": 14, "spatial_merge_size": 2}
_QWEN2 = {"embed_dim": 1280, "hidden_size": 3584, "mlp_ratio": 4, "hidden_act": "quick_gelu"}
_QWEN2_5 = {
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "hidden_act": "silu",
    "out_hidden_size": 3584,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}


def qwen2_vl(config: Config) -> VisionSpec:
    """The encoder beside Qwen2-VL's language model."""
    vision = _COMMON | _QWEN2 | config["vision_config"]
    hidden = int(vision["embed_dim"])
    mlp = MlpSpec(int(hidden * vision["mlp_ratio"]), read_activation(vision), gated=False, bias=True)
    return _encoder(config, vision, hidden, int(vision["hidden_size"]), mlp, NormSpec("layer", 1e-6, bias=True))


def qwen2_5_vl(config: Config) -> VisionSpec:
    """The encoder beside Qwen2.5-VL's language model."""
    vision = _COMMON | _QWEN2_5 | config["vision_config"]
    mlp = MlpSpec(int(vision["intermediate_size"]), read_activation(vision), bias=True)
    norm = NormSpec("rms", 1e-6)
    spec = _encoder(config, vision, int(vision["hidden_size"]), int(vision["out_hidden_size"]), mlp, norm)
    side = int(vision["window_size"]) // spec.merge // spec.patch * spec.merge
    return replace(spec, windows=WindowSpec(side, tuple(map(int, vision["fullatt_block_indexes"]))))


def _encoder(
    config: Config, vision: Mapping[str, Any], hidden: int, out_hidden: int, mlp: MlpSpec, norm: NormSpec
) -> VisionSpec:
    heads, merge = int(vision["num_heads"]), int(vision["spatial_merge_size"])
    head_dim = hidden // heads
    theta = float((vision.get("rope_parameters") or {}).get("rope_theta", 10000.0))
    attention = AttentionSpec(heads, heads, head_dim, head_dim**-0.5, causal=False)
    tower = ModelSpec(
        model_type="qwen2_vision",
        vocab_size=1,
        hidden_size=hidden,
        layers=(LayerSpec(attention, RopeSpec(theta, head_dim), mlp),) * int(vision["depth"]),
        max_position_embeddings=1,
        norm=norm,
        biases=BiasSpec(qkv=True, output=True),
        dtype=config.get("dtype") or config.get("torch_dtype"),
        renames=_RENAMES,
        ignored=(r"^(model\.)?(language_model|lm_head|layers|embed_tokens|norm)\.",),
    )
    return VisionSpec(
        tower,
        int(vision["patch_size"]),
        PatchRopeSpec(theta, head_dim, "twice"),
        MergingSpec(out_hidden, hidden * merge**2, merge, "gelu", norm, bias=True),
        ImageTokens("<|image_pad|>"),
        int(config.get("image_token_id", 151655)),
        "kvern.images.qwen:qwen",
        axes=True,
    )
