"""The encoder of images of Gemma 3: SigLIP, of whose patches the means become tokens."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvern.errors import UnsupportedModel
from kvern.models.families.vit import Vit, clip_renames
from kvern.models.registry import Config
from kvern.spec.model import ModelSpec, NormSpec, Rename
from kvern.spec.vision import ImageTokens, PoolingSpec, VisionSpec

if TYPE_CHECKING:
    from torch import Tensor


def _transposed(weight: "Tensor", spec: ModelSpec) -> "Tensor":
    return weight.t()


_TOWER = r"vision_tower(?:\.vision_model)?"
_PROJECTOR = r"^(model\.)?multi_modal_projector\."
_RENAMES = (
    *clip_renames(_TOWER),
    Rename(_PROJECTOR + r"mm_input_projection_weight$", "model.projector.linear.weight", _transposed),
    Rename(_PROJECTOR + r"mm_soft_emb_norm\.", "model.projector.norm."),
)


def gemma3(config: Config) -> VisionSpec:
    """The encoder beside Gemma 3's language model. Raises UnsupportedModel."""
    vision: Mapping[str, Any] = config["vision_config"]
    vit = Vit.of(vision, "siglip_vision_model")
    activation = vision.get("hidden_act", "gelu_pytorch_tanh")
    if activation != "gelu_pytorch_tanh":
        raise UnsupportedModel(f"hidden_act of vision_config is {activation!r:.60}: gelu_pytorch_tanh is supported")
    merge = vit.patches // round(int(config.get("mm_tokens_per_image", 256)) ** 0.5)
    ignored = (r"^(model\.)?(language_model|lm_head)\.", rf"{_TOWER}\.(head|embeddings\.position_ids)\b")
    tower = vit.tower(vit.layers, _RENAMES, config.get("dtype") or config.get("torch_dtype"), ignored=ignored)
    return VisionSpec(
        tower,
        vit.patch,
        None,
        PoolingSpec(int(config["text_config"]["hidden_size"]), merge, NormSpec("rms", vit.norm.epsilon, offset=1.0)),
        ImageTokens(
            "<image_soft_token>",
            mark="<start_of_image>",
            placed="\n\n<start_of_image><image_soft_token><end_of_image>\n\n",
            special=("<start_of_image>", "<end_of_image>"),
        ),
        int(config.get("image_token_index", config.get("image_token_id", 262144))),
        "kvern.images.gemma:gemma3",
        table=vit.patches,
        patch_bias=True,
        last_norm=True,
        spans=True,
    )
