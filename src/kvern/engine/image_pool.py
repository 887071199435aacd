"""The pool of rows of images, for an engine whose model reads them."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvern.config import EngineConfig
from kvern.models.image_models import usable_vision
from kvern.models.implementation import describe_model
from kvern.models.loader import read_config
from kvern.runner.plan import whole_prompt
from kvern.spec.model import ModelSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvern.cache.manager import MakeExtension
    from kvern.images.views import Grid
    from kvern.spec.vision import VisionSpec


def vision_here(config: EngineConfig, folder: Path) -> "VisionSpec | None":
    """The encoder of images that an engine uses; None: it reads text alone."""
    return usable_vision(folder, read_config(folder), dummy=config.load_format == "dummy")


def image_pool(config: EngineConfig, folder: Path) -> "MakeExtension | None":
    """Returns the maker of the cache extension for images; None: the engine reads text alone."""
    vision = vision_here(config, folder)
    if vision is None:
        return None
    from kvern.cache.images import EncoderLimits, ImagePool
    from kvern.images.settings import settings_of
    from kvern.images.spans import places_for, spans_of
    from kvern.runner.decoders import Decoders

    settings = settings_of(folder, vision)
    spec = describe_model(folder, read_config(folder), config.model_implementation)
    limits = EncoderLimits(
        spans=partial(spans_of, settings=settings, image_id=vision.image_id),
        places=places_for(settings, whole_prompt(config, spec)),
        parts=partial(parts_of, vision, spec),
        whole=not config.chunked_prefill,
    )
    return partial(ImagePool, limits, Decoders(folder))


def parts_of(vision: "VisionSpec", spec: ModelSpec, pieces: "Sequence[Grid]") -> tuple[int, float]:
    """Returns the parts of an image, and about how many tokens the language model computes while one is encoded.

    A layer has 12 * hidden_size^2 weights, as those of most models, and a patch attends to all others of its piece, in
    products that run half as fast as those of matrices.
    """
    width, parts = vision.tower.hidden_size, vision.parts([piece.cells for piece in pieces])
    weights = sum(piece.cells * (12 * width * width + 4 * piece.cells * width) for piece in pieces)
    tokens = len(vision.tower.layers) * weights / (12 * spec.hidden_size**2 * max(1, len(spec.layers)))
    return parts, tokens / parts
