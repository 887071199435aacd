"""What decides the pixels of images: sizes, filters and colours, by the settings in a model's folder."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy
import numpy.typing

from kvern.errors import UnsupportedModel
from kvern.images.file import ImageFile, Pixels, pixels_of
from kvern.io.files import read_object
from kvern.plugins import imported
from kvern.spec.vision import VisionSpec

BICUBIC = 3
"""Pillow's number of the filter."""


class Grid(NamedTuple):
    """The patches or tokens of an image, in rows and columns."""

    rows: int
    columns: int

    @property
    def cells(self) -> int:
        """The number of patches."""
        return self.rows * self.columns


class Resizing(Protocol):
    """The size that a family gives an image."""

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Returns the width and height, in pixels, multiples of what one token covers."""
        ...


@dataclass(frozen=True)
class ImageSettings:
    """What decides the pixels of an image: its size, the filter, and the `mean` and `deviation` of each channel.

    `patch`: pixels on the side of a patch; `merge`: patches on the side of what becomes one token.
    """

    resizing: Resizing
    patch: int
    merge: int
    mean: tuple[float, float, float]
    deviation: tuple[float, float, float]
    resample: int = BICUBIC

    def size(self, file: ImageFile) -> tuple[int, int]:
        """Returns the width and height of the resized image."""
        return self.resizing.size(file.width, file.height)

    def grid(self, file: ImageFile) -> Grid:
        """Returns the patches of an image."""
        width, height = self.size(file)
        return Grid(height // self.patch, width // self.patch)

    def tokens(self, file: ImageFile) -> Grid:
        """Returns the rows and columns of an image's tokens that have rows of embeddings."""
        grid = self.grid(file)
        return Grid(grid.rows // self.merge, grid.columns // self.merge)

    @property
    def digest(self) -> bytes:
        """The name of these settings, 8 bytes."""
        return hashlib.blake2b(repr(self).encode(), digest_size=8).digest()

    def patches(self, file: ImageFile) -> Pixels:
        """Returns the pixels of an image's patches, row by row: `[P, channels * patch * patch]`. Raises
        InvalidRequest."""
        grid, patch = self.grid(file), self.patch
        shown = pixels_of(file, *self.size(file), self.resample)
        squares = shown.reshape(grid.rows, patch, grid.columns, patch, 3)
        return squares.transpose(0, 2, 4, 1, 3).reshape(grid.cells, -1)

    def normalized(self, patches: Pixels) -> numpy.typing.NDArray[numpy.float32]:
        """Returns patches as an encoder reads them."""
        mean, deviation = (
            numpy.repeat(numpy.array(each, numpy.float32), self.patch**2) for each in (self.mean, self.deviation)
        )
        scaled = patches.astype(numpy.float32) * numpy.float32(1 / 255)
        return (scaled - mean) / deviation


def read_processor(folder: Path) -> Mapping[str, Any]:
    """Returns the settings of a folder's image processor. Raises UnsupportedModel."""
    for name in ("processor_config.json", "preprocessor_config.json"):
        try:
            found = read_object(folder / name)
        except FileNotFoundError:
            continue
        given = found.get("image_processor", found)
        if isinstance(given, Mapping) and "size" in given:
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
