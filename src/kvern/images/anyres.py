"""The pieces of images for LLaVA-NeXT: the whole picture as a square, and tiles of a larger one in its own shape."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy

from kvern.errors import UnsupportedModel, shown
from kvern.images.settings import ImageSettings, Resizing, common_settings
from kvern.images.views import Grid, Order, Size, View
from kvern.spec.vision import VisionSpec

USUAL = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))


@dataclass(frozen=True)
class Anyres(Resizing):
    """Canvases of some sizes, `[width, height]`, of which each image takes the one that shows the most of it.

    Its tiles have `side` pixels and `patches` patches on a side. Rows of a canvas are lines over all tiles, without
    what its black edges make, and each line ends with another row.
    """

    canvases: tuple[Size, ...]
    side: int
    patches: int

    def views(self, width: int, height: int) -> tuple[View, ...]:
        """Returns the whole picture and the tiles."""
        canvas = self._canvas(width, height)
        wide, high = canvas
        by_width, by_height = wide / width, high / height
        if by_width < by_height:
            size = wide, min(math.ceil(height * by_width), high)
        else:
            size = min(math.ceil(width * by_height), wide), high
        pieces = Grid(high // self.side, wide // self.side)
        return View.whole((self.side, self.side)), View.centred(size, canvas, pieces)

    def order(self, width: int, height: int) -> Order:
        """Returns the rows of the whole picture, and those of the lines."""
        wide, high = (side // self.side for side in self._canvas(width, height))
        count = self.patches**2
        tiles = count * (1 + numpy.arange(high * wide)).reshape(high, 1, wide, 1)
        inside = numpy.arange(count).reshape(1, self.patches, 1, self.patches)
        lines = (tiles + inside).reshape(high * self.patches, wide * self.patches)
        rows, columns = lines.shape
        if width / height > columns / rows:
            edge = (rows - int(round(height * (columns / width), 7))) // 2
            lines = lines[edge : rows - edge]
        else:
            edge = (columns - int(round(width * (rows / height), 7))) // 2
            lines = lines[:, edge : columns - edge]
        ended = numpy.pad(lines, ((0, 0), (0, 1)), constant_values=-1)
        return numpy.concatenate((numpy.arange(count), ended.ravel()))

    def _canvas(self, width: int, height: int) -> Size:
        """Returns the canvas on which the scaled image has most pixels; of equal ones the smallest, then the first."""

        def shown_pixels(canvas: Size) -> tuple[int, int]:
            scale = min(canvas[0] / width, canvas[1] / height)
            most = min(int(width * scale) * int(height * scale), width * height)
            return most, most - canvas[0] * canvas[1]

        return max(self.canvases, key=shown_pixels)


def anyres(given: Mapping[str, Any], spec: VisionSpec) -> ImageSettings:
    """The settings of LLaVA-NeXT. Raises UnsupportedModel."""
    side = spec.table * spec.patch
    size, crop = given["size"], given.get("crop_size") or {"height": side, "width": side}
    points = given.get("image_grid_pinpoints") or USUAL
    canvases = tuple((int(wide), int(high)) for high, wide in points)
    sizes = {*size.values(), *(crop.values() if given.get("do_center_crop", True) else ())}
    if sizes != {side} or any(length % side for canvas in canvases for length in canvas):
        raise UnsupportedModel(
            f"size, crop_size and image_grid_pinpoints of the image processor are {shown(size)}, {shown(crop)} and "
            f"{shown(points)}: the encoder's {side} pixels are supported, and multiples of them"
        )
    return common_settings(given, Anyres(canvases, side, spec.table), spec.patch, spec.merge)
