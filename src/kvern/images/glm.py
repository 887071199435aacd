"""The sizes of images for GLM-4.1V to 4.6V, whose edges count the pixels of all frames that a patch covers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvern.images.qwen import PixelCount, pixel_limits
from kvern.images.settings import ImageSettings, Resizing, common_settings
from kvern.spec.vision import VisionSpec


@dataclass(frozen=True)
class FramedPixelCount(Resizing):
    """The PixelCount of `frames` times the picture; a picture that is narrower than `unit` is enlarged before."""

    least: int
    most: int
    unit: int
    frames: int

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Returns the width and height."""
        if min(width, height) < self.unit:
            factor = max(self.unit / height, self.unit / width)
            width, height = int(width * factor), int(height * factor)
        return PixelCount(self.least / self.frames, self.most / self.frames, self.unit).size(width, height)


def glm(given: Mapping[str, Any], spec: VisionSpec) -> ImageSettings:
    """The settings of GLM-4.1V to 4.6V. Raises UnsupportedModel."""
    least, most = pixel_limits(given)
    frames = int(given.get("temporal_patch_size", 2))
    resizing = FramedPixelCount(least, most, spec.patch * spec.merge, frames)
    return common_settings(given, resizing, spec.patch, spec.merge)
