"""The sizes of images for Kimi K2.5: never larger than they are, and padded with black to the right and below."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvern.errors import UnsupportedModel, shown
from kvern.images.settings import ImageSettings, Resizing, common_settings
from kvern.images.views import Size, View
from kvern.spec.vision import VisionSpec

MEAN = DEVIATION = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class PatchCount(Resizing):
    """At most `most` patches of `patch` pixels, of which `side` are on a side; `merge` x `merge` are one token."""

    most: int
    side: int
    patch: int
    merge: int

    def size(self, width: int, height: int) -> Size:
        """Returns the size of the picture with its padding."""
        unit = self.patch * self.merge
        wide, high = (-(-side // unit) * unit for side in self._inner(width, height))
        return wide, high

    def views(self, width: int, height: int) -> tuple[View, ...]:
        """Returns the picture, on its padding."""
        return (View((self._inner(width, height),), self.size(width, height)),)

    def _inner(self, width: int, height: int) -> Size:
        patches = max(1, height // self.patch) * max(1, width // self.patch)
        longest = self.side * self.patch
        scale = min(1.0, math.sqrt(self.most / patches), longest / height, longest / width)
        wide, high = (min(max(1, int(side * scale)), longest) for side in (width, height))
        return wide, high


def kimi(given: Mapping[str, Any], spec: VisionSpec) -> ImageSettings:
    """The settings of Kimi K2.5, under the names of its publisher or of transformers. Raises UnsupportedModel."""
    size = given.get("size") or {}
    most = given.get("in_patch_limit", given.get("max_patches", 16384))
    side = given.get("patch_limit_on_one_side", size.get("max_height", 512))
    if not all(isinstance(limit, int) and limit > 0 for limit in (most, side)):
        raise UnsupportedModel(
            f"the image processor allows {shown(most)} patches, {shown(side)} on a side: give counts"
        )
    if given.get("fixed_output_tokens") is not None:
        raise UnsupportedModel(f"fixed_output_tokens is {shown(given['fixed_output_tokens'])}: null is supported")
    colours = {"image_mean": MEAN, "image_std": DEVIATION, **given}
    return common_settings(colours, PatchCount(most, side, spec.patch, spec.merge), spec.patch, spec.merge)
