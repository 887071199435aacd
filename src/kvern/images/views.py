"""The pictures that an encoder reads of an image, and the text around their tokens in a prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy
import numpy.typing

from kvern.images.file import Pixels, resized
from kvern.spec.vision import ImageTokens

if TYPE_CHECKING:
    from PIL.Image import Image

Size = tuple[int, int]
"""Width and height, in pixels."""
Order = numpy.typing.NDArray[numpy.int64]


class Grid(NamedTuple):
    """The pieces, patches or tokens of an image, in rows and columns."""

    rows: int
    columns: int

    @property
    def cells(self) -> int:
        """The number of patches."""
        return self.rows * self.columns


ONE = Grid(1, 1)


@dataclass(frozen=True)
class View:
    """A picture of an image.

    sizes   those to which it is resized, one after the other
    canvas  what is seen of it: a black picture on which its upper left corner lies at `corner`
    pieces  the pieces of the canvas, row by row, each of which an encoder reads by itself
    """

    sizes: tuple[Size, ...]
    canvas: Size
    corner: tuple[int, int] = (0, 0)
    pieces: Grid = ONE

    @classmethod
    def whole(cls, *sizes: Size) -> "View":
        """An image that is resized, as one piece."""
        return cls(sizes, sizes[-1])

    @classmethod
    def centred(cls, size: Size, canvas: Size, pieces: Grid = ONE) -> "View":
        """An image whose centre is that of the canvas."""
        free = [want - have for have, want in zip(size, canvas, strict=True)]
        left, top = (side // 2 if side >= 0 else -(-side // 2) for side in free)
        return cls((size,), canvas, (left, top), pieces)

    def grid(self, patch: int) -> Grid:
        """Returns the patches of each piece."""
        width, height = self.canvas
        return Grid(height // self.pieces.rows // patch, width // self.pieces.columns // patch)


class Views:
    """The pictures of one image, resized as often as it is needed."""

    def __init__(self, picture: "Image", resample: int) -> None:
        self._resample = resample
        self._known: dict[tuple[Size, ...], Image] = {(): picture}

    def _resized(self, sizes: tuple[Size, ...]) -> "Image":
        if sizes not in self._known:
            self._known[sizes] = resized(self._resized(sizes[:-1]), sizes[-1], self._resample)
        return self._known[sizes]

    def patches(self, view: View, patch: int) -> Pixels:
        """Returns the pixels of a view's patches, piece by piece and row by row: `[P, channels * patch * patch]`.

        What is left of a piece at its right and lower edge is in no patch.
        """
        picture = self._resized(view.sizes)
        if view.canvas != picture.size or view.corner != (0, 0):
            from PIL import Image

            canvas = Image.new("RGB", view.canvas)
            canvas.paste(picture, view.corner)
            picture = canvas
        pieces, grid = view.pieces, view.grid(patch)
        width, height = view.canvas
        whole = numpy.asarray(picture).reshape(
            pieces.rows, height // pieces.rows, pieces.columns, width // pieces.columns, 3
        )
        shape = (pieces.rows, grid.rows, patch, pieces.columns, grid.columns, patch, 3)
        covered = whole[:, : grid.rows * patch, :, : grid.columns * patch]
        squares = covered.reshape(shape).transpose(0, 3, 1, 4, 6, 2, 5)
        return squares.reshape(pieces.cells * grid.cells, -1)


def written(tokens: ImageTokens, views: Sequence[View], grids: Mapping[View, Grid], rows: int) -> list[str | int]:
    """Returns what stands for an image in a prompt: texts, and numbers of its tokens.

    `grids` are the tokens of a piece of each view, and `rows` those of all.
    """
    if tokens.tile is not None:
        return _tiled(tokens, views, grids)
    if tokens.row_end is None:
        return [tokens.begin, rows, tokens.end or ""]
    [grid] = (grids[view] for view in views)
    lines: list[str | int] = [part for _ in range(grid.rows) for part in (grid.columns, tokens.row_end)]
    return [tokens.begin, *lines[:-1], tokens.end or tokens.row_end]


def _tiled(tokens: ImageTokens, views: Sequence[View], grids: Mapping[View, Grid]) -> list[str | int]:
    """Returns, as `written`, tiles with the text of their place, and at last the whole picture."""
    assert tokens.tile is not None
    *tiled, whole = views
    found: list[str | int] = []
    for view in tiled:
        for row in range(view.pieces.rows):
            for column in range(view.pieces.columns):
                found += [tokens.tile.format(row=row + 1, column=column + 1), grids[view].cells]
            found.append(tokens.row_end or "")
        found.append(tokens.row_end or "")
    return [*found, tokens.begin, grids[whole].cells, tokens.end or ""]
