"""Conversations on disk, with their items in the order of arrival."""

import sqlite3
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from kvern.api.errors import HttpError
from kvern.errors import shown
from kvern.server.stores.database import Database, DataFolder
from kvern.server.stores.response_memory import MOST_RESPONSE_BYTES, Items

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
