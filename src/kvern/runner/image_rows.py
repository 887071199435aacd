"""Rows of embeddings of the images of a batch's requests, encoded when a step first reads one."""

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy
import numpy.typing
import torch
from torch import Tensor

from kvern.attention.bidirectional import attend_once
from kvern.device.text_batch import TextBatch
from kvern.images.file import read_file
from kvern.images.settings import ImageSettings
from kvern.images.views import Grid
from kvern.layers.step_context import Attend
from kvern.models.vision import VisionTower
from kvern.request.request import PromptInput
from kvern.request.step import Fork, NewRequest, ScheduledTokens
from kvern.runner.cached_model import StepEmbeddings
from kvern.spec.vision import VisionSpec

MOST_BYTES = 256 << 20
"""The limit of rows that are kept of images which nobody reads."""
Numbers = numpy.typing.NDArray[numpy.int64]
NOTHING: Numbers = numpy.empty(0, dtype=numpy.int64)


@dataclass(frozen=True)
class RequestImages:
    """The images of a request.

    numbers    [T] of each token of the prompt the number of its row, -1: none
    files      the files, and `counts` how many rows each has
    positions  [T, 3] the axes of each token of the prompt; None: they are its place in the text
    first      the place from which on all axes of a token are its place, shifted as the rows of the batch know
    """

    numbers: Numbers
    files: Sequence[bytes]
    counts: Sequence[int]
    positions: Numbers | None
    first: int = 0

    def after(self, computed: int) -> "RequestImages | None":
        """What is left once so many tokens are computed: files only until the last token of an image is."""
        if (self.numbers[computed:] >= 0).any():
            return self
        return None if self.positions is None else RequestImages(NOTHING, (), (), self.positions, self.first)

    def turned_by(self, start: int, count: int) -> Numbers:
        """The axes `[count, 3]` of tokens of prompt and answer; those of the answer go on from the prompt's last."""
        assert self.positions is not None
        end = len(self.positions)
        known = self.positions[start : start + count]
        first = max(start, end)
        later = numpy.arange(first, start + count) - end + 1 + self.positions.max()
        return numpy.concatenate((known, numpy.repeat(later[:, None], 3, axis=1)))


class ImageRows:
    """An EmbeddingSource of images. What is known is not encoded again.

    Without a `tower`, in a pipeline stage after the first, it knows the tokens' positions alone.
    """

    def __init__(self, spec: VisionSpec, settings: ImageSettings, tower: VisionTower | None, rows: int) -> None:
        self._spec = spec
        self._settings = settings
        self._tower = tower
        self._requests: list[RequestImages | None] = [None] * rows
        self._known: OrderedDict[bytes, Tensor] = OrderedDict()
        self.encoded = 0
        """The number of images that were encoded."""

    def join(self, joined: Sequence[NewRequest]) -> None:
        """Rows of the batch have new requests."""
        for request in joined:
            prompt = request.spec.prompt
            images = self._images(prompt) if prompt.attachments else None
            computed = request.num_computed_tokens if self._tower is not None else len(prompt)
            self._requests[request.slot] = None if images is None else images.after(computed)

    def fork(self, forked: Sequence[Fork]) -> None:
        """Rows go on from others."""
        found = [self._requests[fork.source] for fork in forked]
        for fork, images in zip(forked, found, strict=True):
            self._requests[fork.slot] = images

    def _images(self, prompt: PromptInput) -> RequestImages:
        files, is_image = prompt.attachments, numpy.array(prompt.token_ids) == self._spec.image_id
        numbers = numpy.where(is_image, is_image.cumsum() - 1, -1)
        read = [read_file(data, "an image") for data in files]
        positions = axes_of(is_image, [self._settings.tokens(file) for file in read]) if self._spec.axes else None
        counts = [self._settings.count(file) for file in read]
        return RequestImages(numbers, files, counts, positions, prompt.turn[0])

    def rows(self, scheduled: Sequence[ScheduledTokens]) -> StepEmbeddings | None:
        """What images change in a step; None: nothing."""
        given = [(None, NOTHING) if self._tower is None else self._wanted(item) for item in scheduled]
        turned = self._spec.axes and any(self._is_turned(item) for item in scheduled)
        if not turned and not any(len(numbers) for _, numbers in given):
            return None
        source: list[int] = []
        parts: list[Tensor] = []
        for item, (images, numbers) in zip(scheduled, given, strict=True):
            own = itertools.count(sum(map(len, parts)))
            source += [next(own) if number >= 0 else -1 for number in numbers.tolist()]
            source += [-1] * (item.count - len(numbers))
            if images is not None and len(numbers):
                parts.append(self._rows_of(images, numbers))
        return StepEmbeddings(
            source, torch.cat(parts) if parts else None, self._positions(scheduled) if turned else None
        )

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

    def _wanted(self, item: ScheduledTokens) -> tuple[RequestImages | None, Numbers]:
        """The images of a row, and the numbers of the rows of its tokens; none if no token is an image's."""
        images = self._requests[item.slot]
        if images is not None and images.files:
            images = self._requests[item.slot] = images.after(item.start)
        if images is None or item.start >= len(images.numbers):
            return None, NOTHING
        numbers = images.numbers[item.start : item.start + item.count]
        return (images, numbers) if (numbers >= 0).any() else (None, NOTHING)

    def _rows_of(self, images: RequestImages, numbers: Numbers) -> Tensor:
        wanted = numbers[numbers >= 0]
        parts, first = [], 0
        for data, count in zip(images.files, images.counts, strict=True):
            inside = wanted[(wanted >= first) & (wanted < first + count)] - first
            if len(inside):
                parts.append(self._encoded(data)[torch.from_numpy(inside)])
            first += count
        return torch.cat(parts)

    @torch.inference_mode()
    def _encoded(self, data: bytes) -> Tensor:
        """The rows of an image."""
        tower = self._tower
        assert tower is not None, "a stage after the first reads no images"
        file = read_file(data, "an image")
        name = file.digest
        if name in self._known:
            self._known.move_to_end(name)
            return self._known[name]
        pixels = torch.from_numpy(self._settings.normalized(self._settings.patches(file)))
        rows = tower(pixels.to(tower.build.device), self._settings.grids(file), partial(_attend, tower))
        self._known[name] = tower.in_order(rows, self._settings.order(file))
        self.encoded += 1
        while len(self._known) > 1 and sum(rows.nbytes for rows in self._known.values()) > MOST_BYTES:
            self._known.popitem(last=False)
        return self._known[name]


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


def _attend(tower: VisionTower, lengths: Sequence[int]) -> Attend:
    """An `Attend` of a tower for runs of patches."""
    return attend_once(tower.spec.attentions, tower.build, _line(lengths, tower.build.device))


def _line(lengths: Sequence[int], device: torch.device) -> TextBatch:
    """Images one behind the other, as a batch of texts is."""
    counts = torch.tensor(lengths, dtype=torch.int32, device=device)
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    return TextBatch(lengths, nothing, nothing, nothing, counts.cumsum(0, dtype=torch.int32) - counts, counts)
