"""Files of images: what is read of them, what they look like, and which are refused."""

import base64
import contextlib
import io
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL import Image

from kvern.errors import InvalidRequest
from kvern.images.file import ImageFile, picture_of, read_file, resized
from kvern.images.parts import bytes_of
from kvern.images.pixtral import LongestEdge

FILTER = Image.Resampling.BICUBIC


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def pixels_of(file: ImageFile, width: int, height: int) -> Any:
    """What is decoded of a file, `[height, width, 3]`."""
    return numpy.asarray(resized(picture_of(file), (width, height), FILTER))


def shown(data: bytes) -> Any:
    """The pixels of a file as it is."""
    file = read_file(data, "x")
    return pixels_of(file, file.width, file.height)


def header(width: int, height: int) -> bytes:
    """A PNG that declares a size and has no pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_formats(kind: str) -> None:
    file = read_file(saved(Image.new("RGB", (7, 5), (250, 10, 20)), kind), "x")
    assert (file.width, file.height) == (7, 5)
    pixels = pixels_of(file, 7, 5)
    assert pixels.shape == (5, 7, 3) and abs(pixels[2, 3].astype(int) - (250, 10, 20)).max() < 12


def test_a_picture_is_turned_as_exif_says() -> None:
    image = Image.new("RGB", (4, 2), "black")
    image.putpixel((0, 0), (255, 255, 255))
    for orientation, (width, height), corner in ((3, (4, 2), (1, 3)), (6, (2, 4), (0, 1)), (8, (2, 4), (3, 0))):
        exif = Image.Exif()
        exif[0x0112] = orientation
        file = read_file(saved(image, exif=exif), "x")
        assert (file.width, file.height) == (width, height)
        assert pixels_of(file, width, height)[corner].tolist() == [255, 255, 255]


def test_what_is_transparent_lies_on_white() -> None:
    half = Image.new("RGBA", (2, 2), (0, 0, 0, 0))
    half.putpixel((0, 0), (10, 20, 30, 255))
    for image in (half, half.quantize(), Image.new("LA", (2, 2), (0, 0))):
        pixels = shown(saved(image))
        assert pixels[1, 1].tolist() == [255, 255, 255]
    assert shown(saved(half))[0, 0].tolist() == [10, 20, 30]


def test_other_modes_keep_their_colours() -> None:
    wide = numpy.array([[0, 32_896], [65_535, 257]], dtype=numpy.uint16)
    assert shown(saved(Image.fromarray(wide)))[..., 0].tolist() == [[0, 128], [255, 1]]
    assert shown(saved(Image.new("L", (2, 2), 77)))[0, 0].tolist() == [77] * 3
    assert shown(saved(Image.new("1", (2, 2), 1)))[0, 0].tolist() == [255] * 3
    red = shown(saved(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG"))[8, 8]
    assert red[0] > 200 and red[1:].max() < 60
    frames = [Image.new("RGB", (3, 3), colour) for colour in ("red", "blue")]
    assert shown(saved(frames[0], "GIF", save_all=True, append_images=frames[1:]))[0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"hello", "p: this is no image in one of the formats JPEG, PNG, WEBP, GIF"),
        (b"", "p: this is no image"),
        (b"BM" + bytes(100), "p: this is no image"),
        (header(30_000, 30_000), "p: the image has more than 50000000 pixels"),
        (header(9_000, 8_000), "p: the image has 9000 x 8000 pixels: at most 50000000"),
        (header(20_000, 200), "and 16384 on a side, are read"),
        (header(3_000, 10), "the longer side may have 200 times the shorter one"),
        (bytes(21 << 20), "p: the image has 22020096 bytes: at most 20971520 are read"),
    ],
    ids=range(8),
)
def test_files_that_are_refused(data: bytes, said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_file(data, "p")
    assert said in str(caught.value)


def test_files_that_lie_are_refused_when_they_are_decoded() -> None:
    whole = saved(Image.effect_noise((64, 64), 90).convert("RGB"), "JPEG")
    for data in (whole[: len(whole) // 2], header(40, 40)):
        file = read_file(data, "p")
        with pytest.raises(InvalidRequest, match="an image cannot be decoded"):
            pixels_of(file, file.width, file.height)


def test_every_damage_is_an_error_of_one_kind() -> None:
    generator = numpy.random.default_rng(0)
    for kind in ("PNG", "JPEG", "WEBP", "GIF"):
        whole = saved(Image.effect_noise((24, 16), 90).convert("RGB"), kind)
        for _ in range(60):
            data = bytearray(whole)
            for place in generator.integers(0, len(data), 3):
                data[place] = generator.integers(0, 256)
            cut = bytes(data[: generator.integers(1, len(data) + 1)])
            with contextlib.suppress(InvalidRequest):
                file = read_file(cut, "p")
                assert pixels_of(file, 8, 8).shape == (8, 8, 3)


def test_headers_of_many_pieces_are_not_read_to_their_end() -> None:
    jpeg, png = (saved(Image.new("RGB", (9, 9)), kind) for kind in ("JPEG", "PNG"))
    piece = b"\0\0\0\0abCd" + struct.pack(">I", zlib.crc32(b"abCd"))
    files = [(jpeg, 2, b"\xff\xfe\0\2"), (jpeg, 2, b"\xff"), (png, 33, piece)]
    for whole, place, repeated in files:
        assert read_file(whole[:place] + repeated * 100 + whole[place:], "p").width == 9
        with pytest.raises(InvalidRequest, match=r"p: this is no image .* header has more than 20000 pieces"):
            read_file(whole[:place] + repeated * 100_000 + whole[place:], "p")


def test_parts_of_all_apis(tmp_path: Path) -> None:
    data = saved(Image.new("RGB", (2, 2)))
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    (tmp_path / "a.png").write_bytes(data)
    plain = url.partition(",")[2]
    for part in (
        {"type": "image_url", "image_url": {"url": url, "detail": "high"}},
        {"type": "input_image", "image_url": url},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": plain}},
        {"type": "image", "image": data},
        {"type": "image", "image": tmp_path / "a.png"},
    ):
        assert bytes_of(part, "p") == data
    drawn = bytes_of({"type": "image", "image": Image.new("RGB", (2, 2))}, "p")
    assert read_file(drawn, "p").width == 2
    for held, said in (
        ("https://example.org/a.png", "this server opens no addresses; send a data URL"),
        ("file:///etc/passwd", "this server opens no addresses"),
        ("data:image/png;base64,%%%", "p: the image is no base64"),
        (tmp_path / "b.png", "b.png cannot be read: No such file"),
        (7, "p: the image is 7: it must be a data URL"),
        (None, "p: the image is None"),
    ):
        with pytest.raises(InvalidRequest, match=said):
            bytes_of({"type": "image", "image": held}, "p")


def test_sizes_fit_what_a_token_covers() -> None:
    resizing = LongestEdge(140, 28)
    for width, height in ((1, 1), (140, 140), (141, 3), (1000, 500), (28, 29), (16_000, 90)):
        wide, high = resizing.size(width, height)
        assert wide % 28 == high % 28 == 0 and min(wide, high) >= 28 and max(wide, high) <= 140


def test_without_pillow_images_are_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    data = saved(Image.new("RGB", (2, 2)))
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(InvalidRequest, match=r"p: images need Pillow, .*: pip install 'kvern\[images\]'"):
        read_file(data, "p")
