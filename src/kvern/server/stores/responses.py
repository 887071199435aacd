"""The storage of /v1/responses and /v1/conversations: on disk, and a response in memory while it runs or if the disk
does not take it.

  hold --> begin (a row that has not ended) --> end (the whole row)        at any time: find, forget

A row that has not ended when the file is opened belongs to a server that was killed: that response has failed.
"""

import asyncio
import functools
import logging
import sqlite3
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from kvern.api.errors import HttpError
from kvern.api.responses import fail
from kvern.errors import shown
from kvern.server.stores.database import Database, DataFolder
from kvern.server.stores.response_memory import (
    MOST_RESPONSE_BYTES,
    MOST_STORED,
    MOST_STORED_BYTES,
    RUNNING,
    Items,
    Packed,
    Record,
    ResponseMemory,
)

CONVERSATIONS = """
CREATE TABLE IF NOT EXISTS conversations (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, count INTEGER NOT NULL, size INTEGER NOT NULL, body BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS conversations_of ON conversations (owner, size);
CREATE TABLE IF NOT EXISTS items (
    conversation TEXT NOT NULL, id TEXT NOT NULL, body BLOB NOT NULL, UNIQUE (conversation, id)
);
"""
MOST_CONVERSATIONS = 1000
"""The limit of one key."""
MOST_ITEMS = 8192
"""The limit of one conversation."""

Object = dict[str, Any]


