"""The encoder of images of Qwen3-VL, Qwen3.5 and 3.6: patches at positions between learned ones, 2 x 2 of them a token.

Qwen3-VL also adds what some layers of the encoder see to the first layers of the language model (DeepStack).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvern.errors import UnsupportedModel
from kvern.models.describe import read_activation
from kvern.models.registry import Config
from kvern.spec.mixers import AttentionSpec
from kvern.spec.model import BiasSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec, Rename, RopeSpec
from kvern.spec.vision import ImageTokens, MergingSpec, PatchRopeSpec, TapSpec, VisionSpec

if TYPE_CHECKING:
    from torch import Tensor

NORM = NormSpec("layer", 1e-6, bias=True)


def of_stills(weight: "Tensor", spec: ModelSpec) -> "Tensor":
    """The matrix of a patch's pixels: a still picture is every frame of those that the kernel covers."""
    return weight.sum(2).flatten(1)


_BLOCK = r"^(model\.)?visual\.blocks\.(\d+)\."
_VISUAL = r"^(model\.)?visual\."
_RENAMES = (
    Rename(_BLOCK + r"norm1\.", r"model.layers.\2.input_layernorm."),
    Rename(_BLOCK + r"norm2\.", r"model.layers.\2.post_attention_layernorm."),
    Rename(_BLOCK + r"attn\.qkv\.", r"model.layers.\2.self_attn.qkv_proj."),
    Rename(_BLOCK + r"attn\.proj\.", r"model.layers.\2.self_attn.o_proj."),
    Rename(_BLOCK + r"mlp\.linear_fc1\.", r"model.layers.\2.mlp.up_proj."),
    Rename(_BLOCK + r"mlp\.linear_fc2\.", r"model.layers.\2.mlp.down_proj."),
    Rename(_VISUAL + r"patch_embed\.proj\.weight$", "model.patches.patch_proj.weight", of_stills),
    Rename(_VISUAL + r"patch_embed\.proj\.bias$", "model.patches.patch_proj.bias"),
    Rename(_VISUAL + r"pos_embed\.", "model.pos_embed."),
    Rename(_VISUAL + r"deepstack_merger_list\.(\d+)\.norm\.", r"model.deep.\2.norm."),
    Rename(_VISUAL + r"deepstack_merger_list\.(\d+)\.linear_fc([12])\.", r"model.deep.\2.linear_\3."),
    Rename(_VISUAL + r"merger\.norm\.", "model.projector.norm."),
    Rename(_VISUAL + r"merger\.linear_fc([12])\.", r"model.projector.linear_\2."),
)


def qwen3_vl(config: Config) -> VisionSpec:
    """The encoder beside a language model of Qwen3-VL, Qwen3.5 or 3.6. Raises UnsupportedModel."""
    vision: Mapping[str, Any] = config["vision_config"]
    taps = tuple(map(int, vision.get("deepstack_visual_indexes") or ()))
    if list(taps) != sorted(set(taps)):
        raise UnsupportedModel(f"deepstack_visual_indexes is {list(taps)}: layers in ascending order are supported")
    hidden, heads = int(vision["hidden_size"]), int(vision["num_heads"])
    head_dim, merge = hidden // heads, int(vision["spatial_merge_size"])
    side = round(int(vision["num_position_embeddings"]) ** 0.5)
    theta = float((vision.get("rope_parameters") or {}).get("rope_theta", 10000.0))
    attention = AttentionSpec(heads, heads, head_dim, head_dim**-0.5, causal=False)
    mlp = MlpSpec(int(vision["intermediate_size"]), read_activation(vision), gated=False, bias=True)
    tower = ModelSpec(
        model_type="qwen_vision",
        vocab_size=1,
        hidden_size=hidden,
        layers=(LayerSpec(attention, RopeSpec(theta, head_dim), mlp),) * int(vision["depth"]),
        max_position_embeddings=1,
        norm=NORM,
        biases=BiasSpec(qkv=True, output=True),
        dtype=config.get("dtype") or config.get("torch_dtype"),
        renames=_RENAMES,
        ignored=(r"^(model\.)?(language_model|lm_head|mtp)\.",),
    )
    projector = MergingSpec(int(vision["out_hidden_size"]), hidden * merge**2, merge, "gelu", NORM, bias=True)
    return VisionSpec(
        tower,
        int(vision["patch_size"]),
        PatchRopeSpec(theta, head_dim, "twice"),
        projector,
        ImageTokens("<|image_pad|>"),
        int(config["image_token_id"]),
        "kvern.images.qwen:qwen",
        table=side,
        patch_bias=True,
        axes=True,
        taps=tuple(TapSpec(layer, replace(projector, late=True)) for layer in taps),
    )
