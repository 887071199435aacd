"""Files of images: their size by the header alone, and their pixels.

Formats are JPEG, PNG, WebP and GIF, of which the first frame counts. EXIF's orientation is applied, transparent pixels
lie on white, and 16-bit grey keeps its range. In low detail families choose sizes and tokens as if the picture had at
most `LOW_SIDE` pixels on a side.
"""

import contextlib
import hashlib
import io
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy
import numpy.typing

from kvern.errors import InvalidRequest
from kvern.images.limits import FORMATS, LARGEST_FILE, LONGEST_SIDE, LOW, LOW_SIDE, MOST_PIXELS, MOST_RATIO, MOST_READS

if TYPE_CHECKING:
    from PIL.Image import Image

TURNS: Mapping[object, str] = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
"""The operations that turn a picture upright, by EXIF's orientation, under Pillow's names."""
TURNED = (5, 6, 7, 8)
"""The orientations with which width and height change places."""
ORIENTATION = 0x0112
GREY_16 = ("I;16", "I;16B", "I;16L", "I;16N", "I")
Pixels = numpy.typing.NDArray[numpy.uint8]


@dataclass(frozen=True)
class ImageFile:
    """A file whose header is right.

    `width` and `height` are those of the picture as it is shown, or less in low detail.
    """

    data: bytes
    width: int
    height: int

    @property
    def digest(self) -> bytes:
        """The name of the file's content, 16 bytes."""
        return hashlib.blake2b(self.data, digest_size=16).digest()


def read_file(data: bytes, place: str) -> ImageFile:
    """Reads the header of a file; `place` is the part's in error messages. Raises InvalidRequest."""
    if len(data) > LARGEST_FILE:
        raise InvalidRequest(
            f"{place}: the image has {len(data)} bytes: at most {LARGEST_FILE} are read; make it smaller"
        )
    image = _opened(data, place)
    width, height = image.size
    if _orientation(image) in TURNED:
        width, height = height, width
    said = f"{place}: the image has {width} x {height} pixels"
    if width * height > MOST_PIXELS or max(width, height) > LONGEST_SIDE:
        raise InvalidRequest(f"{said}: at most {MOST_PIXELS}, and {LONGEST_SIDE} on a side, are read; make it smaller")
    if max(width, height) > MOST_RATIO * min(width, height):
        raise InvalidRequest(f"{said}: the longer side may have {MOST_RATIO} times the shorter one; cut it into parts")
    if data.startswith(LOW):
        less = max(1.0, max(width, height) / LOW_SIDE)
        width, height = max(1, round(width / less)), max(1, round(height / less))
    return ImageFile(data, width, height)


def picture_of(file: ImageFile) -> "Image":
    """Decodes a file: a picture in RGB, upright. Raises InvalidRequest."""
    from PIL import Image

    image = _opened(file.data, "an image")
    turn = TURNS.get(_orientation(image))
    try:
        image = _on_white(image)
    except (OSError, SyntaxError, ValueError, MemoryError) as error:
        raise InvalidRequest(f"an image cannot be decoded: {' '.join(str(error).split())[:200]}") from None
    return image if turn is None else image.transpose(Image.Transpose[turn])


def resized(picture: "Image", size: tuple[int, int], resample: int) -> "Image":
    """The picture in a width and height, by one of Pillow's filters."""
    from PIL import Image

    return picture if picture.size == size else picture.resize(size, Image.Resampling(resample))


class _Header(io.BytesIO):
    """A file of which `left` pieces may be read; None: as many as there are."""

    left: int | None = MOST_READS

    def read(self, size: int | None = -1, /) -> bytes:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise ValueError(f"its header has more than {MOST_READS} pieces")
        return super().read(size)


def _opened(data: bytes, place: str) -> "Image":
    """The file, of which the header has been read. Raises InvalidRequest."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise InvalidRequest(f"{place}: images need Pillow, an optional package: pip install 'kvern[images]'") from None
    try:
        with warnings.catch_warnings():  # of sizes, which are checked afterwards
            warnings.simplefilter("ignore")
            stream = _Header(data.removeprefix(LOW))
            image = Image.open(stream, formats=FORMATS)
            stream.left = None
            return image
    except Image.DecompressionBombError:
        raise InvalidRequest(f"{place}: the image has more than {MOST_PIXELS} pixels: make it smaller") from None
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
        reason = "" if isinstance(error, UnidentifiedImageError) else f" ({' '.join(str(error).split())[:100]})"
        raise InvalidRequest(f"{place}: this is no image in one of the formats {', '.join(FORMATS)}{reason}") from None


def _orientation(image: "Image") -> object:
    """EXIF's orientation, as far as it stands before the pixels: Pillow would decode a PNG to look behind them."""
    from PIL.Image import Exif

    found = Exif()
    with contextlib.suppress(Exception), warnings.catch_warnings():  # of whatever the file has there
        warnings.simplefilter("ignore")
        found.load(image.info.get("exif") or b"")
    return found.get(ORIENTATION)


def _on_white(image: "Image") -> "Image":
    """The picture in RGB, as a viewer shows it before a white page."""
    from PIL import Image

    if image.mode in GREY_16:
        wide = numpy.asarray(image).astype(numpy.int64)
        return Image.fromarray((wide.clip(0, 65_535) // 257).astype(numpy.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        seen = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", seen.size, "white"), seen).convert("RGB")
    return image.convert("RGB")
