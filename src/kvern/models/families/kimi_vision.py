"""The encoder of images of Kimi K2.5 (MoonViT, https://arxiv.org/abs/2504.07491)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvern.errors import UnsupportedModel, shown
from kvern.models.describe import check_settings, read_activation
from kvern.models.families.vit import flat
from kvern.models.registry import Config
from kvern.spec.mixers import AttentionSpec
from kvern.spec.model import BiasSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec, Rename, RopeSpec
from kvern.spec.vision import ImageTokens, MergingSpec, PatchRopeSpec, VisionSpec

if TYPE_CHECKING:
    from torch import Tensor


def _halves(weight: "Tensor", spec: ModelSpec) -> "Tensor":
    """Queries, keys and values whose planes are published as pairs of neighbours, and turn as halves of heads here."""
    import torch

    heads = spec.layers[0].attention.heads
    query, key, value = weight.chunk(3)
    turned = (torch.unflatten(part, 0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2) for part in (query, key))
    return torch.cat((*turned, value))


def _row_by_row(table: "Tensor", spec: ModelSpec) -> "Tensor":
    """A table of positions with a row for each."""
    return table.flatten(0, 1)


_PUBLISHED = r"^(model\.)?vision_tower\.encoder\.blocks\.(\d+)\."
_LAYER = r"^(model\.)?vision_tower\.layers\.(\d+)\."
_TOWER = r"^(model\.)?vision_tower\.(encoder\.)?"
_PROJECTOR = r"^(model\.)?mm_projector\."
_RENAMES = (
    Rename(_PUBLISHED + r"norm0\.", r"model.layers.\2.input_layernorm."),
    Rename(_PUBLISHED + r"norm1\.", r"model.layers.\2.post_attention_layernorm."),
    Rename(_PUBLISHED + r"wqkv\.", r"model.layers.\2.self_attn.qkv_proj.", _halves),
    Rename(_PUBLISHED + r"wo\.", r"model.layers.\2.self_attn.o_proj."),
    Rename(_PUBLISHED + r"mlp\.fc0\.", r"model.layers.\2.mlp.up_proj."),
    Rename(_PUBLISHED + r"mlp\.fc1\.", r"model.layers.\2.mlp.down_proj."),
    Rename(_LAYER + r"norm1\.", r"model.layers.\2.input_layernorm."),
    Rename(_LAYER + r"norm2\.", r"model.layers.\2.post_attention_layernorm."),
    Rename(_LAYER + r"attn\.proj\.", r"model.layers.\2.self_attn.o_proj."),
    Rename(_LAYER + r"attn\.", r"model.layers.\2.self_attn."),
    Rename(_LAYER + r"mlp\.fc1\.", r"model.layers.\2.mlp.up_proj."),
    Rename(_LAYER + r"mlp\.fc2\.", r"model.layers.\2.mlp.down_proj."),
    Rename(_TOWER + r"patch_embed\.proj\.weight$", "model.patches.patch_proj.weight", flat),
    Rename(_TOWER + r"patch_embed\.proj\.bias$", "model.patches.patch_proj.bias"),
    Rename(_TOWER + r"patch_embed\.pos_emb\.(weight|position_embeddings)$", "model.pos_embed.weight", _row_by_row),
    Rename(_TOWER + r"final_layernorm\.", "model.last_norm."),
    Rename(_PROJECTOR + r"pre_norm\.", "model.projector.norm."),
    Rename(_PROJECTOR + r"(proj\.0|in_proj)\.", "model.projector.linear_1."),
    Rename(_PROJECTOR + r"(proj\.2|out_proj)\.", "model.projector.linear_2."),
)


def kimi_k25(config: Config) -> VisionSpec:
    """The encoder beside Kimi K2.5's language model. Raises UnsupportedModel."""
    vision: Mapping[str, Any] = config["vision_config"]
    check_settings(vision, {"mm_projector_type": "patchmerger", "merge_type": "sd2_tpool", "norm_type": "layernorm"})

    def read(name: str, default: Any) -> Any:
        """A setting by its name in transformers or its publisher's."""
        names = {"pos_emb_height": "init_pos_emb_height", "pos_emb_width": "init_pos_emb_width"}
        return vision.get(names.get(name, f"vt_{name}"), vision.get(name, default))

    high, wide = (read(f"pos_emb_{side}", 64) for side in ("height", "width"))
    merges = list(vision.get("merge_kernel_size", (2, 2)))
    if high != wide or len({*merges}) != 1:
        raise UnsupportedModel(
            f"positions of {shown(high)} x {shown(wide)} patches, and merge_kernel_size {shown(merges)}: "
            "squares are supported"
        )
    hidden, heads = int(read("hidden_size", 1152)), int(read("num_attention_heads", 16))
    head_dim, merge = hidden // heads, int(merges[0])
    theta = float((vision.get("rope_parameters") or {}).get("rope_theta", 10000.0))
    activation = read_activation({"hidden_act": vision.get("hidden_act", "gelu_pytorch_tanh")})
    mlp = MlpSpec(int(read("intermediate_size", 4304)), activation, gated=False, bias=True)
    attention = AttentionSpec(heads, heads, head_dim, head_dim**-0.5, causal=False)
    tower = ModelSpec(
        model_type="kimi_vision",
        vocab_size=1,
        hidden_size=hidden,
        layers=(LayerSpec(attention, RopeSpec(theta, head_dim), mlp),) * int(read("num_hidden_layers", 27)),
        max_position_embeddings=1,
        norm=NormSpec("layer", 1e-5, bias=True),
        biases=BiasSpec(qkv=True, output=True),
        dtype=config.get("dtype") or config.get("torch_dtype"),
        renames=_RENAMES,
        ignored=(r"^(model\.)?(language_model|lm_head)\.",),
    )
    epsilon = float(vision.get("projector_ln_eps", config.get("projection_layer_norm_eps", 1e-5)))
    text = int(config["text_config"]["hidden_size"])
    norm = NormSpec("layer", epsilon, bias=True)
    return VisionSpec(
        tower,
        int(vision.get("patch_size", 14)),
        PatchRopeSpec(theta, head_dim, "pairs"),
        MergingSpec(text, hidden * merge**2, merge, "gelu", norm, bias=True),
        ImageTokens("<|media_pad|>"),
        int(config.get("image_token_id", config.get("media_placeholder_token_id", 163605))),
        "kvern.images.kimi:kimi",
        table=int(high),
        between="cubic",
        patch_bias=True,
        last_norm=True,
    )