class ConversationStore:
    """Conversations of each key, with `most_bytes` of items in all. One response at a time may extend a conversation.

    Methods raise what `Database` raises, and HttpError: 404 if this owner has no such conversation, 413 if there is no
    room, 409 if another response is extending it.
    """

    def __init__(self, folder: DataFolder, database: Database, most_bytes: int) -> None:
        self._folder = folder
        self._database = database
        self._most_bytes = most_bytes
        self._busy: set[tuple[str, str]] = set()

    async def create(self, owner: str, metadata: dict[str, str], items: Items) -> Object:
        """Stores a new conversation and returns it."""
        conversation_id = f"conv_{uuid.uuid4().hex}"
        body = {
            "id": conversation_id,
            "object": "conversation",
            "created_at": int(time.time()),
            "metadata": metadata,
        }

        def work(database: sqlite3.Connection) -> None:
            sql = "SELECT COUNT(*) FROM conversations WHERE owner = ?"
            [count] = database.execute(sql, (owner,)).fetchone()
            if count >= MOST_CONVERSATIONS:
                raise _full(f"key {owner} has {count} conversations of {MOST_CONVERSATIONS}: delete some")
            row = (conversation_id, owner, 0, 0, msgspec.json.encode(body))
            database.execute("INSERT INTO conversations VALUES (?, ?, ?, ?, ?)", row)
            self._add(database, owner, conversation_id, items)

        await self._database.run(work)
        return body

    async def load(self, owner: str, conversation_id: str) -> Object:
        """Returns the conversation without its items."""
        return await self._database.run(lambda database: _load(database, owner, conversation_id))

    async def update(self, owner: str, conversation_id: str, metadata: dict[str, str]) -> Object:
        """Replaces the metadata and returns the conversation."""

        def work(database: sqlite3.Connection) -> Object:
            body = {**_load(database, owner, conversation_id), "metadata": metadata}
            sql = "UPDATE conversations SET body = ? WHERE id = ?"
            database.execute(sql, (msgspec.json.encode(body), conversation_id))
            return body

        return await self._database.run(work)

    async def remove(self, owner: str, conversation_id: str) -> None:
        """Deletes the conversation and its items."""

        def work(database: sqlite3.Connection) -> None:
            _load(database, owner, conversation_id)
            database.execute("DELETE FROM conversations WHERE id = ?", (conversation_id,))
            database.execute("DELETE FROM items WHERE conversation = ?", (conversation_id,))

        await self._database.run(work)

    async def items(self, owner: str, conversation_id: str) -> Items:
        """Returns all items, oldest first."""

        def work(database: sqlite3.Connection) -> Items:
            _load(database, owner, conversation_id)
            sql = "SELECT body FROM items WHERE conversation = ? ORDER BY rowid"
            return [msgspec.json.decode(body) for (body,) in database.execute(sql, (conversation_id,))]

        return await self._database.run(work)

    async def item(self, owner: str, conversation_id: str, item_id: str) -> Object:
        """Returns one item."""
        body = await self._database.run(lambda database: _item(database, owner, conversation_id, item_id))
        return dict(msgspec.json.decode(body))

    async def add(self, owner: str, conversation_id: str, items: Items) -> None:
        """Appends items."""
        await self._database.run(lambda database: self._add(database, owner, conversation_id, items))

    async def remove_item(self, owner: str, conversation_id: str, item_id: str) -> Object:
        """Deletes one item and returns the conversation."""

        def work(database: sqlite3.Connection) -> Object:
            body = _item(database, owner, conversation_id, item_id)
            sql = "DELETE FROM items WHERE conversation = ? AND id = ?"
            database.execute(sql, (conversation_id, item_id))
            _grow(database, conversation_id, -1, -len(body))
            return _load(database, owner, conversation_id)

        return await self._database.run(work)

    @contextmanager
    def held(self, owner: str, conversation_id: str) -> Iterator[None]:
        """Keeps other responses from extending the conversation until the block ends."""
        name = owner, conversation_id
        if name in self._busy:
            message = f"another response goes on with conversation {shown(conversation_id)}: wait until it has ended"
            raise HttpError(409, message, param="conversation", code="conversation_locked")
        self._busy.add(name)
        try:
            yield
        finally:
            self._busy.discard(name)

    async def check_room(self, owner: str, conversation_id: str, items: Items) -> None:
        """Refuses a response whose input does not fit in the conversation. Raises HttpError."""
        bodies = [msgspec.json.encode(item) for item in items]
        await self._database.run(lambda database: self._check(database, owner, conversation_id, bodies))

    def _add(self, database: sqlite3.Connection, owner: str, conversation_id: str, items: Items) -> None:
        self._check(database, owner, conversation_id, [msgspec.json.encode(item) for item in items])
        append(database, owner, conversation_id, items)

    def _check(self, database: sqlite3.Connection, owner: str, conversation_id: str, bodies: Sequence[bytes]) -> None:
        _load(database, owner, conversation_id)
        sql = "SELECT count, size FROM conversations WHERE id = ?"
        count, size = database.execute(sql, (conversation_id,)).fetchone()
        [used] = database.execute("SELECT TOTAL(size) FROM conversations WHERE owner = ?", (owner,)).fetchone()
        more = sum(len(body) for body in bodies)
        if count + len(bodies) > MOST_ITEMS:
            message = f"the conversation has {count} items, and {len(bodies)} more are over its limit of {MOST_ITEMS}"
            raise _full(f"{message}: go on in a new one")
        most = min(MOST_RESPONSE_BYTES, self._most_bytes)
        if size + more > most:
            message = f"the conversation has {size} bytes, and {more} more are over its limit of {most}"
            raise _full(f"{message}: go on in a new one")
        if used + more > self._most_bytes:
            message = f"key {owner} has {used:.0f} bytes of conversations, and {more} more do not fit"
            raise _full(f"{message}: delete some")
        self._folder.check_room(more)


def append(database: sqlite3.Connection, owner: str, conversation_id: str, items: Items) -> None:
    """Appends items if the conversation still exists."""
    sql = "SELECT 1 FROM conversations WHERE id = ? AND owner = ?"
    if database.execute(sql, (conversation_id, owner)).fetchone() is None:
        return
    rows = [(conversation_id, item["id"], msgspec.json.encode(item)) for item in items]
    database.executemany("INSERT INTO items VALUES (?, ?, ?)", rows)
    _grow(database, conversation_id, len(rows), sum(len(body) for _, _, body in rows))


def _grow(database: sqlite3.Connection, conversation_id: str, count: int, size: int) -> None:
    sql = "UPDATE conversations SET count = count + ?, size = size + ? WHERE id = ?"
    database.execute(sql, (count, size, conversation_id))


def _load(database: sqlite3.Connection, owner: str, conversation_id: str) -> Object:
    sql = "SELECT body FROM conversations WHERE id = ? AND owner = ?"
    row = database.execute(sql, (conversation_id, owner)).fetchone()
    if row is None:
        raise HttpError(404, f"there is no conversation {shown(conversation_id)}", code="conversation_not_found")
    return dict(msgspec.json.decode(row[0]))


