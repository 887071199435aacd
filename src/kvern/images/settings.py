"""The settings that decide the pixels of images: sizes, filters and colours, by the settings in a model's folder."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from kvern.errors import UnsupportedModel
from kvern.images.file import ImageFile, Pixels, picture_of
from kvern.images.views import Grid, Order, Size, View, Views, written
from kvern.io.files import read_object
from kvern.plugins import imported
from kvern.spec.vision import ImageTokens, VisionSpec

SIZES = {"size", "max_pixels", "max_soft_tokens", "in_patch_limit", "max_num_patches"}
"""Settings of image processors that say how large images are, of which one is there."""
BICUBIC = 3
"""Pillow's number of the filter."""


class Resizing:
    """A base of a family's way to resize: it overrides `size` for one picture, or `views` for tiles or crops."""

    def size(self, width: int, height: int) -> Size:
        """Returns the size of the picture, in multiples of what one token covers."""
        raise NotImplementedError

    def views(self, width: int, height: int) -> tuple[View, ...]:
        """Returns the pictures that the encoder reads."""
        return (View.whole(self.size(width, height)),)

    def order(self, width: int, height: int) -> Order | None:
        """Returns for each token of an image the number of its row, of those that the encoder makes of the views.

        -1: the row that ends lines. None: tokens and rows are the same.
        """
        return None


@dataclass(frozen=True)
class ImageSettings:
    """The settings of an image's pixels: its size, the filter, and the `mean` and `deviation` of each channel.

    `patch`: pixels on the side of a patch; `merge`: patches on the side of what becomes one token.
    """

    resizing: Resizing
    patch: int
    merge: int
    mean: tuple[float, float, float]
    deviation: tuple[float, float, float]
    resample: int = BICUBIC

    def grids(self, file: ImageFile) -> list[Grid]:
        """Returns the patches of the pieces of an image that the encoder reads."""
        views = self.resizing.views(file.width, file.height)
        return [view.grid(self.patch) for view in views for _ in range(view.pieces.cells)]

    def tokens(self, file: ImageFile) -> Grid:
        """Returns the rows and columns of the tokens that have rows of embeddings, of an image's first piece."""
        return self._merged(self.grids(file)[0])

    def count(self, file: ImageFile) -> int:
        """Returns the number of an image's tokens that have rows of embeddings."""
        order = self.order(file)
        return sum(self._merged(grid).cells for grid in self.grids(file)) if order is None else len(order)

    def order(self, file: ImageFile) -> Order | None:
        """Returns for each of these tokens the number of its row of the encoder; see `Resizing.order`."""
        return self.resizing.order(file.width, file.height)

    def written(self, file: ImageFile, tokens: ImageTokens) -> list[str | int]:
        """Returns what stands for an image in a prompt: texts, and numbers of tokens with rows of embeddings."""
        views = self.resizing.views(file.width, file.height)
        grids = {view: self._merged(view.grid(self.patch)) for view in views}
        return written(tokens, views, grids, self.count(file))

    def _merged(self, grid: Grid) -> Grid:
        return Grid(grid.rows // self.merge, grid.columns // self.merge)

    @property
    def digest(self) -> bytes:
        """The name of these settings, 8 bytes."""
        return hashlib.blake2b(repr(self).encode(), digest_size=8).digest()

    def patches(self, file: ImageFile) -> Pixels:
        """Returns the pixels of the patches of all pieces of an image: `[P, channels * patch * patch]`.

        Raises InvalidRequest.
        """
        views = Views(picture_of(file), self.resample)
        found = [views.patches(view, self.patch) for view in self.resizing.views(file.width, file.height)]
        return numpy.concatenate(found)


def read_processor(folder: Path) -> Mapping[str, Any]:
    """Returns the settings of a folder's image processor. Raises UnsupportedModel."""
    for name in ("processor_config.json", "preprocessor_config.json"):
        try:
            found = read_object(folder / name)
        except FileNotFoundError:
            continue
        given = found.get("image_processor", found.get("media_proc_cfg", found))
        if isinstance(given, Mapping) and given.keys() & SIZES:
            return given
    raise UnsupportedModel(f"{folder} has no preprocessor_config.json with the size of images: download it again")


def settings_of(folder: Path, spec: VisionSpec) -> ImageSettings:
    """Returns the settings of the model in a folder. Raises UnsupportedModel."""
    found: ImageSettings = imported(spec.settings)(read_processor(folder), spec)
    return found


def common_settings(given: Mapping[str, Any], resizing: Resizing, patch: int, merge: int) -> ImageSettings:
    """Returns the settings with the colours and the filter that a processor has under the usual names."""
    mean, deviation = (_colours(given[name]) for name in ("image_mean", "image_std"))
    return ImageSettings(resizing, patch, merge, mean, deviation, int(given.get("resample", BICUBIC)))


def _colours(given: Sequence[float]) -> tuple[float, float, float]:
    red, green, blue = map(float, given)
    return red, green, blue
