"""Decoded images on their way through an encoder of images: pixels in, one row of embeddings for each image out."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kvern.attention.bidirectional import attend_once
from kvern.device.text_batch import TextBatch
from kvern.device.transfer import upload
from kvern.images.file import ImageFile
from kvern.images.settings import ImageSettings
from kvern.images.spans import largest_image
from kvern.layers.step_context import Attend
from kvern.models.vision import CHANNELS, VisionTower


class Picture(NamedTuple):
    """A decoded image: the width and height of its file, and the bytes of its patches, as `Decoders` makes them."""

    width: int
    height: int
    pixels: memoryview


def normalized(patches: Tensor, settings: ImageSettings) -> Tensor:
    """Pixels `[P, channels * patch * patch]` of 0 to 255 as an encoder reads them."""
    colours = [*settings.mean, *settings.deviation]
    mean, deviation = upload(colours, torch.float32, patches.device).repeat_interleave(settings.patch**2).chunk(2)
    return (patches.float() * (1 / 255) - mean) / deviation


def writable(data: bytes | memoryview) -> memoryview:
    """Returns the bytes, copied only if they may not be written to, as PyTorch wants it: another rank has sent them."""
    found = memoryview(data)
    return memoryview(bytearray(found)) if found.readonly else found


def on_device(pixels: bytes | memoryview, device: torch.device) -> Tensor:
    """The bytes of patches as they come, uint8, without waiting for a GPU."""
    patches = torch.frombuffer(writable(pixels), dtype=torch.uint8)
    return patches if device.type == "cpu" else patches.pin_memory().to(device, non_blocking=True)


def attend_patches(tower: VisionTower, lengths: Sequence[int], sliced: bool = False) -> Attend:
    """An `Attend` of a tower for runs of patches."""
    return attend_once(tower.spec.attentions, tower.build, _line(lengths, tower.build.device), sliced=sliced)


def _line(lengths: Sequence[int], device: torch.device) -> TextBatch:
    """Images one behind the other, as a batch of texts is."""
    counts = torch.tensor(lengths, dtype=torch.int32, device=device)
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    starts = counts.cumsum(0, dtype=torch.int32) - counts
    return TextBatch(lengths, nothing, nothing, nothing, starts, counts, starts)


class PictureEncoder:
    """An encoder of images whose rows are embeddings."""

    def __init__(self, tower: VisionTower, settings: ImageSettings) -> None:
        self._tower = tower
        self._settings = settings

    def rows(self, pictures: Sequence[Picture]) -> Tensor:
        """The embeddings of images, float32 `[S, hidden]`; each alone if no bit may depend on the others."""
        tower, settings = self._tower, self._settings
        if tower.build.deterministic and len(pictures) > 1:
            return torch.cat([self.rows([picture]) for picture in pictures])
        files = [ImageFile(b"", picture.width, picture.height) for picture in pictures]
        grids = [grid for file in files for grid in settings.grids(file)]
        patches = torch.cat([on_device(picture.pixels, tower.build.device) for picture in pictures])
        pixels = normalized(patches.view(sum(grid.cells for grid in grids), -1), settings)
        rows: Tensor = tower(pixels, grids, partial(attend_patches, tower))
        return rows.float()

    def largest(self) -> Picture:
        """A black picture of the size with the most patches."""
        file = largest_image(self._settings)
        cells = self._settings.count(file)
        return Picture(file.width, file.height, memoryview(bytes(cells * CHANNELS * self._settings.patch**2)))

    def patches(self, picture: Picture) -> int:
        """The number of a picture's patches."""
        return len(picture.pixels) // (CHANNELS * self._settings.patch**2)
