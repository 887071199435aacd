"""The encoder of images of GLM-4.1V to 4.6V: positions in cubic interpolation, and a gated way to rows."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvern.models.describe import read_activation
from kvern.models.families.qwen_vision import of_stills
from kvern.models.registry import Config
from kvern.spec.mixers import AttentionSpec
from kvern.spec.model import BiasSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec, Rename, RopeSpec
from kvern.spec.vision import GatedSpec, ImageTokens, PatchRopeSpec, VisionSpec

if TYPE_CHECKING:
    from torch import Tensor


def _side_by_side(weight: "Tensor", spec: ModelSpec) -> "Tensor":
    """The kernel of a convolution without overlap as the matrix of states side by side."""
    return weight.permute(0, 2, 3, 1).flatten(1)


_BLOCK = r"^(model\.)?visual\.blocks\.(\d+)\."
_VISUAL = r"^(model\.)?visual\."
_RENAMES = (
    Rename(_BLOCK + r"norm1\.", r"model.layers.\2.input_layernorm."),
    Rename(_BLOCK + r"norm2\.", r"model.layers.\2.post_attention_layernorm."),
    Rename(_BLOCK + r"attn\.qkv\.", r"model.layers.\2.self_attn.qkv_proj."),
    Rename(_BLOCK + r"attn\.proj\.", r"model.layers.\2.self_attn.o_proj."),
    Rename(_BLOCK + r"mlp\.", r"model.layers.\2.mlp."),
    Rename(_VISUAL + r"patch_embed\.proj\.weight$", "model.patches.patch_proj.weight", of_stills),
    Rename(_VISUAL + r"patch_embed\.proj\.bias$", "model.patches.patch_proj.bias"),
    Rename(_VISUAL + r"post_conv_layernorm\.", "model.patch_norm."),
    Rename(_VISUAL + r"embeddings\.position_embedding\.", "model.pos_embed."),
    Rename(_VISUAL + r"post_layernorm\.", "model.last_norm."),
    Rename(_VISUAL + r"downsample\.weight$", "model.projector.downsample.weight", _side_by_side),
    Rename(_VISUAL + r"downsample\.bias$", "model.projector.downsample.bias"),
    Rename(_VISUAL + r"merger\.post_projection_norm\.", "model.projector.norm."),
    Rename(_VISUAL + r"merger\.", "model.projector."),
)
_DEFAULTS = {
    "depth": 24,
    "hidden_size": 1536,
    "hidden_act": "silu",
    "num_heads": 12,
    "image_size": 336,
    "patch_size": 14,
    "rms_norm_eps": 1e-5,
    "spatial_merge_size": 2,
    "out_hidden_size": 4096,
    "intermediate_size": 13696,
}


def glm4v(config: Config) -> VisionSpec:
    """The encoder beside a language model of GLM-4.1V to 4.6V."""
    vision: Mapping[str, Any] = _DEFAULTS | config["vision_config"]
    hidden, heads = int(vision["hidden_size"]), int(vision["num_heads"])
    patch, rows = int(vision["patch_size"]), int(vision["out_hidden_size"])
    head_dim = hidden // heads
    theta = float((vision.get("rope_parameters") or {}).get("rope_theta", 10000.0))
    attention = AttentionSpec(heads, heads, head_dim, head_dim**-0.5, causal=False)
    activation = read_activation(vision)
    tower = ModelSpec(
        model_type="glm_vision",
        vocab_size=1,
        hidden_size=hidden,
        layers=(LayerSpec(attention, RopeSpec(theta, head_dim), MlpSpec(rows, activation)),) * int(vision["depth"]),
        max_position_embeddings=1,
        norm=NormSpec("rms", float(vision["rms_norm_eps"])),
        biases=BiasSpec(qkv=bool(vision.get("attention_bias", False))),
        dtype=config.get("dtype") or config.get("torch_dtype"),
        renames=_RENAMES,
        ignored=(r"^(model\.)?(language_model|lm_head)\.",),
    )
    inner, merge = int(vision["intermediate_size"]), int(vision["spatial_merge_size"])
    projector = GatedSpec(rows, inner, merge, activation, NormSpec("layer", 1e-5, bias=True))
    image_id = 151363 if config.get("model_type") == "glm4v_moe" else 151343
    return VisionSpec(
        tower,
        patch,
        PatchRopeSpec(theta, head_dim, "twice"),
        projector,
        ImageTokens("<|image|>"),
        int(config.get("image_token_id", image_id)),
        "kvern.images.glm:glm",
        table=int(vision["image_size"]) // patch,
        between="cubic",
        patch_bias=True,
        patch_norm=True,
        last_norm=True,
        axes=True,
    )
