"""Pictures that keep their shape, of at most so many patches, as SigLIP 2 reads them (NaFlex)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvern.errors import UnsupportedModel, shown
from kvern.images.settings import ImageSettings, Resizing, common_settings
from kvern.images.views import Size
from kvern.spec.vision import VisionSpec

LARGEST_SCALE = 100.0
SMALLEST_STEP = 1e-5
BILINEAR = 2
"""Pillow's number of the filter that is used where the processor names none."""


@dataclass(frozen=True)
class Flexible(Resizing):
    """The whole picture, in the largest scale that has no more than `most` patches with `patch` pixels on a side."""

    patch: int
    most: int

    def size(self, width: int, height: int) -> Size:
        """Returns the size. The scale is found by halving, so that sizes are those that the model was trained with."""
        low, high = SMALLEST_STEP / 10, LARGEST_SCALE
        while high - low >= SMALLEST_STEP:
            middle = (low + high) / 2
            if math.prod(self._patches(middle, width, height)) <= self.most:
                low = middle
            else:
                high = middle
        columns, rows = self._patches(low, width, height)
        return columns * self.patch, rows * self.patch

    def _patches(self, scale: float, width: int, height: int) -> Size:
        columns, rows = (max(1, math.ceil(side * scale / self.patch)) for side in (width, height))
        return columns, rows


def naflex(given: Mapping[str, Any], spec: VisionSpec) -> ImageSettings:
    """The settings of an encoder that reads pictures of any shape. Raises UnsupportedModel."""
    patch, most = given.get("patch_size", spec.patch), given.get("max_num_patches", 256)
    if patch != spec.patch or type(most) is not int or most < 1 or not given.get("do_resize", True):
        raise UnsupportedModel(
            f"patch_size and max_num_patches of the image processor are {shown(patch)} and {shown(most)}: the model's "
            f"patches have {spec.patch} pixels, and there must be 1 or more; pictures are resized"
        )
    return common_settings({"resample": BILINEAR, **given}, Flexible(patch, most), spec.patch, spec.merge)
