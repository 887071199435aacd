"""Files that others wrote are opened here: regular files only, with a size limit, without blocking on pipes.

Errors are OSError or ValueError, whose one line `reason` returns for messages.
"""

import hashlib
import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

from kvern.errors import CorruptCheckpoint

MEBIBYTE = 1 << 20
READERS = 8
"""Files that are read at a time for their digests."""
MOST_CONFIG_BYTES = 16 * MEBIBYTE
"""The limit of a JSON file or template in a model's folder; the largest in use, tokenizer_config.json, have a tenth."""


def open_regular(path: Path, most_bytes: int | None = None, below: Path | None = None) -> BinaryIO:
    """Opens a regular file of at most `most_bytes`. Symbolic links may not lead out of the folder `below`.

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
    """Reads exactly `count` bytes at offset `begin`. Raises ValueError if the file is shorter, or OSError."""
    data = bytearray(count)
    view, done = memoryview(data), 0
    while done < count:
        read = os.preadv(stream.fileno(), [view[done:]], begin + done)
        if not read:
            raise ValueError(f"it ends at byte {begin + done}, within what it should hold")
        done += read
    return data


def digest_of(*streams: BinaryIO) -> bytes:
    """Returns a digest of 16 bytes of the content of files, which threads read. Raises OSError or ValueError."""
    with ThreadPoolExecutor(READERS) as threads:
        digests = b"".join(threads.map(_digest, streams))
    return hashlib.blake2b(digests, digest_size=16).digest()


def _digest(stream: BinaryIO) -> bytes:
    state, size = hashlib.blake2b(digest_size=16), os.fstat(stream.fileno()).st_size
    for begin in range(0, size, MEBIBYTE):
        state.update(read_at(stream, begin, min(MEBIBYTE, size - begin)))
    return state.digest()


def read_whole(path: Path, most_bytes: int = MOST_CONFIG_BYTES) -> bytes:
    """Returns the content of a file of a model's folder. Raises CorruptCheckpoint, or FileNotFoundError if it is
    missing."""
    try:
        with open_regular(path, most_bytes) as stream:
            return bytes(read_at(stream, 0, os.fstat(stream.fileno()).st_size))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise CorruptCheckpoint(f"{path} cannot be read: {reason(error)}") from None


def read_object(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file of a model's folder. Raises CorruptCheckpoint or FileNotFoundError."""
    try:
        value = json.loads(read_whole(path))
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"{path} is not JSON: {reason(error)}; download it again") from None
    if not isinstance(value, dict):
        raise CorruptCheckpoint(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value


def reason(error: BaseException) -> str:
    """Returns one short line about an error while reading a file."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, MemoryError):
        return "it takes too much memory"
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(text.split())[:300]


def as_size(count: int) -> str:
    """Returns a number of bytes for people, such as 1.52 GB."""
    unit, name = next((item for item in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if count >= item[0]), (1, "B"))
    return f"{count / unit:,.{2 if unit == 1e9 else 1 if unit > 1 else 0}f} {name}"
