"""Files of images that no client should send: flipped, cut, with headers that lie and chunks that swell."""

import base64
import functools
import io
import json
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from tests.support.fuzz_requests import Probe
from tests.support.served import KEY, Served
from tests.support.vision_models import picture

CHAT = "/v1/chat/completions"
SIZES = (0, 1, 2, 7, 199, 16_384, 16_385, 30_000, 65_535, 2**31 - 1, 2**32 - 1)
FORMS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("JPEG", "RGB", {"quality": 80}),
    ("JPEG", "L", {"progressive": True}),
    ("JPEG", "CMYK", {}),
    ("PNG", "RGB", {}),
    ("PNG", "RGBA", {}),
    ("PNG", "P", {}),
    ("PNG", "I;16", {}),
    ("PNG", "1", {}),
    ("WEBP", "RGB", {"quality": 50}),
    ("WEBP", "RGBA", {"lossless": True}),
    ("GIF", "P", {}),
)


def plain_question(server: Served) -> str:
    """What a right picture is answered with."""
    data = json.loads(probe(whole(FORMS[3])).body) | {"max_tokens": 8, "temperature": 0}
    status, _, answer = server.raw("POST", CHAT, json.dumps(data).encode(), KEY)
    assert status == 200, answer
    return json.dumps([answer["choices"], answer["usage"]["prompt_tokens"]])


def whole(form: tuple[str, str, dict[str, Any]], width: int = 61, height: int = 47) -> bytes:
    """A right file."""
    name, mode, options = form
    image = picture(width, height)
    image = image.convert("L").convert("I").convert("I;16") if mode == "I;16" else image.convert(mode)
    stream = io.BytesIO()
    image.save(stream, name, **options)
    return stream.getvalue()


@functools.cache
def whole_files() -> tuple[bytes, ...]:
    """A file of each form, and an animation."""
    frames = [picture(20, 20, seed).convert("P") for seed in range(3)]
    stream = io.BytesIO()
    frames[0].save(stream, "GIF", save_all=True, append_images=frames[1:])
    return (*map(whole, FORMS), stream.getvalue())


