"""Rows of embeddings of the images of a batch's requests, encoded when a step first reads one."""

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy
import numpy.typing
import torch
from torch import Tensor

from kvern.attention.bidirectional import TorchAttend
from kvern.device.text_batch import TextBatch
from kvern.images.file import read_file
from kvern.images.settings import ImageSettings
from kvern.models.vision import VisionTower
from kvern.request.step import Fork, NewRequest, ScheduledTokens
from kvern.runner.cached_model import StepEmbeddings

MOST_BYTES = 256 << 20
"""The limit of rows that are kept of images which nobody reads."""


NOTHING = numpy.empty(0, dtype=numpy.int64)


@dataclass(frozen=True)
class RequestImages:
    """The images of a request: for each position of its prompt the number of its row, -1: none, and the files."""

    numbers: numpy.typing.NDArray[numpy.int64]
    files: Sequence[bytes]
    counts: Sequence[int]


class ImageRows:
    """An EmbeddingSource of images. What is known is not encoded again."""

    def __init__(self, tower: VisionTower, settings: ImageSettings, rows: int) -> None:
        self._tower, self._settings = tower, settings
        self._requests: list[RequestImages | None] = [None] * rows
        self._known: OrderedDict[bytes, Tensor] = OrderedDict()
        self.encoded = 0
        """The number of images that were encoded."""

    def join(self, joined: Sequence[NewRequest]) -> None:
        """Rows of the batch have new requests."""
        for request in joined:
            prompt = request.spec.prompt
            found = self._images(prompt.token_ids, prompt.attachments) if prompt.attachments else None
            self._requests[request.slot] = found

    def fork(self, forked: Sequence[Fork]) -> None:
        """Rows go on from others."""
        found = [self._requests[fork.source] for fork in forked]
        for fork, images in zip(forked, found, strict=True):
            self._requests[fork.slot] = images

    def _images(self, token_ids: Sequence[int], files: Sequence[bytes]) -> RequestImages:
        is_image = numpy.array(token_ids) == self._tower.vision.image_id
        numbers = numpy.where(is_image, is_image.cumsum() - 1, -1)
        counts = [self._settings.tokens(read_file(data, "an image")).cells for data in files]
        return RequestImages(numbers, files, counts)

    def rows(self, scheduled: Sequence[ScheduledTokens]) -> StepEmbeddings | None:
        """The rows for a step; None: none of its tokens is an image's."""
        given = [self._wanted(item) for item in scheduled]
        if not any(len(numbers) for _, numbers in given):
            return None
        source: list[int] = []
        parts: list[Tensor] = []
        for item, (images, numbers) in zip(scheduled, given, strict=True):
            own = itertools.count(sum(map(len, parts)))
            source += [next(own) if number >= 0 else -1 for number in numbers.tolist()]
            source += [-1] * (item.count - len(numbers))
            if images is not None and len(numbers):
                parts.append(self._rows_of(images, numbers))
        return StepEmbeddings(source, torch.cat(parts))

    def _wanted(self, item: ScheduledTokens) -> tuple[RequestImages | None, numpy.typing.NDArray[numpy.int64]]:
        """The images of a row, and the numbers of the rows of its tokens; none if no token is an image's."""
        images = self._requests[item.slot]
        if images is None or item.start >= len(images.numbers):
            return None, NOTHING
        numbers = images.numbers[item.start : item.start + item.count]
        return (images, numbers) if (numbers >= 0).any() else (None, NOTHING)

    def _rows_of(self, images: RequestImages, numbers: numpy.typing.NDArray[numpy.int64]) -> Tensor:
        wanted = numbers[numbers >= 0]
        parts, first = [], 0
        for data, count in zip(images.files, images.counts, strict=True):
            inside = wanted[(wanted >= first) & (wanted < first + count)] - first
            if len(inside):
                parts.append(self._encoded(data)[torch.from_numpy(inside).to(self._tower.build.device)])
            first += count
        return torch.cat(parts)

    @torch.inference_mode()
    def _encoded(self, data: bytes) -> Tensor:
        """The rows of an image."""
        name = blake2b(data, digest_size=16).digest()
        if name in self._known:
            self._known.move_to_end(name)
            return self._known[name]
        file = read_file(data, "an image")
        pixels = torch.from_numpy(self._settings.normalized(self._settings.patches(file)))
        grid = self._settings.grid(file)
        attend = TorchAttend(self._tower.spec.attentions, _line([grid.cells], self._tower.build.device))
        self._known[name] = self._tower(pixels.to(self._tower.build.device), [grid], attend)
        self.encoded += 1
        while len(self._known) > 1 and sum(rows.nbytes for rows in self._known.values()) > MOST_BYTES:
            self._known.popitem(last=False)
        return self._known[name]


def _line(lengths: Sequence[int], device: torch.device) -> TextBatch:
    """Images one behind the other, as a batch of texts is."""
    counts = torch.tensor(lengths, dtype=torch.int32, device=device)
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    return TextBatch(lengths, nothing, nothing, nothing, counts.cumsum(0, dtype=torch.int32) - counts, counts)
