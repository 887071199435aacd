"""Rows of embeddings of the images of a batch's requests: encoded as steps say, and kept where they say."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy
import numpy.typing
import torch
from torch import Tensor

from kvern.cache.messages import EncodingStart, ImageMessage
from kvern.device.transfer import upload
from kvern.errors import in_a_line
from kvern.images.file import ImageFile
from kvern.images.settings import ImageSettings
from kvern.images.spans import largest_image, spans_of
from kvern.images.views import Grid
from kvern.models.vision import CHANNELS, VisionTower
from kvern.request.request import PromptInput
from kvern.request.step import Fork, NewRequest, ScheduledTokens
from kvern.runner.cached_model import StepEmbeddings
from kvern.runner.pictures import attend_patches, normalized, on_device
from kvern.spec.vision import VisionSpec

Numbers = numpy.typing.NDArray[numpy.int64]
NOTHING: Numbers = numpy.empty(0, dtype=numpy.int64)


@dataclass(frozen=True)
class RequestImages:
    """The images of a request.

    numbers    [T] of each token of the prompt the number of its row, -1: none
    keys       the names of the images, and `firsts` the number of the first row of each
    positions  [T, 3] the axes of each token of the prompt; None: they are its place in the text
    first      the place from which on all axes of a token are its place, shifted as the rows of the batch know
    """

    numbers: Numbers
    keys: Sequence[bytes]
    firsts: Numbers
    positions: Numbers | None
    first: int = 0

    def after(self, computed: int) -> "RequestImages | None":
        """Returns what is left once so many tokens are computed: images only until the last token of an image is."""
        if (self.numbers[computed:] >= 0).any():
            return self
        return None if self.positions is None else RequestImages(NOTHING, (), NOTHING, self.positions, self.first)

    def turned_by(self, start: int, count: int) -> Numbers:
        """The axes `[count, 3]` of tokens of prompt and answer; those of the answer go on from the prompt's last."""
        assert self.positions is not None
        end = len(self.positions)
        known = self.positions[start : start + count]
        first = max(start, end)
        later = numpy.arange(first, start + count) - end + 1 + self.positions.max()
        return numpy.concatenate((known, numpy.repeat(later[:, None], 3, axis=1)))


class EncodedRows(NamedTuple):
    """The encoder of images, and the pool `[places, width]` for its rows."""

    tower: VisionTower
    pool: Tensor


