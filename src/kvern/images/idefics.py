"""The tiles of images for Idefics 3 and SmolVLM, and the whole picture beside them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvern.errors import UnsupportedModel, shown
from kvern.images.settings import ImageSettings, Resizing, common_settings
from kvern.images.views import Grid, Size, View
from kvern.spec.vision import VisionSpec

MOST_SIDE = 4096
"""The longest side of a picture, whatever the settings say."""


@dataclass(frozen=True)
class Splitting(Resizing):
    """A picture is resized to the longer side `edge` and then to multiples of `tile`, and cut if it has several tiles.

    `splits`: false if the whole picture is all that is read.
    """

    edge: int
    tile: int
    splits: bool

    def views(self, width: int, height: int) -> tuple[View, ...]:
        """Returns the tiles and the whole picture, or that alone."""
        tile, first = self.tile, self._first(width, height)
        square = (tile, tile)
        if not self.splits:
            return (View.whole(first, square),)
        second = self._multiples(first)
        if max(second) <= tile:
            return (View.whole(first, second),)
        pieces = Grid(second[1] // tile, second[0] // tile)
        return View((first, second), second, pieces=pieces), View.whole(first, second, square)

    def _first(self, width: int, height: int) -> Size:
        """The longer side is `edge`, and the other an even number of pixels; both are reduced if they are too long."""
        ratio, edge = width / height, self.edge
        if width >= height:
            width, height = edge, int(edge / ratio)
            height += height % 2
        else:
            width, height = int(edge * ratio), edge
            width += width % 2
        width, height = max(width, 1), max(height, 1)
        ratio = width / height
        if width >= height and width > MOST_SIDE:
            width, height = MOST_SIDE, int(MOST_SIDE / ratio)
        elif height > width and height > MOST_SIDE:
            width, height = int(MOST_SIDE * ratio), MOST_SIDE
        return max(width, 1), max(height, 1)

    def _multiples(self, size: Size) -> Size:
        width, height = size
        ratio = width / height
        if width >= height:
            width = self._up(width)
            return width, self._up(int(width / ratio))
        height = self._up(height)
        return self._up(int(height * ratio)), height

    def _up(self, side: int) -> int:
        return math.ceil(side / self.tile) * self.tile


def idefics3(given: Mapping[str, Any], spec: VisionSpec) -> ImageSettings:
    """The settings of Idefics 3 and SmolVLM. Raises UnsupportedModel."""
    edge, tile = (given.get(name, {}).get("longest_edge") for name in ("size", "max_image_size"))
    if not isinstance(edge, int) or edge < 1 or not isinstance(tile, int) or tile // spec.patch != spec.table:
        raise UnsupportedModel(
            f"size and max_image_size of the image processor are {shown(given.get('size'))} and "
            f"{shown(given.get('max_image_size'))}: a longest_edge is supported, in the latter {spec.table} patches of "
            f"{spec.patch} pixels, as the encoder has them"
        )
    resizing = Splitting(edge, tile, bool(given.get("do_image_splitting", True)))
    return common_settings(given, resizing, spec.patch, spec.merge)
