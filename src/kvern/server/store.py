"""Files and batches on disk: contents in a folder, everything else in SQLite beside it."""

import asyncio
import fcntl
import os
import sqlite3
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvern.server.http import HttpError

SCHEMA = """
CREATE TABLE IF NOT EXISTS objects (
    id TEXT PRIMARY KEY, kind TEXT NOT NULL, owner TEXT NOT NULL, created REAL NOT NULL, body BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS by_owner ON objects (kind, owner, created);
"""
MOST_LISTED = 10_000

Object = dict[str, Any]
T = TypeVar("T")


def default_folder() -> Path:
    """kvern's folder among the user's data (XDG base directory specification)."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "kvern"


class Store:
    """JSON objects of a kind (`file`, `batch`) and an owner (an API key's name), and the contents of files.

    It is opened at first use. Methods raise HttpError: 507 if the disk does not take what it should, 503 if another
    process uses the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
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
            raise HttpError(404, f"there is no {kind} {object_id!r:.80}", code=f"{kind}_not_found")
        return dict(msgspec.json.decode(row[0]))

    async def all(self, kind: str, owner: str | None = None) -> list[tuple[str, Object]]:
        """(owner, object) of all of a kind, or of one owner's, the newest first."""
        sql = (
            "SELECT owner, body FROM objects WHERE kind = ? AND (? IS NULL OR owner = ?) ORDER BY created DESC LIMIT ?"
        )
        rows = await self._run(lambda database: database.execute(sql, (kind, owner, owner, MOST_LISTED)).fetchall())
        return [(row[0], dict(msgspec.json.decode(row[1]))) for row in rows]

    async def remove(self, object_id: str) -> None:
        """Forget an object, and the file of that id."""

        def work(database: sqlite3.Connection) -> None:
            database.execute("DELETE FROM objects WHERE id = ?", (object_id,))
            self.path(object_id).unlink(missing_ok=True)

        await self._run(work)

    async def write(self, parts: AsyncIterator[bytes]) -> tuple[str, int]:
        """Keep a new file's content; its id and size in bytes."""
        await self._run(lambda database: None)
        file_id = f"file-{uuid.uuid4().hex}"
        path, size = self.path(file_id), 0
        try:
            with _storage_errors(), open(path, "wb", opener=_private) as file:
                async for part in parts:
                    await asyncio.to_thread(file.write, part)
                    size += len(part)
                await asyncio.to_thread(_flush, file.fileno(), file.flush)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return file_id, size

    def close(self) -> None:
        """Let go of the folder."""
        with self._lock:
            if self._database is not None:
                self._database.close()
            if self._guard is not None:
                os.close(self._guard)
            self._database = self._guard = None

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


def _flush(descriptor: int, flush: Callable[[], object]) -> None:
    flush()
    os.fsync(descriptor)


@contextmanager
def _storage_errors() -> Iterator[None]:
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        message = f"the server cannot store this: {reason}; free space where it keeps its data"
        raise HttpError(507, message, code="storage") from error
