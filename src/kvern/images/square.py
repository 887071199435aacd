"""Pictures of one size, as CLIP and SigLIP read them: the middle of an image, or all of it whatever its shape."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvern.errors import UnsupportedModel, shown
from kvern.images.settings import ImageSettings, Resizing, common_settings
from kvern.images.views import Size, View
from kvern.spec.vision import VisionSpec


@dataclass(frozen=True)
class Squeezed(Resizing):
    """The whole picture as a square."""

    side: int

    def size(self, width: int, height: int) -> Size:
        """Returns the size."""
        return self.side, self.side


@dataclass(frozen=True)
class CentreCrop(Resizing):
    """The square in the middle of a picture whose shorter side has `edge` pixels."""

    edge: int
    side: int

    def views(self, width: int, height: int) -> tuple[View, ...]:
        """Returns the square."""
        longer = int(self.edge * max(width, height) / min(width, height))
        size = (self.edge, longer) if width <= height else (longer, self.edge)
        return (View.centred(size, (self.side, self.side)),)


def square(given: Mapping[str, Any], spec: VisionSpec) -> ImageSettings:
    """The settings of an encoder that reads squares. Raises UnsupportedModel."""
    size, crop = (_sides(given.get(name)) for name in ("size", "crop_size"))
    edge, crops = size.get("shortest_edge"), given.get("do_center_crop", True)
    side = _side((crop if crops and crop else size).get("height"), spec)
    resizing: Resizing | None = None
    if isinstance(edge, int) and edge >= side and crops and crop == {"height": side, "width": side}:
        resizing = CentreCrop(edge, side)
    elif size == {"height": side, "width": side} and (not crops or crop in ({}, size)):
        resizing = Squeezed(side)
    if resizing is None or given.get("do_pad") or not given.get("do_resize", True):
        raise UnsupportedModel(
            f"size, crop_size and do_pad of the image processor are {shown(given.get('size'))}, "
            f"{shown(given.get('crop_size'))} and {shown(given.get('do_pad'))}: squares of {side} pixels are "
            "supported, resized or cut from the middle"
        )
    return common_settings(given, resizing, spec.patch, spec.merge)


def _side(given: object, spec: VisionSpec) -> int:
    """The side of the squares in pixels: the processor's, of which the last ones may be in no patch."""
    least = spec.table * spec.patch
    return given if isinstance(given, int) and least <= given < least + spec.patch else least


def _sides(given: object) -> Mapping[str, Any]:
    """The sides of a square; older files have numbers, of the shorter side, or of both where a square is cut."""
    if isinstance(given, int):
        return {"height": given, "width": given, "shortest_edge": given}
    return given if isinstance(given, Mapping) else {}
