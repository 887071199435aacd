"""The encoder of images of Gemma 3: SigLIP, of whose patches the means become tokens."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvern.errors import UnsupportedModel
from kvern.models.families.vit import flat
from kvern.models.registry import Config
from kvern.spec.mixers import AttentionSpec
from kvern.spec.model import BiasSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec, Rename
from kvern.spec.vision import ImageTokens, PoolingSpec, VisionSpec

if TYPE_CHECKING:
    from torch import Tensor


def _transposed(weight: "Tensor", spec: ModelSpec) -> "Tensor":
    return weight.t()


_TOWER = r"^(model\.)?vision_tower\.(vision_model\.)?"
_LAYER = _TOWER + r"encoder\.layers\.(\d+)\."
_PROJECTOR = r"^(model\.)?multi_modal_projector\."
_RENAMES = (
    Rename(_LAYER + r"layer_norm1\.", r"model.layers.\3.input_layernorm."),
    Rename(_LAYER + r"layer_norm2\.", r"model.layers.\3.post_attention_layernorm."),
    Rename(_LAYER + r"self_attn\.out_proj\.", r"model.layers.\3.self_attn.o_proj."),
    Rename(_LAYER + r"mlp\.fc1\.", r"model.layers.\3.mlp.up_proj."),
    Rename(_LAYER + r"mlp\.fc2\.", r"model.layers.\3.mlp.down_proj."),
    Rename(_LAYER, r"model.layers.\3."),
    Rename(_TOWER + r"embeddings\.patch_embedding\.weight$", "model.patches.patch_proj.weight", flat),
    Rename(_TOWER + r"embeddings\.patch_embedding\.bias$", "model.patches.patch_proj.bias"),
    Rename(_TOWER + r"embeddings\.position_embedding\.", "model.pos_embed."),
    Rename(_TOWER + r"post_layernorm\.", "model.last_norm."),
    Rename(_PROJECTOR + r"mm_input_projection_weight$", "model.projector.linear.weight", _transposed),
    Rename(_PROJECTOR + r"mm_soft_emb_norm\.", "model.projector.norm."),
)


def gemma3(config: Config) -> VisionSpec:
    """The encoder beside Gemma 3's language model. Raises UnsupportedModel."""
    vision: Mapping[str, Any] = config["vision_config"]
    if vision.get("model_type", "siglip_vision_model") != "siglip_vision_model":
        raise UnsupportedModel(
            f"vision_config's model_type is {vision['model_type']!r:.60}: siglip_vision_model is known"
        )
    activation = vision.get("hidden_act", "gelu_pytorch_tanh")
    if activation != "gelu_pytorch_tanh":
        raise UnsupportedModel(f"hidden_act of vision_config is {activation!r:.60}: gelu_pytorch_tanh is supported")
    hidden, heads, patch = (int(vision[name]) for name in ("hidden_size", "num_attention_heads", "patch_size"))
    side = int(vision["image_size"]) // patch
    merge = side // round(int(config.get("mm_tokens_per_image", 256)) ** 0.5)
    epsilon = float(vision.get("layer_norm_eps", 1e-6))
    head_dim = hidden // heads
    layer = LayerSpec(
        AttentionSpec(heads, heads, head_dim, head_dim**-0.5, causal=False),
        None,
        MlpSpec(int(vision["intermediate_size"]), "gelu_tanh", gated=False, bias=True),
    )
    tower = ModelSpec(
        model_type="siglip",
        vocab_size=1,
        hidden_size=hidden,
        layers=(layer,) * int(vision["num_hidden_layers"]),
        max_position_embeddings=1,
        norm=NormSpec("layer", epsilon, bias=True),
        biases=BiasSpec(qkv=True, output=True),
        dtype=config.get("dtype") or config.get("torch_dtype"),
        renames=_RENAMES,
        ignored=(r"^(model\.)?(language_model|lm_head)\.", _TOWER + r"(head|embeddings\.position_ids)\b"),
    )
    return VisionSpec(
        tower,
        patch,
        None,
        PoolingSpec(int(config["text_config"]["hidden_size"]), merge, NormSpec("rms", epsilon, offset=1.0)),
        ImageTokens(
            "<image_soft_token>",
            mark="<start_of_image>",
            placed="\n\n<start_of_image><image_soft_token><end_of_image>\n\n",
            special=("<start_of_image>", "<end_of_image>"),
        ),
        int(config.get("image_token_index", config.get("image_token_id", 262144))),
        "kvern.images.gemma:gemma3",
        table=side,
        patch_bias=True,
        last_norm=True,
        spans=True,
    )
