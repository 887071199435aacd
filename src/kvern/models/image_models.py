"""The models that read images: a function from a `config.json` to a `VisionSpec` for each model type."""

from typing import TYPE_CHECKING

from kvern.models.registry import Config
from kvern.plugins import imported

if TYPE_CHECKING:
    from kvern.spec.vision import VisionSpec

VISION = {
    "mistral3": "kvern.models.families.pixtral:mistral3",
    "qwen3_5": "kvern.models.families.qwen_vision:qwen3_5",
    "qwen3_5_moe": "kvern.models.families.qwen_vision:qwen3_5",
}


def vision_of(config: Config) -> "VisionSpec | None":
    """Returns the description of a checkpoint's encoder of images; None: it has none that kvern knows.

    Raises UnsupportedModel.
    """
    where = VISION.get(str(config.get("model_type")))
    found: VisionSpec | None = None if where is None else imported(where)(config)
    return found