def _item(database: sqlite3.Connection, owner: str, conversation_id: str, item_id: str) -> bytes:
    _load(database, owner, conversation_id)
    sql = "SELECT body FROM items WHERE conversation = ? AND id = ?"
    row = database.execute(sql, (conversation_id, item_id)).fetchone()
    if row is None:
        raise HttpError(404, f"the conversation has no item {shown(item_id)}", code="item_not_found")
    return bytes(row[0])


def _full(message: str) -> HttpError:
    return HttpError(413, message, code="quota_exceeded")


logger = logging.getLogger("kvern")

RESPONSES = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, ended INTEGER NOT NULL, size INTEGER NOT NULL,
    body BLOB NOT NULL, before BLOB NOT NULL, items BLOB NOT NULL, events BLOB
);
CREATE INDEX IF NOT EXISTS responses_by_age ON responses (owner, ended);
CREATE INDEX IF NOT EXISTS responses_by_size ON responses (owner, size, id);
"""
T = TypeVar("T")
Work = Callable[[sqlite3.Connection], object]

CUT_OFF = HttpError(500, "the server ended before the answer was complete: ask again")


class ResponseStore:
    """Responses of each of `users` keys, limited in number and bytes; each key may keep `quota` bytes at most."""

    def __init__(self, folder: DataFolder, users: int, quota: int) -> None:
        self._folder = folder
        self._most_bytes = min(MOST_STORED_BYTES // users, quota)
        schema = RESPONSES + CONVERSATIONS
        self._database = Database(folder, "responses.db", schema, "NORMAL", _fail_those_cut_off)
        self.conversations = ConversationStore(folder, self._database, self._most_bytes)
        self._memory = ResponseMemory(self._most_bytes)
        self._is_refused = False
        """The disk did not take the last response, and the log says so."""
        self._writing: set[asyncio.Future[Any]] = set()

    def hold(self, record: Record) -> None:
        """Adds a running response. Raises HttpError if there is no room for it."""
        self._memory.add(record)

    def drop(self, record: Record) -> None:
        """Removes a response whose id no client has seen."""
        record.held.close()
        self._memory.forget(record.owner, record.id)

    def begin(self, record: Record) -> Awaitable[object]:
        """Writes that the response runs; the caller need not wait for it."""
        return self._write(record.packed(), is_end=False)

    def end(self, record: Record) -> Awaitable[None]:
        """Writes an ended response, and what it adds to its conversation. In memory it stays only if the disk does not
        take it.

        A response that is not complete counts as cancelled. The caller need not wait for it.
        """
        if record.ending is None:
            record.ending = self._keep(asyncio.ensure_future(self._end(record)))
        return asyncio.shield(record.ending)

    async def find(self, owner: str, response_id: str) -> Record | Packed:
        """Returns a response of the API key `owner`. Raises HttpError 404, or what `Database` raises."""
        found: Record | Packed | None = self._memory.find(owner, response_id)
        if found is None and self._database.exists:
            found = await self._database.run(lambda database: _read(database, owner, response_id))
        if found is None:
            raise _unknown(response_id)
        return found

    async def forget(self, owner: str, response_id: str) -> None:
        """Cancels the response if it runs, and deletes it. Raises HttpError 404, or what `Database` raises."""
        found = self._memory.forget(owner, response_id)
        if isinstance(found, Record):
            found.is_unwanted = True
            if found.task is not None:
                found.task.cancel()
        deleted = 0
        if self._database.exists:
            sql = "DELETE FROM responses WHERE id = ? AND owner = ?"
            try:
                deleted = await self._database.run(
                    lambda database: database.execute(sql, (response_id, owner)).rowcount
                )
            except HttpError:
                if found is None:
                    raise
        if found is None and not deleted:
            raise _unknown(response_id)

    async def stop(self) -> None:
        """Ends running responses, writes what the disk did not take before, and closes the file."""
        running = self._memory.running
        tasks = [record.task for record in running if record.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(self.end(record) for record in running), *self._writing, return_exceptions=True)
        for packed in self._memory.ended:
            await self._write(packed)
        self._database.close()

    def _write(self, packed: Packed | None, is_end: bool = True, add: Work | None = None) -> "asyncio.Future[bool]":
        """Begins to write a response; the result is True once the disk has it."""

        def work(database: sqlite3.Connection) -> None:
            if packed is not None:
                self._folder.check_room(packed.size)
                _put(database, packed, is_end, self._most_bytes)
            if add is not None:
                add(database)

        return self._keep(asyncio.ensure_future(self._told(self._database.run(work))))

    async def _told(self, writing: Awaitable[None]) -> bool:
        try:
            await writing
        except HttpError as error:
            if not self._is_refused:
                logger.warning("responses stay in memory until the server ends: %s", error)
            self._is_refused = True
            return False
        self._is_refused = False
        return True

    async def _end(self, record: Record) -> None:
        if record.body["status"] in RUNNING:
            record.body["status"] = "cancelled"
        try:
            written = await asyncio.to_thread(record.packed)  # takes long with many log-probabilities
            packed, add = self._memory.end(record, written), _adding(record)
            is_written = (packed or add) and await self._write(packed, True, add)
            if packed is not None and is_written:
                self._memory.forget(record.owner, record.id)
        finally:
            record.held.close()
            if record.log is not None:
                record.log.close()

    def _keep(self, writing: "asyncio.Future[T]") -> "asyncio.Future[T]":
        self._writing.add(writing)
        writing.add_done_callback(self._writing.discard)
        return writing


def _adding(record: Record) -> Work | None:
    """Returns the work that appends an answered response to its conversation."""
    if record.conversation is None or record.body["status"] not in ("completed", "incomplete"):
        return None
    items = [*msgspec.json.decode(record.items), *record.body["output"]]
    return functools.partial(append, owner=record.owner, conversation_id=record.conversation, items=items)


def _put(database: sqlite3.Connection, packed: Packed, is_end: bool, most: int) -> None:
    """Writes a response over its earlier row. A response that has outgrown its owner's limit is deleted."""
    if packed.size > most:
        database.execute("DELETE FROM responses WHERE id = ?", (packed.id,))
        return
    _make_room(database, packed, most)
    row = (packed.id, packed.owner, is_end, packed.size, *packed[2:])
    database.execute("REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)


def _make_room(database: sqlite3.Connection, packed: Packed, most: int) -> None:
    """Deletes the owner's oldest ended responses until there is room."""
    sql = "SELECT COUNT(*), TOTAL(size) FROM responses WHERE owner = ? AND id != ?"
    count, size = database.execute(sql, (packed.owner, packed.id)).fetchone()
    while count >= MOST_STORED or size + packed.size > most:
        sql = "SELECT rowid, size FROM responses WHERE owner = ? AND ended = 1 AND id != ? ORDER BY rowid LIMIT 1"
        oldest = database.execute(sql, (packed.owner, packed.id)).fetchone()
        if oldest is None:
            return
        database.execute("DELETE FROM responses WHERE rowid = ?", oldest[:1])
        count, size = count - 1, size - oldest[1]


def _read(database: sqlite3.Connection, owner: str, response_id: str) -> Packed | None:
    sql = "SELECT id, owner, body, before, items, events FROM responses WHERE id = ? AND owner = ? AND ended = 1"
    row = database.execute(sql, (response_id, owner)).fetchone()
    return None if row is None else Packed(*row[:2], *(part and msgspec.Raw(part) for part in row[2:]))


def _fail_those_cut_off(database: sqlite3.Connection) -> None:
    for (response_id,) in database.execute("SELECT id FROM responses WHERE ended = 0").fetchall():
        [text] = database.execute("SELECT body FROM responses WHERE id = ?", (response_id,)).fetchone()
        body = msgspec.json.decode(text)
        fail(body, CUT_OFF)
        sql = "UPDATE responses SET ended = 1, body = ? WHERE id = ?"
        database.execute(sql, (msgspec.json.encode(body), response_id))


def _unknown(response_id: str) -> HttpError:
    message = f"there is no response {shown(response_id)}: it was not stored, or newer ones took its place"
    return HttpError(404, message, code="response_not_found")
