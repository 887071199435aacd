"""The sizes of images for Gemma 3 and 4."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvern.errors import UnsupportedModel, shown
from kvern.images.settings import BICUBIC, ImageSettings, Resizing, common_settings
from kvern.images.views import Size
from kvern.spec.vision import VisionSpec

HALF = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class Square(Resizing):
    """Gemma 3's: all pictures have the same size."""

    side: int

    def size(self, width: int, height: int) -> Size:
        return self.side, self.side


def gemma3(given: Mapping[str, Any], spec: VisionSpec) -> ImageSettings:
    """The settings of Gemma 3. Raises UnsupportedModel."""
    side = spec.table * spec.patch
    if given["size"] != {"height": side, "width": side} or given.get("do_pan_and_scan"):
        raise UnsupportedModel(
            f"size of the image processor is {shown(given['size'])}, and do_pan_and_scan "
            f"{shown(given.get('do_pan_and_scan'))}: the encoder's size of {side} x {side}, without it, is supported"
        )
    return common_settings(given, Square(side), spec.patch, spec.merge)


@dataclass(frozen=True)
class TokenCount(Resizing):
    """Gemma 4's: as large as `most` tokens of `unit` x `unit` pixels allow, whatever the picture's own size is."""

    most: int
    unit: int

    def size(self, width: int, height: int) -> Size:
        factor = math.sqrt(self.most * self.unit**2 / (width * height))
        wide, high = (math.floor(factor * side / self.unit) for side in (width, height))
        if not high:
            wide, high = min(width // height, self.most), 1
        elif not wide:
            wide, high = 1, min(height // width, self.most)
        return wide * self.unit, high * self.unit


def gemma4(given: Mapping[str, Any], spec: VisionSpec) -> ImageSettings:
    """The settings of Gemma 4. Raises UnsupportedModel."""
    asked = {"patch_size": spec.patch, "pooling_kernel_size": spec.merge}
    for name, expected in asked.items():
        if given.get(name, expected) != expected:
            raise UnsupportedModel(
                f"{name} of the image processor is {shown(given[name])}, and the encoder's is {expected}"
            )
    most = given["max_soft_tokens"]
    if not isinstance(most, int) or not 0 < most * spec.merge <= spec.table:
        raise UnsupportedModel(
            f"max_soft_tokens is {shown(most)}: the encoder has positions for 1 to {spec.table // spec.merge}"
        )
    resizing = TokenCount(most, spec.patch * spec.merge)
    return ImageSettings(resizing, spec.patch, spec.merge, HALF, HALF, int(given.get("resample", BICUBIC)))
