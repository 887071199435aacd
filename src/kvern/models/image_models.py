"""The models that read images: a function from a `config.json` to a `VisionSpec` for each model type."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvern.errors import CorruptCheckpoint, UnsupportedModel
from kvern.models.registry import Config
from kvern.plugins import imported

if TYPE_CHECKING:
    from kvern.spec.vision import VisionSpec

logger = logging.getLogger("kvern")

VISION = {
    "qwen2_vl": "kvern.models.families.qwen2_vision:qwen2_vl",
    "qwen2_5_vl": "kvern.models.families.qwen2_vision:qwen2_5_vl",
    "gemma3": "kvern.models.families.gemma3_vision:gemma3",
    "gemma4": "kvern.models.families.gemma4_vision:gemma4",
    **dict.fromkeys(("glm4v", "glm46v", "glm4v_moe"), "kvern.models.families.glm_vision:glm4v"),
    "clip": "kvern.models.families.clip:clip_vision",
    **dict.fromkeys(("siglip", "siglip2"), "kvern.models.families.clip:siglip_vision"),
    "kimi_k25": "kvern.models.families.kimi_vision:kimi_k25",
    "internvl": "kvern.models.families.internvl:internvl_vision",
    "internvl_chat": "kvern.models.families.internvl:internvl_chat_vision",
    "llava": "kvern.models.families.llava:llava_vision",
    "llava_next": "kvern.models.families.llava:llava_next_vision",
    "mistral3": "kvern.models.families.pixtral:mistral3",
    **dict.fromkeys(("idefics3", "smolvlm"), "kvern.models.families.idefics:idefics3_vision"),
    **dict.fromkeys(
        ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), "kvern.models.families.qwen_vision:qwen3_vl"
    ),
}


def vision_of(config: Config) -> "VisionSpec | None":
    """Returns the description of a checkpoint's encoder of images; None: it has none that kvern knows.

    Raises UnsupportedModel.
    """
    where = VISION.get(str(config.get("model_type"))) if config.get("vision_config") else None
    found: VisionSpec | None = None if where is None else imported(where)(config)
    return found


def vision_in(folder: Path, config: Config) -> "VisionSpec | None":
    """Returns `vision_of` for a folder, whose tokenizer has the id of an image's tokens if its configuration does not.

    Raises UnsupportedModel.
    """
    spec = vision_of(config)
    if spec is None or spec.image_id >= 0 or not spec.tokens.image:
        return spec
    found = imported("kvern.text.tokenizer:Tokenizer")(folder).token_to_id(spec.tokens.image)
    if found is None:
        raise UnsupportedModel(f"the tokenizer of {folder} lacks the token of images, {spec.tokens.image}")
    return replace(spec, image_id=found)


def usable_vision(folder: Path, config: Config, *, dummy: bool = False) -> "VisionSpec | None":
    """Returns `vision_in` for a folder that has all of it, also its weights if they are not to be a `dummy`.

    Of other folders the language model is used alone, and a warning says why.
    """
    try:
        spec = vision_in(folder, config)
        if spec is not None:
            imported("kvern.images.settings:settings_of")(folder, spec)
            if not dummy:
                imported("kvern.models.vision:check_weights")(folder, spec)
        return spec
    except (UnsupportedModel, CorruptCheckpoint) as error:
        logger.warning("the model reads no images here: %s", error)
    except KeyError as error:
        logger.warning("the model reads no images here: its configuration has no %s", error)
    return None
