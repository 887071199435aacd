"""Files and batches on disk: contents in a folder, everything else in SQLite beside it."""

import asyncio
import contextlib
import errno
import fcntl
import os
import shutil
import sqlite3
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvern.api.errors import HttpError
from kvern.errors import shown

SCHEMA = """
CREATE TABLE IF NOT EXISTS objects (
    id TEXT PRIMARY KEY, kind TEXT NOT NULL, owner TEXT NOT NULL, created REAL NOT NULL, body BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS by_owner ON objects (kind, owner, created);
"""
MOST_LISTED = 10_000
MOST_FILES = 10_000
"""Of one owner."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SQLITE_FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)

Object = dict[str, Any]
T = TypeVar("T")


def default_folder() -> Path:
    """kvern's folder among the user's data (XDG base directory specification)."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "kvern"


class NoRoom(HttpError):
    """The disk takes no more, or no more of this owner: it may later."""


class Store:
    """JSON objects of a kind (`file`, `batch`) and an owner (an API key's name), and the contents of files.

    An owner may keep `quota` bytes, and uploads leave `reserve` bytes of the disk free.

    It is opened at first use. Methods raise HttpError: 507 if the disk does not take what it should, 413 if the owner
    may not keep more, 503 if another process uses the folder.
    """

    def __init__(self, folder: Path, quota: int, reserve: int) -> None:
        self.folder = folder
        self._quota = quota
        self._reserve = reserve
        self._used: dict[str, int] = {}
        """Bytes by owner, of those who were asked about."""
        self._lock = threading.Lock()
        self._database: sqlite3.Connection | None = None
        self._guard: int | None = None

    @property
    def exists(self) -> bool:
        """There is something in it."""
        return (self.folder / "kvern.db").exists()

    def path(self, file_id: str) -> Path:
        """Where a file's content is."""
        return self.folder / "files" / file_id

    async def save(self, kind: str, owner: str, body: Object) -> None:
        """Write an object under its `id`, over the one that was there."""
        row = (body["id"], kind, owner, time.time(), msgspec.json.encode(body))
        sql = (
            "INSERT INTO objects VALUES (?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET body = excluded.body, "
            "owner = excluded.owner"
        )
        await self._run(lambda database: database.execute(sql, row))

    async def load(self, kind: str, owner: str, object_id: str) -> Object:
        """The object of this id. Raises HttpError 404 if this owner has none."""
        sql = "SELECT body FROM objects WHERE id = ? AND kind = ? AND owner = ?"
        row = await self._run(lambda database: database.execute(sql, (object_id, kind, owner)).fetchone())
        if row is None:
            raise HttpError(404, f"there is no {kind} {shown(object_id)}", code=f"{kind}_not_found")
        return dict(msgspec.json.decode(row[0]))

    async def all(self, kind: str, owner: str | None = None) -> list[tuple[str, Object]]:
        """(owner, object) of all of a kind, or the last of one owner's, the newest first."""
        sql = (
            "SELECT owner, body FROM objects WHERE kind = ? AND (? IS NULL OR owner = ?) ORDER BY created DESC LIMIT ?"
        )
        values = (kind, owner, owner, -1 if owner is None else MOST_LISTED)
        rows = await self._run(lambda database: database.execute(sql, values).fetchall())
        return [(row[0], dict(msgspec.json.decode(row[1]))) for row in rows]

    async def remove(self, owner: str, object_id: str) -> None:
        """Forget an object, and the file of that id."""

        def work(database: sqlite3.Connection) -> int:
            database.execute("DELETE FROM objects WHERE id = ? AND owner = ?", (object_id, owner))
            size = _size(self.path(object_id))
            self.path(object_id).unlink(missing_ok=True)
            return size

        await self._measure(owner)
        self._used[owner] -= await self._run(work)

    async def forget_old(self, kind: str, owner: str) -> None:
        """Forget an owner's objects that are too old to be listed."""
        sql = (
            "DELETE FROM objects WHERE id IN (SELECT id FROM objects WHERE kind = ? AND owner = ? "
            "ORDER BY created DESC LIMIT -1 OFFSET ?)"
        )
        await self._run(lambda database: database.execute(sql, (kind, owner, MOST_LISTED)))

    async def check_upload(self, owner: str, size: int) -> None:
        """Whether an owner may keep another file of this size. Raises HttpError."""
        await self._measure(owner)
        sql = "SELECT COUNT(*) FROM objects WHERE kind = 'file' AND owner = ?"
        [count] = await self._run(lambda database: database.execute(sql, (owner,)).fetchone())
        if count >= MOST_FILES:
            message = f"key {owner} has {count} files of {MOST_FILES}: delete some"
            raise HttpError(413, message, code="quota_exceeded")
        self._check_quota(owner, size)
        self._check_reserve(size)

    async def write(self, owner: str, parts: AsyncIterator[bytes]) -> tuple[str, int]:
        """Keep a new file's content; its id and size in bytes."""
        await self._measure(owner)
        file_id = f"file-{uuid.uuid4().hex}"
        path, size = self.path(file_id), 0
        try:
            with _storage_errors(), open(path, "wb", opener=_private) as file:
                async for part in parts:
                    self._check_reserve(len(part))
                    self._check_quota(owner, len(part))
                    self._used[owner] += len(part)
                    size += len(part)
                    await asyncio.to_thread(file.write, part)
                await asyncio.to_thread(_flush, file.fileno(), file.flush)
        except BaseException:
            path.unlink(missing_ok=True)
            self._used[owner] -= size
            raise
        return file_id, size

    async def append(self, owner: str, path: Path, line: bytes) -> None:
        """Write a whole line to a file of an owner's batch, or nothing."""
        await self._measure(owner)
        self._check_quota(owner, len(line))
        self._used[owner] += len(line)
        try:
            with _storage_errors():
                await asyncio.to_thread(_append, path, line)
        except BaseException:
            self._used[owner] -= len(line)
            raise

    def close(self) -> None:
        """Let go of the folder."""
        with self._lock:
            if self._database is not None:
                self._database.close()
            if self._guard is not None:
                os.close(self._guard)
            self._database = self._guard = None

    async def _measure(self, owner: str) -> None:
        """Know what an owner keeps."""
        if owner not in self._used:
            sql = "SELECT id FROM objects WHERE owner = ?"
            rows = await self._run(lambda database: database.execute(sql, (owner,)).fetchall())
            names = [name for (object_id,) in rows for name in (object_id, *paths_of_batch(object_id))]
            used = await asyncio.to_thread(lambda: sum(_size(self.path(name)) for name in names))
            self._used.setdefault(owner, used)

    def _check_quota(self, owner: str, size: int) -> None:
        if self._used[owner] + size > self._quota:
            message = f"key {owner} keeps {self._used[owner]} bytes of {self._quota}, and {size} more do not fit"
            raise NoRoom(413, f"{message}: delete files", code="quota_exceeded")

    def _check_reserve(self, size: int) -> None:
        with _storage_errors():
            free = shutil.disk_usage(self.folder).free
        if free - size < self._reserve:
            message = f"{size} bytes more would leave less than {self._reserve} of the server's disk free"
            raise NoRoom(507, f"{message}: free space there, or lower disk_reserve", code="storage")

    async def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        return await asyncio.to_thread(self._locked, work)

    def _locked(self, work: Callable[[sqlite3.Connection], T]) -> T:
        with self._lock, _storage_errors():
            if self._database is None:
                self._database = self._open()
            with self._database:
                return work(self._database)

    def _open(self) -> sqlite3.Connection:
        for folder in (self.folder, self.folder / "files"):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (self.folder / "files").chmod(0o700)
        guard = os.open(self.folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(guard)
            message = f"files and batches in {self.folder} are in use by another server: give this one a data_dir"
            raise HttpError(503, message) from error
        self._guard = guard
        os.close(os.open(self.folder / "kvern.db", os.O_CREAT | os.O_RDWR, 0o600))
        (self.folder / "kvern.db").chmod(0o600)  # what SQLite puts beside it is as private
        database = sqlite3.connect(self.folder / "kvern.db", check_same_thread=False)
        database.execute("PRAGMA journal_mode = WAL")
        database.executescript(SCHEMA)
        return database


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def paths_of_batch(batch_id: str) -> tuple[str, str]:
    """The names of the files to which a batch's answers and errors are written."""
    return f"{batch_id}_output", f"{batch_id}_errors"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _append(path: Path, line: bytes) -> None:
    size = _size(path)
    try:
        with open(path, "ab", opener=_private) as file:
            file.write(line)
    except OSError:
        with contextlib.suppress(OSError), path.open("r+b") as file:
            file.truncate(size)
        raise


def _flush(descriptor: int, flush: Callable[[], object]) -> None:
    flush()
    os.fsync(descriptor)


@contextlib.contextmanager
def _storage_errors() -> Iterator[None]:
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        code = getattr(error, "sqlite_errorcode", 0)
        is_full = getattr(error, "errno", None) in FULL or code & 255 in SQLITE_FULL
        message = f"the server cannot store this: {reason}; free space where it keeps its data"
        raise (NoRoom if is_full else HttpError)(507, message, code="storage") from error
