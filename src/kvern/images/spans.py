"""The images of a prompt, as the engine follows them: which tokens have rows of which image."""

import itertools
from typing import NamedTuple

from kvern.images.file import ImageFile, read_file
from kvern.images.limits import LONGEST_SIDE, MOST_PIXELS
from kvern.images.settings import ImageSettings
from kvern.images.views import Grid
from kvern.request.request import PromptInput

LEAST_PLACES = 16_384
"""Rows of images that an engine keeps, if one image has no more."""
SHAPES = [(int(MOST_PIXELS**0.5), int(MOST_PIXELS**0.5)), (LONGEST_SIDE, MOST_PIXELS // LONGEST_SIDE)]
SHAPES += [(11_000, 4_500), (9_000, 5_500), (LONGEST_SIDE, 1_000), (4_000, 4_000), (2_000, 2_000), (1_000, 1_000)]
"""Widths and heights among which are those of the images with the most tokens."""


class ImageSpan(NamedTuple):
    """An image of a prompt: its name, the first token with a row of it and the one after the last, and its `rows`."""

    key: bytes
    start: int
    end: int
    rows: int
    grids: list[Grid]
    file: ImageFile


def spans_of(prompt: PromptInput, settings: ImageSettings, image_id: int) -> list[ImageSpan]:
    """Returns the images of a prompt that `ImageReader.checked` has seen. Raises InvalidRequest."""
    places = [place for place, token in enumerate(prompt.token_ids) if token == image_id]
    files = [read_file(data, f"attachment {number}") for number, data in enumerate(prompt.attachments)]
    counts = [settings.count(file) for file in files]
    firsts = [0, *itertools.accumulate(counts)]
    keys = dict(prompt.block_keys)
    return [
        ImageSpan(keys[places[first]], places[first], places[first + count - 1] + 1, count, settings.grids(file), file)
        for file, first, count in zip(files, firsts, counts, strict=False)
    ]


def places_for(settings: ImageSettings, whole_prompt: int = 0) -> int:
    """Returns how many rows of images an engine keeps: at least those of the largest image.

    `whole_prompt`: the most tokens of a prompt if it is computed in one step; all its images must be there then.
    """
    return max(LEAST_PLACES, settings.count(largest_image(settings)), whole_prompt)


def largest_image(settings: ImageSettings) -> ImageFile:
    """Returns an image, without its data, of the size that has the most rows."""
    turned = [*SHAPES, *((height, width) for width, height in SHAPES)]
    return max((ImageFile(b"", width, height) for width, height in turned), key=settings.count)
