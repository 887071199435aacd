"""The last steps of an engine's process in shared memory, which `kvern top` on the same machine reads.

    HEADER      what the file is
    STEP        STEPS records; step n is at place n modulo STEPS

A record begins and ends with its step's number: one that is read while it is written has two numbers, and is left out.
The writer holds a lock as long as it lives, so that a file of an engine that was killed is recognised, in whatever
container it ran.
"""

import fcntl
import logging
import mmap
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from kvern.io.files import reason

logger = logging.getLogger("kvern")
FOLDER = Path("/dev/shm")  # noqa: S108 (the files have random names, and are never opened through links)
"""Memory: a step never waits for a disk."""
PREFIX = "kvern-steps-"
HEADER = b"kvern steps 2".ljust(64, b"\0")
STEPS = 4096
STEP = struct.Struct("@Qdd4qQ")
FIRST, RECORD = len(HEADER), STEP.size
SIZE = FIRST + STEPS * RECORD


class Step(NamedTuple):
    """A step that has ended, and the engine's figures at its end."""

    number: int
    ended: float
    """Its end by the monotonic clock, which all processes of a machine share."""
    seconds: float
    tokens: int
    rows: int
    waiting: int
    generated: int
    """The tokens of answers since the engine's start."""


def ring_path(folder: str | Path) -> Path:
    """Returns the file of the engine whose files are in this folder, which has a random name."""
    return FOLDER / (PREFIX + Path(folder).name)


class StepRing:
    """Writes the steps of this process's engine. Raises OSError if the file cannot be made."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._count, self._pack = 0, STEP.pack_into
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # before there is content, which others look at
            os.posix_fallocate(descriptor, 0, SIZE)  # or a step would end with SIGBUS where memory is short
            os.pwrite(descriptor, HEADER, 0)
            self._memory = mmap.mmap(descriptor, SIZE, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError:
            path.unlink()
            os.close(descriptor)
            raise

    def write(self, last: tuple[float, float, int], rows: int, waiting: int, generated: int) -> None:
        """Writes a step, as in `Step`; `last` has its end, seconds and tokens."""
        self._count = count = self._count + 1
        ended, seconds, tokens = last
        place = FIRST + count % STEPS * RECORD
        self._pack(self._memory, place, count, ended, seconds, tokens, rows, waiting, generated, count)


def make_ring(folder: Path) -> StepRing | None:
    """Returns the ring of this process, and removes those of engines that were killed; None if none can be made."""
    for path in FOLDER.glob(f"{PREFIX}*"):
        with suppress(OSError, ValueError), _opened(path) as descriptor:
            if _is_left(descriptor):
                path.unlink()
    try:
        return StepRing(ring_path(folder))
    except OSError as error:
        logger.warning("kvern top shows no single steps: %s cannot be made: %s", ring_path(folder), reason(error))
        return None


def read_steps(path: str | Path) -> list[Step]:
    """Returns the steps in a file, the oldest first. Raises OSError or ValueError if it is not a living engine's."""
    with _opened(path) as descriptor:
        if _is_left(descriptor):
            raise ValueError("its engine has ended")
        content = os.pread(descriptor, SIZE, 0)
    if len(content) != SIZE or not content.startswith(HEADER):
        raise ValueError("it is not a file of steps of this version of kvern")
    found = (
        Step._make(record[:-1])
        for record in STEP.iter_unpack(memoryview(content)[len(HEADER) :])
        if record[0] and record[0] == record[-1]
    )
    return sorted(found)


@contextmanager
def _opened(path: str | Path) -> Iterator[int]:
    """Opens a regular file of this user. Raises OSError or ValueError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise ValueError("it is not a regular file of this user")
        yield descriptor
    finally:
        os.close(descriptor)


def _is_left(descriptor: int) -> bool:
    """True if nobody writes a file, and it is not just being made."""
    if not os.fstat(descriptor).st_size:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
