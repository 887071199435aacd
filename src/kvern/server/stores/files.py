"""Files and batches on disk: contents in a folder, everything else in SQLite."""

import asyncio
import contextlib
import os
import sqlite3
import time
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec

from kvern.api.errors import HttpError
from kvern.errors import shown
from kvern.server.config import BATCHES
from kvern.server.stores.database import Database, DataFolder, NoRoom, storage_errors

SCHEMA = """
CREATE TABLE IF NOT EXISTS objects (
    id TEXT PRIMARY KEY, kind TEXT NOT NULL, owner TEXT NOT NULL, created REAL NOT NULL, body BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS by_owner ON objects (kind, owner, created);
"""
MOST_LISTED = 10_000
MOST_FILES = 10_000
"""The limit of one owner."""
Object = dict[str, Any]


class Store:
    """JSON objects of a kind (`file`, `batch`) and an owner (an API key's name), and the contents of files.

    An owner may keep `quota` bytes. Methods raise what `Database` raises, and HttpError 413 if the owner may not keep
    more.
    """

    def __init__(self, folder: DataFolder, quota: int) -> None:
        self._folder = folder
        self._files = folder.path / "files"
        self._database = Database(folder, BATCHES, SCHEMA, opened=self._make_files)
        self._quota = quota
        self._used: dict[str, int] = {}
        """The bytes kept by each owner that was asked about."""

    @property
    def exists(self) -> bool:
        """True if anything was stored."""
        return self._database.exists

    def path(self, file_id: str) -> Path:
        """Returns the path of a file's content."""
        return self._files / file_id

    async def save(self, kind: str, owner: str, body: Object) -> None:
        """Writes an object under its `id`, over an earlier one."""
        row = (body["id"], kind, owner, time.time(), msgspec.json.encode(body))
        sql = (
            "INSERT INTO objects VALUES (?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET body = excluded.body, "
            "owner = excluded.owner"
        )
        await self._database.run(lambda database: database.execute(sql, row))

    async def load(self, kind: str, owner: str, object_id: str) -> Object:
        """Returns the object of this id. Raises HttpError 404 if this owner has none."""
        sql = "SELECT body FROM objects WHERE id = ? AND kind = ? AND owner = ?"
        row = await self._database.run(lambda database: database.execute(sql, (object_id, kind, owner)).fetchone())
        if row is None:
            raise HttpError(404, f"there is no {kind} {shown(object_id)}", code=f"{kind}_not_found")
        return dict(msgspec.json.decode(row[0]))

    async def all(self, kind: str, owner: str | None = None) -> list[tuple[str, Object]]:
        """Returns (owner, object) of all objects of a kind, or of the newest of one owner, newest first."""
        sql = (
            "SELECT owner, body FROM objects WHERE kind = ? AND (? IS NULL OR owner = ?) ORDER BY created DESC LIMIT ?"
        )
        values = (kind, owner, owner, -1 if owner is None else MOST_LISTED)
        rows = await self._database.run(lambda database: database.execute(sql, values).fetchall())
        return [(row[0], dict(msgspec.json.decode(row[1]))) for row in rows]

    async def remove(self, owner: str, object_id: str) -> None:
        """Deletes an object, the content of the file with its id, and what a batch of its id has written."""

        def work(database: sqlite3.Connection) -> int:
            database.execute("DELETE FROM objects WHERE id = ? AND owner = ?", (object_id, owner))
            paths = [self.path(name) for name in (object_id, *paths_of_batch(object_id))]
            size = sum(map(_size, paths))
            for path in paths:
                path.unlink(missing_ok=True)
            return size

        await self._measure(owner)
        self._used[owner] -= await self._database.run(work)

    async def forget_old(self, kind: str, owner: str) -> None:
        """Deletes an owner's objects that are too old to be listed."""
        sql = "SELECT id FROM objects WHERE kind = ? AND owner = ? ORDER BY created DESC LIMIT -1 OFFSET ?"
        rows = await self._database.run(lambda database: database.execute(sql, (kind, owner, MOST_LISTED)).fetchall())
        for [object_id] in rows:
            await self.remove(owner, object_id)

    async def check_upload(self, owner: str, size: int) -> None:
        """Refuses a file of this size if the owner may not keep it. Raises HttpError."""
        await self._measure(owner)
        sql = "SELECT COUNT(*) FROM objects WHERE kind = 'file' AND owner = ?"
        [count] = await self._database.run(lambda database: database.execute(sql, (owner,)).fetchone())
        if count >= MOST_FILES:
            message = f"key {owner} has {count} files of {MOST_FILES}: delete some"
            raise HttpError(413, message, code="quota_exceeded")
        self._check_quota(owner, size)
        self._folder.check_room(size)

    async def write(self, owner: str, parts: AsyncIterator[bytes], file_id: str = "") -> tuple[str, int]:
        """Stores the content of a new file, or of one with this id. Returns its id and its size in bytes."""
        await self._measure(owner)
        file_id = file_id or f"file-{uuid.uuid4().hex}"
        path, size = self.path(file_id), 0
        try:
            with storage_errors(), open(path, "wb", opener=_private) as file:
                async for part in parts:
                    self._folder.check_room(len(part))
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
        """Appends a whole line to a file of an owner's batch, or nothing."""
        await self._measure(owner)
        self._check_quota(owner, len(line))
        self._used[owner] += len(line)
        try:
            with storage_errors():
                await asyncio.to_thread(_append, path, line)
        except BaseException:
            self._used[owner] -= len(line)
            raise

    def close(self) -> None:
        """Closes the database."""
        self._database.close()

    def _make_files(self, database: sqlite3.Connection) -> None:
        self._files.mkdir(exist_ok=True, mode=0o700)
        self._files.chmod(0o700)

    async def _measure(self, owner: str) -> None:
        """Measures what an owner keeps, once."""
        if owner not in self._used:
            sql = "SELECT id FROM objects WHERE owner = ?"
            rows = await self._database.run(lambda database: database.execute(sql, (owner,)).fetchall())
            names = [name for (object_id,) in rows for name in (object_id, *paths_of_batch(object_id))]
            used = await asyncio.to_thread(lambda: sum(_size(self.path(name)) for name in names))
            self._used.setdefault(owner, used)

    def _check_quota(self, owner: str, size: int) -> None:
        if self._used[owner] + size > self._quota:
            message = f"key {owner} keeps {self._used[owner]} bytes of {self._quota}, and {size} more do not fit"
            raise NoRoom(413, f"{message}: delete files", code="quota_exceeded")


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def paths_of_batch(batch_id: str) -> tuple[str, str]:
    """Returns the names of the files to which a batch's answers and errors are written."""
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
