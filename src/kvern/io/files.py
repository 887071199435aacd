"""Opens files that others wrote: regular ones alone, of a bounded size, without waiting for the far end of a pipe.

What is wrong is raised as OSError or ValueError, whose one line `reason` returns and which callers put behind the name.
"""

import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from kvern.errors import CorruptCheckpoint

MEBIBYTE = 1 << 20
MOST_CONFIG_BYTES = 16 * MEBIBYTE
"""Of a JSON file or template beside a model's weights; the largest in use, tokenizer_config.json, have a tenth."""


def open_regular(path: Path, most_bytes: int | None = None, below: Path | None = None) -> BinaryIO:
    """Open a regular file of at most `most_bytes`, which links may not lead out of the folder `below`.

    Raises OSError or ValueError.
    """
    real = Path(os.path.realpath(path, strict=True))
    if below is not None and not real.is_relative_to(os.path.realpath(below, strict=True)):
        raise ValueError("it is a link that leads out of its folder: put the file itself there")
    descriptor = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    stream = os.fdopen(descriptor, "rb", buffering=0)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        stream.close()
        raise ValueError("it is not a regular file")
    if most_bytes is not None and status.st_size > most_bytes:
        stream.close()
        raise ValueError(f"it has {status.st_size} bytes: at most {most_bytes} are read")
    return stream


def read_at(stream: BinaryIO, begin: int, count: int) -> bytearray:
    """Exactly `count` bytes from position `begin`. Raises ValueError if the file ends before, OSError if it cannot."""
    data = bytearray(count)
    view, done = memoryview(data), 0
    while done < count:
        read = os.preadv(stream.fileno(), [view[done:]], begin + done)
        if not read:
            raise ValueError(f"it ends at byte {begin + done}, within what it should hold")
        done += read
    return data


def digest_of(*streams: BinaryIO) -> bytes:
    """Of the content of files: 16 bytes. Raises OSError or ValueError."""
    digests = b""
    for stream in streams:
        state, size = hashlib.blake2b(digest_size=16), os.fstat(stream.fileno()).st_size
        for begin in range(0, size, MEBIBYTE):
            state.update(read_at(stream, begin, min(MEBIBYTE, size - begin)))
        digests += state.digest()
    return hashlib.blake2b(digests, digest_size=16).digest()


def read_whole(path: Path, most_bytes: int = MOST_CONFIG_BYTES) -> bytes:
    """The content of a file of a model's folder. Raises CorruptCheckpoint, or FileNotFoundError if there is none."""
    try:
        with open_regular(path, most_bytes) as stream:
            return bytes(read_at(stream, 0, os.fstat(stream.fileno()).st_size))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise CorruptCheckpoint(f"{path} cannot be read: {reason(error)}") from None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model's folder. Raises CorruptCheckpoint, or FileNotFoundError."""
    try:
        value = json.loads(read_whole(path))
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"{path} is not JSON: {reason(error)}; download it again") from None
    if not isinstance(value, dict):
        raise CorruptCheckpoint(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value


def reason(error: BaseException) -> str:
    """One short line about an error that reading a file raised."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, MemoryError):
        return "it takes too much memory"
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(text.split())[:300]
