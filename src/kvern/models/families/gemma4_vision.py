"""The encoder of images of Gemma 4: positions by column and by row, patches that are pooled, and bounds of products."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvern.errors import UnsupportedModel
from kvern.models.describe import read_activation
from kvern.models.families.gemma4 import MEDIA
from kvern.models.registry import Config
from kvern.spec.mixers import AttentionSpec
from kvern.spec.model import (
    SANDWICH_NORMS,
    BlockSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    NormSpec,
    QueryKeyNormSpec,
    Rename,
    RopeSpec,
)
from kvern.spec.vision import ImageTokens, PatchRopeSpec, PoolingSpec, VisionSpec

if TYPE_CHECKING:
    from torch import Tensor


def _channels_first(weight: "Tensor", spec: ModelSpec) -> "Tensor":
    """The matrix of a patch's pixels, the channels of which come last in the checkpoint."""
    side = round((weight.shape[1] // 3) ** 0.5)
    return weight.view(-1, side, side, 3).permute(0, 3, 1, 2).flatten(1)


def _both_axes(weight: "Tensor", spec: ModelSpec) -> "Tensor":
    """The outputs of heads whose first half turns by column and whose second half by row, each in two halves.

    As `PatchRopeSpec` has it, the first halves of both stand before the second ones, rows first.
    """
    quarters = weight.view(-1, 4, spec.layers[0].attention.head_dim // 4, *weight.shape[1:])
    return quarters[:, [2, 0, 3, 1]].flatten(0, 2)


def _in_a_line(table: "Tensor", spec: ModelSpec) -> "Tensor":
    return table.flatten(0, 1)


_TOWER = r"^(model\.)?vision_tower\."
_LAYER = _TOWER + r"encoder\.layers\.(\d+)\."
_EMBED = r"^(model\.)?embed_vision\."
_RENAMES = (
    Rename(_LAYER + r"self_attn\.([qk]_proj)\.linear\.weight$", r"model.layers.\2.self_attn.\3.weight", _both_axes),
    Rename(_LAYER + r"self_attn\.([qk]_norm)\.weight$", r"model.layers.\2.self_attn.\3.weight", _both_axes),
    Rename(_LAYER + r"(\w+)\.(\w+)\.linear\.weight$", r"model.layers.\2.\3.\4.weight"),
    Rename(_LAYER, r"model.layers.\2."),
    Rename(_TOWER + r"patch_embedder\.input_proj\.", "model.patches.patch_proj.", _channels_first),
    Rename(_TOWER + r"patch_embedder\.position_embedding_table$", "model.pos_embed.weight", _in_a_line),
    Rename(_TOWER + r"(?=std_(bias|scale)$)", "model.projector."),
    Rename(_EMBED + r"embedding_projection\.", "model.projector.linear."),
)


def gemma4(config: Config) -> VisionSpec:
    """The encoder beside Gemma 4's language model. Raises UnsupportedModel."""
    vision: Mapping[str, Any] = config["vision_config"]
    text: Mapping[str, Any] = config["text_config"]
    hidden, heads = int(vision["hidden_size"]), int(vision["num_attention_heads"])
    if vision.get("num_key_value_heads", heads) != heads:
        raise UnsupportedModel(
            f"num_key_value_heads of vision_config is {vision['num_key_value_heads']}: as many as heads, {heads}, are "
            "supported"
        )
    head_dim = int(vision.get("head_dim") or hidden // heads)
    theta = float((vision.get("rope_parameters") or {}).get("rope_theta", 100.0))
    norm = NormSpec("rms", float(vision.get("rms_norm_eps", 1e-6)))
    layer = LayerSpec(
        AttentionSpec(heads, heads, head_dim, 1.0, causal=False),
        RopeSpec(theta, head_dim),
        MlpSpec(int(vision["intermediate_size"]), read_activation(vision)),
    )
    tower = ModelSpec(
        model_type="gemma4_vision",
        vocab_size=1,
        hidden_size=hidden,
        layers=(layer,) * int(vision["num_hidden_layers"]),
        max_position_embeddings=1,
        norm=norm,
        block=BlockSpec(SANDWICH_NORMS),
        query_key_norm=QueryKeyNormSpec(norm, values=True),
        dtype=config.get("dtype") or config.get("torch_dtype"),
        renames=_RENAMES,
        ignored=(r"^(model\.)?(language_model|lm_head|audio_tower|embed_audio)\.",),
    )
    merge = int(vision.get("pooling_kernel_size", 3))
    plain = NormSpec("rms", norm.epsilon, weight=False)
    return VisionSpec(
        tower,
        int(vision["patch_size"]),
        PatchRopeSpec(theta, head_dim, "twice"),
        PoolingSpec(int(text["hidden_size"]), merge, plain, hidden**0.5, bool(vision.get("standardize", False))),
        ImageTokens("<|image|>", begin="<|image>", end="<image|>", special=("<|image>", "<image|>")),
        int(config.get("image_token_id", MEDIA["image_token_id"])),
        "kvern.images.gemma:gemma4",
        table=int(vision["position_embedding_size"]),
        by_axis=True,
        clipped=bool(vision.get("use_clipped_linears", False)),
        spans=text.get("use_bidirectional_attention") == "vision",
    )