class ImageRows:
    """An EmbeddingSource of images. What is known is not encoded again.

    Without an encoder, in a pipeline stage after the first, it knows the tokens' positions alone.
    """

    def __init__(self, spec: VisionSpec, settings: ImageSettings, encoded: EncodedRows | None, rows: int) -> None:
        self._spec = spec
        self._settings = settings
        self._encoder = encoded
        self._requests: list[RequestImages | None] = [None] * rows
        self._encoding: dict[int, tuple[EncodingStart, Iterator[Tensor | None]]] = {}
        """The images that are begun, by number, each with its rows after a `None` for each part before the last."""
        self._names: dict[int, bytes] = {}
        self._places: dict[bytes, Numbers] = {}
        """The places of the rows of encoded images."""
        self.encoded = 0
        """The number of images that were encoded."""

    # Encoding

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Compute the first layer over the largest image. Raises torch.OutOfMemoryError."""
        if self._encoder is None:
            return
        tower = self._encoder.tower
        grids = self._settings.grids(largest_image(self._settings))
        shape = sum(grid.cells for grid in grids), CHANNELS * self._settings.patch**2
        patches = torch.zeros(shape, dtype=torch.uint8, device=tower.build.device)
        parts = tower.by_parts(normalized(patches, self._settings), grids, partial(attend_patches, tower))
        for _ in range(2):  # keys and values of all patches, and a slice of what they make, if it has slices
            next(parts)

    def prepare(self, message: ImageMessage) -> list[tuple[int, str]]:
        """Encode as a step says; returns the numbers of those that have ended, and what went wrong with each."""
        if self._encoder is None:
            return [(number, "") for number in message.ended]
        failed: dict[int, str] = {}
        for number in message.dropped:
            self._encoding.pop(number, None)
            self._places.pop(self._names.pop(number, b""), None)
        for start in message.begun:
            self._names[start.number] = start.key
            self._encoding[start.number] = start, self._parts(start, self._encoder.tower)
        for number, count in message.parts:
            try:
                self._compute(number, count)
            except Exception as error:  # such as too little memory
                self._encoding.pop(number, None)
                failed[number] = f"an image cannot be encoded: {in_a_line(error)}"
        return [(number, failed.get(number, "")) for number in {**dict.fromkeys(message.ended), **failed}]

    @torch.inference_mode()
    def _compute(self, number: int, count: int) -> None:
        """Compute some parts of an image; after the last its rows are written."""
        if number not in self._encoding:
            return  # it has failed
        start, parts = self._encoding[number]
        for _ in range(count):
            rows = next(parts)
        if rows is not None:
            assert self._encoder is not None
            places = numpy.array(start.places)
            self._encoder.pool[upload(start.places, torch.int64, rows.device)] = rows
            self._places[start.key] = places
            del self._encoding[number]
            self.encoded += 1

    def _parts(self, start: EncodingStart, tower: VisionTower) -> Iterator[Tensor | None]:
        file, settings = ImageFile(b"", *start.size), self._settings
        grids = settings.grids(file)
        patches = on_device(start.pixels, tower.build.device).view(sum(grid.cells for grid in grids), -1)
        for rows in tower.by_parts(normalized(patches, settings), grids, partial(attend_patches, tower)):
            yield None if rows is None else tower.in_order(rows, settings.order(file))

    def abandon(self) -> None:
        """Forget what is begun: the steps that were to go on with it have failed."""
        self._encoding.clear()

    # Rows of the batch

    def join(self, joined: Sequence[NewRequest]) -> None:
        """Rows of the batch have new requests."""
        for request in joined:
            prompt = request.spec.prompt
            images = self._images(prompt) if prompt.attachments else None
            computed = request.num_computed_tokens if self._encoder is not None else len(prompt)
            self._requests[request.slot] = None if images is None else images.after(computed)

    def fork(self, forked: Sequence[Fork]) -> None:
        """Rows go on from others."""
        found = [self._requests[fork.source] for fork in forked]
        for fork, images in zip(forked, found, strict=True):
            self._requests[fork.slot] = images

    def _images(self, prompt: PromptInput) -> RequestImages:
        is_image = numpy.array(prompt.token_ids) == self._spec.image_id
        numbers = numpy.where(is_image, is_image.cumsum() - 1, -1)
        spans = spans_of(prompt, self._settings, self._spec.image_id)
        positions = axes_of(is_image, [self._settings.tokens(span.file) for span in spans]) if self._spec.axes else None
        firsts = numpy.cumsum([0, *(span.rows for span in spans[:-1])])
        return RequestImages(numbers, [span.key for span in spans], firsts, positions, prompt.turn[0])

    def rows(self, scheduled: Sequence[ScheduledTokens]) -> StepEmbeddings | None:
        """The changes of a step by images; None: there are none."""
        if all(self._requests[item.slot] is None for item in scheduled):
            return None
        given = [self._places_of(item) for item in scheduled]
        places = numpy.concatenate(given)
        found = places >= 0
        is_turned = self._spec.axes and any(self._is_turned(item) for item in scheduled)
        if not is_turned and not found.any():
            return None
        rows = None
        if self._encoder is not None and found.any():
            pool = self._encoder.pool
            rows = pool.index_select(0, upload(places[found].tolist(), torch.int64, pool.device))
        source = numpy.where(found, found.cumsum() - 1, -1).tolist()
        return StepEmbeddings(source, rows, self._positions(scheduled) if is_turned else None)

    def _is_turned(self, item: ScheduledTokens) -> bool:
        """Returns whether tokens of a row have axes of their own, which the rows of the batch do not know."""
        images = self._requests[item.slot]
        return images is not None and item.start < images.first

    def _positions(self, scheduled: Sequence[ScheduledTokens]) -> Tensor:
        """The axes of the tokens of a step, `[T, 3]`."""
        found = []
        for item in scheduled:
            images = self._requests[item.slot]
            plain = numpy.arange(item.start, item.start + item.count)[:, None].repeat(3, axis=1)
            found.append(plain if images is None else images.turned_by(item.start, item.count))
        return torch.from_numpy(numpy.concatenate(found))

    def _places_of(self, item: ScheduledTokens) -> Numbers:
        """For each token of `item` the place of its image's row in the pool, `[count]`; -1: it is no image's."""
        found = numpy.full(item.count, -1)
        images = self._requests[item.slot]
        if images is not None and images.keys:
            images = self._requests[item.slot] = images.after(item.start)
        if images is None or item.start >= len(images.numbers):
            return found
        numbers = images.numbers[item.start : item.start + item.count]
        (tokens,) = numpy.nonzero(numbers >= 0)
        which = numpy.searchsorted(images.firsts, numbers[tokens], side="right") - 1
        for image in numpy.unique(which):
            own = tokens[which == image]
            found[own] = self._places[images.keys[image]][numbers[own] - images.firsts[image]]
        return found


def axes_of(is_image: "numpy.typing.NDArray[numpy.bool_]", grids: Sequence[Grid]) -> Numbers:
    """The positions `[T, 3]` of the tokens of a prompt by time, height and width.

    An image has one time, and counts as many positions as its longer side.
    """
    found = []
    left = iter(grids)
    place = position = 0
    while place < len(is_image):
        if is_image[place]:
            rows, columns = next(left)
            high, wide = numpy.divmod(numpy.arange(rows * columns), columns)
            found.append(position + numpy.stack((numpy.zeros_like(high), high, wide), 1))
            place, position = place + rows * columns, position + max(rows, columns)
        else:
            later = numpy.flatnonzero(is_image[place:])
            count = int(later[0]) if len(later) else len(is_image) - place
            found.append(position + numpy.arange(count)[:, None].repeat(3, axis=1))
            place, position = place + count, position + count
    return numpy.concatenate(found)
