"""SQLite files in the server's data folder, which one server process can use at a time."""

import asyncio
import concurrent.futures
import contextlib
import errno
import fcntl
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from kvern.api.errors import HttpError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SQLITE_FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)

T = TypeVar("T")


class NoRoom(HttpError):
    """The disk is full, or the owner's part of it: a later try may succeed."""


class DataFolder:
    """A folder that only this user can read, created at first use. Writes leave `reserve` bytes of its disk free."""

    def __init__(self, path: Path, reserve: int) -> None:
        self.path = path
        self._reserve = reserve
        self._lock = threading.Lock()
        self._guard: int | None = None

    def take(self) -> None:
        """Locks the folder for this process. Raises HttpError 503 if another process has locked it, or OSError."""
        with self._lock:
            if self._guard is not None:
                return
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            guard = os.open(self.path / "lock", os.O_CREAT | os.O_RDWR, 0o600)
            try:
                fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(guard)
                message = f"what is kept in {self.path} is in use by another server: give this one a data_dir"
                raise HttpError(503, message) from error
            self._guard = guard

    def leave(self) -> None:
        """Releases the folder to other processes."""
        with self._lock:
            if self._guard is not None:
                os.close(self._guard)
            self._guard = None

    def check_room(self, size: int) -> None:
        """Refuses to write `size` bytes if the disk would be too full. Raises HttpError."""
        with storage_errors():
            free = shutil.disk_usage(self.path).free
        if free - size < self._reserve:
            message = f"{size} bytes more would leave less than {self._reserve} of the server's disk free"
            raise NoRoom(507, f"{message}: free space there, or lower disk_reserve", code="storage")


class Database:
    """An SQLite file in the folder, created at first use. One thread does all its work.

    `synchronous` is SQLite's setting: FULL survives a loss of power, NORMAL the end of the process. `opened` is called
    with each new connection.
    """

    def __init__(
        self,
        folder: DataFolder,
        name: str,
        schema: str,
        synchronous: str = "FULL",
        opened: Callable[[sqlite3.Connection], object] | None = None,
    ) -> None:
        self._folder = folder
        self._path = folder.path / name
        self._schema = schema
        self._synchronous = synchronous
        self._opened = opened
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=name)
        self._connection: sqlite3.Connection | None = None

    @property
    def exists(self) -> bool:
        """True if the file exists."""
        return self._path.exists()

    def run(self, work: Callable[[sqlite3.Connection], T]) -> "asyncio.Future[T]":
        """Runs `work` in a transaction, after all work that was asked for before, and returns its result.

        Raises HttpError: 507 if the disk does not take it, 503 if another process uses the folder.
        """
        return asyncio.get_running_loop().run_in_executor(self._thread, self._work, work)

    def close(self) -> None:
        """Finishes the work that was asked for and closes the file."""
        self._thread.shutdown()
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _work(self, work: Callable[[sqlite3.Connection], T]) -> T:
        with storage_errors():
            if self._connection is None:
                self._connection = self._open()
            with self._connection:
                return work(self._connection)

    def _open(self) -> sqlite3.Connection:
        self._folder.take()
        os.close(os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600))
        self._path.chmod(0o600)  # SQLite gives its other files the same mode
        connection = sqlite3.connect(self._path, check_same_thread=False)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(f"PRAGMA synchronous = {self._synchronous}")
            connection.executescript(self._schema)
            if self._opened is not None:
                with connection:
                    self._opened(connection)
        except BaseException:
            connection.close()
            raise
        return connection


@contextlib.contextmanager
def storage_errors() -> Iterator[None]:
    """Turns errors of the disk and of SQLite into HttpError 507."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        code = getattr(error, "sqlite_errorcode", 0)
        is_full = getattr(error, "errno", None) in FULL or code & 255 in SQLITE_FULL
        advice = "free space where it keeps its data" if is_full else "it has to be able to write its data_dir"
        message = f"the server cannot store this: {reason}; {advice}"
        raise (NoRoom if is_full else HttpError)(507, message, code="storage") from error
