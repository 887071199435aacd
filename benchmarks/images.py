"""How many images are decoded a second: `python benchmarks/images.py FOLDER [--children 1 2 4]`.

The picture is a photo-like one of 1920 x 1080 pixels as JPEG; FOLDER has a model that reads images, or its settings.
"""

import argparse
import io
import time
from pathlib import Path

import numpy
from PIL import Image

from kvern.runner.decoders import Decoders


def photo(width: int, height: int) -> bytes:
    """Returns a JPEG with soft shapes and some noise."""
    dice = numpy.random.default_rng(0)
    shapes = Image.fromarray(dice.integers(0, 256, (height // 16, width // 16, 3), dtype=numpy.uint8))
    soft = numpy.asarray(shapes.resize((width, height), Image.Resampling.BICUBIC)).astype(numpy.int64)
    noisy = (soft + dice.integers(-12, 13, soft.shape)).clip(0, 255).astype(numpy.uint8)
    stream = io.BytesIO()
    Image.fromarray(noisy).save(stream, "JPEG", quality=85)
    return stream.getvalue()


def decoded(decoders: Decoders, data: bytes, count: int) -> float:
    """Returns the seconds until so many are decoded."""
    begin = time.perf_counter()
    for number in range(count):
        decoders.begin(number, data)
    left = count
    while left:
        for _, found in decoders.finished():
            assert not isinstance(found, str), found
            left -= 1
        time.sleep(0.0005)
    return time.perf_counter() - begin


def main() -> None:
    """Prints images a second for each number of processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--children", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--images", type=int, default=60)
    arguments = parser.parse_args()
    data = photo(1920, 1080)
    for children in arguments.children:
        decoders = Decoders(arguments.folder, children)
        decoded(decoders, data, 2 * children)
        rate = arguments.images / decoded(decoders, data, arguments.images)
        print(f"{children} processes: {rate:.1f} images of 1920 x 1080 ({len(data) >> 10} KiB) a second")


if __name__ == "__main__":
    main()
