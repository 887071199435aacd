"""The tiles of images for InternVL, and the whole picture beside them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvern.errors import UnsupportedModel, shown
from kvern.images.settings import ImageSettings, Resizing, common_settings
from kvern.images.views import Grid, View
from kvern.spec.vision import VisionSpec


@dataclass(frozen=True)
class BestShape(Resizing):
    """From `least` to `most` tiles of `side` pixels, in rows and columns whose shape is nearest to the image's.

    Of shapes equally near the later one in the order of their sizes is taken while the image has more than half of its
    pixels.
    """

    side: int
    least: int
    most: int

    def views(self, width: int, height: int) -> tuple[View, ...]:
        """Returns the tiles, and the whole picture unless there is only one."""
        whole = View.whole((self.side, self.side))
        pieces = self._pieces(width, height)
        if pieces.cells == 1:
            return (whole,)
        size = self.side * pieces.columns, self.side * pieces.rows
        return View((size,), size, pieces=pieces), whole

    def _pieces(self, width: int, height: int) -> Grid:
        side, ratio = range(1, self.most + 1), width / height
        shapes = [Grid(rows, columns) for columns in side for rows in side if self.least <= rows * columns <= self.most]
        best, nearest = Grid(1, 1), float("inf")
        for shape in sorted(shapes, key=lambda shape: shape.cells):
            distance = abs(ratio - shape.columns / shape.rows)
            if distance < nearest or (
                distance == nearest and width * height > 0.5 * self.side * self.side * shape.columns * shape.rows
            ):
                best, nearest = shape, distance
        return best


def internvl(given: Mapping[str, Any], spec: VisionSpec) -> ImageSettings:
    """The settings of InternVL. Raises UnsupportedModel."""
    side, size = spec.table * spec.patch, given["size"]
    if size not in ({"height": side, "width": side}, side):
        raise UnsupportedModel(f"size of the image processor is {shown(size)}: the encoder's {side} is supported")
    return common_settings(given, _shapes(given, spec), spec.patch, spec.merge)


def _shapes(given: Mapping[str, Any], spec: VisionSpec) -> Resizing:
    """Tiles as the settings say: transformers' processor of this model cuts them unless a caller forbids it."""
    least, most = int(given.get("min_patches", 1)), int(given.get("max_patches", 12))
    return BestShape(spec.table * spec.patch, least, most)
