"""The sizes of images for Qwen2-VL and later ones, whose edges are counts of pixels."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvern.errors import UnsupportedModel, shown
from kvern.images.settings import ImageSettings, Resizing, common_settings
from kvern.spec.vision import VisionSpec


@dataclass(frozen=True)
class PixelCount(Resizing):
    """Qwen-VL's: both sides are rounded to multiples of `unit`, and the picture has from `least` to `most` pixels."""

    least: float
    most: float
    unit: int

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Returns the width and height."""
        unit = self.unit
        wide, high = (round(side / unit) * unit for side in (width, height))  # half of a unit goes to an even number
        if wide * high > self.most:
            factor = math.sqrt(width * height / self.most)
            return max(unit, int(width / factor / unit) * unit), max(unit, int(height / factor / unit) * unit)
        if wide * high < self.least:
            factor = math.sqrt(self.least / (width * height))
            return math.ceil(width * factor / unit) * unit, math.ceil(height * factor / unit) * unit
        return wide, high


def qwen(given: Mapping[str, Any], spec: VisionSpec) -> ImageSettings:
    """The settings of Qwen2-VL and later ones, whose edges are counts of pixels. Raises UnsupportedModel."""
    least, most = pixel_limits(given)
    return common_settings(given, PixelCount(least, most, spec.patch * spec.merge), spec.patch, spec.merge)


def pixel_limits(given: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the least and the most pixels that a processor allows. Raises UnsupportedModel."""
    least, most = (_edge(given, *names) for names in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")))
    if not (isinstance(least, int) and isinstance(most, int) and 0 < least <= most):
        raise UnsupportedModel(
            f"size of the image processor is {shown(given.get('size'))}: it must have shortest_edge, longest_edge"
        )
    return least, most


def _edge(given: Mapping[str, Any], old: str, new: str) -> object:
    """A limit of pixels, of which the older name has precedence where files have both."""
    found = given.get(old)
    size = given.get("size") or {}
    return size.get(new, size.get(old)) if found is None else found
