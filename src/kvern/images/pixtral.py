"""The sizes of images for Pixtral and Mistral 3."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvern.errors import UnsupportedModel, shown
from kvern.images.settings import ImageSettings, Resizing, common_settings
from kvern.spec.vision import VisionSpec


@dataclass(frozen=True)
class LongestEdge(Resizing):
    """Pixtral's: the longer side has at most `edge` pixels, and both are rounded up to multiples of `unit`."""

    edge: int
    unit: int

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Returns the width and height."""
        ratio = max(height / self.edge, width / self.edge)
        if ratio > 1:
            width, height = int(width / ratio), int(height / ratio)
        return self._up(width), self._up(height)

    def _up(self, side: int) -> int:
        return -(-max(side, 1) // self.unit) * self.unit


def pixtral(given: Mapping[str, Any], spec: VisionSpec) -> ImageSettings:
    """The settings of Pixtral and Mistral 3. Raises UnsupportedModel."""
    edge = given["size"].get("longest_edge")
    if not isinstance(edge, int) or edge < 1:
        raise UnsupportedModel(f"size of the image processor is {shown(given['size'])}: a longest_edge is supported")
    return common_settings(given, LongestEdge(edge, spec.patch * spec.merge), spec.patch, spec.merge)