def chunk(name: bytes, data: bytes) -> bytes:
    """A chunk of a PNG, with its checksum."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, *chunks: bytes, depth: int = 8, colour: int = 2) -> bytes:
    """A PNG of these chunks whose header says what it wants."""
    header = struct.pack(">IIBBBBB", width & 0xFFFFFFFF, height & 0xFFFFFFFF, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + b"".join(chunks) + chunk(b"IEND", b"")


@functools.cache
def swollen(size: int) -> bytes:
    """Zeros, compressed."""
    return zlib.compress(bytes(size), 9)


def sized(data: bytes, width: int, height: int) -> bytes:
    """The file with another size in its header."""
    if data.startswith(b"\x89PNG"):
        header = struct.pack(">II", width & 0xFFFFFFFF, height & 0xFFFFFFFF) + data[24:29]
        return data[:8] + chunk(b"IHDR", header) + data[33:]
    if data.startswith(b"GIF"):
        return data[:6] + struct.pack("<HH", width & 0xFFFF, height & 0xFFFF) + data[10:]
    if data.startswith(b"RIFF"):
        return data[:24] + struct.pack("<II", width & 0xFFFFFF, height & 0xFFFFFF) + data[32:]
    found = max(data.find(b"\xff\xc0"), data.find(b"\xff\xc2"))
    return data[: found + 5] + struct.pack(">HH", height & 0xFFFF, width & 0xFFFF) + data[found + 9 :]


def bombs() -> Iterator[bytes]:
    """Small files that ask for much."""
    pixels = chunk(b"IDAT", zlib.compress(bytes(47 * (61 * 3 + 1))))
    text = b"comment\0\0" + swollen(64 << 20)
    profile = b"profile\0\0" + swollen(64 << 20)
    international = b"comment\0\1\0en\0\0" + swollen(64 << 20)
    yield png(30_000, 30_000, chunk(b"IDAT", swollen(64 << 20)))
    yield png(7000, 7000, chunk(b"IDAT", swollen(7000 * 21_001)))  # right, and as large as is allowed
    yield png(16_384, 100, chunk(b"IDAT", swollen(1 << 20)))
    for name, data in ((b"zTXt", text), (b"iCCP", profile), (b"iTXt", international)):
        yield png(61, 47, chunk(name, data), pixels)
        yield png(61, 47, *[chunk(name, data)] * 20, pixels)
        yield png(61, 47, pixels, chunk(name, data))
    yield png(61, 47, chunk(b"eXIf", b"MM\0*\0\0\0\x08" + b"\xff" * 65_000), pixels)
    yield png(61, 47, chunk(b"eXIf", loop()), pixels)
    yield png(61, 47, *[chunk(b"tEXt", b"a\0" + bytes(1000))] * 5000, pixels)
    yield png(61, 47, chunk(b"acTL", struct.pack(">II", 2**31 - 1, 0)), pixels)
    jpeg, gif = whole(FORMS[0]), whole(FORMS[-1])
    yield (
        jpeg[:2]
        + b"".join(b"\xff\xe2\xff\xffICC_PROFILE\0" + bytes((n, 255)) + bytes(65_519) for n in range(1, 100))
        + jpeg[2:]
    )
    yield jpeg[:2] + b"\xff\xe1\xff\xffExif\0\0" + loop().ljust(65_527, b"\0") + jpeg[2:]
    yield jpeg[:2] + b"\xff\xfe\0\2" * 200_000 + jpeg[2:]
    yield gif[:-1] * 1000
    yield whole(FORMS[8])[:12] + b"EXIF\xff\xff\xff\x7f" + bytes(1000)


def loop() -> bytes:
    """EXIF whose directory is its own next one."""
    entry = struct.pack(">HHII", 0x8769, 4, 1, 8)
    return b"MM\0*\0\0\0\x08" + struct.pack(">H", 1) + entry + struct.pack(">I", 8)


def damaged(generator: random.Random) -> bytes:
    """A right file, and something done to it."""
    data = generator.choice(whole_files())
    ways: list[Callable[[], bytes]] = [
        lambda: flipped(data, generator, 1),
        lambda: flipped(data, generator, 30),
        lambda: data[: generator.randrange(1, len(data))],
        lambda: sized(data, generator.choice(SIZES), generator.choice(SIZES)),
        lambda: flipped(sized(data, 61, generator.choice(SIZES)), generator, 5),
        lambda: data + generator.randbytes(1000),
        lambda: data[:8] + generator.randbytes(len(data)),
        lambda: data[: (cut := generator.randrange(len(data)))] + data[cut // 2 :],
        lambda: data[: (cut := generator.randrange(len(data)))] + generator.choice(whole_files())[cut:],
        lambda: data,
    ]
    return generator.choice(ways)()


def flipped(data: bytes, generator: random.Random, count: int) -> bytes:
    """The file with some bytes of others' values."""
    changed = bytearray(data)
    for _ in range(count):
        changed[generator.randrange(len(changed))] = generator.randrange(256)
    return bytes(changed)


def probe(*files: bytes, detail: str = "auto") -> Probe:
    """A question about these files."""
    urls = [f"data:image/png;base64,{base64.b64encode(file).decode()}" for file in files]
    parts = [{"type": "image_url", "image_url": {"url": url, "detail": detail}} for url in urls]
    content = [*parts, {"type": "text", "text": "what"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1, "temperature": 1}
    return Probe("POST", CHAT, json.dumps(body).encode(), CHAT)


def probes(seed: int) -> Iterator[Probe]:
    """Questions without end: all bombs now and then, and damaged files between them."""
    generator = random.Random(seed)
    while True:
        for bomb in bombs():
            yield probe(bomb)
            for _ in range(40):
                files = [damaged(generator) for _ in range(generator.choice((1, 1, 1, 2, 3)))]
                yield probe(*files, detail=generator.choice(("auto", "low")))
