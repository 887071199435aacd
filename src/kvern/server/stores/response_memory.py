"""Running responses, and ended ones that could not be written to disk, within limits for each key."""

import asyncio
import contextlib
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from kvern.api.errors import HttpError
from kvern.io.json_lines import as_json
from kvern.server.stores.event_log import EventLog

MOST_STORED = 1000
"""The limit of responses of one key; the oldest ended ones are dropped first."""
MOST_STORED_BYTES = 256 << 20
"""The limit of all keys together, in memory and again on disk; each key has an equal share."""
MOST_RESPONSE_BYTES = 4 << 20
"""The limit of one response with the messages before it, when it begins."""

Messages = list[dict[str, Any]]
Items = list[dict[str, Any]]


class Packed(NamedTuple):
    """A stored response; all fields but the first two are JSON."""

    id: str
    owner: str
    body: msgspec.Raw
    before: msgspec.Raw
    """The messages before its input."""
    items: msgspec.Raw
    """Its input."""
    events: msgspec.Raw | None
    """The events of its `EventLog`; None if it has no stream to follow."""

    @property
    def size(self) -> int:
        """The length in bytes of what is stored."""
        return sum(len(part) for part in self[2:] if part is not None)


@dataclass(eq=False)
class Record:
    """A running response in its present state, with the name of the key that asked for it."""

    owner: str
    body: dict[str, Any]
    before: msgspec.Raw
    items: msgspec.Raw
    conversation: str | None = None
    log: EventLog | None = None
    held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Resources that are released when it ends."""
    task: asyncio.Task[None] | None = None
    """The background task that generates it."""
    is_unwanted: bool = False
    """It was cancelled or deleted."""
    ending: asyncio.Future[None] | None = None
    """Completes when the ended response is written."""
    size: int = 0

    @property
    def id(self) -> str:
        """The response's id."""
        return str(self.body["id"])

    def packed(self) -> Packed:
        """Returns the response as it is stored."""
        events = None if self.log is None else msgspec.Raw(self.log.packed())
        return Packed(self.id, self.owner, as_json(self.body), self.before, self.items, events)


class ResponseMemory:
    """Responses in memory, by key."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._running: dict[str, dict[str, Record]] = {}
        self._ended: dict[str, OrderedDict[str, Packed]] = {}
        self._bytes: Counter[str] = Counter()

    def add(self, record: Record) -> None:
        """Adds a running response. Raises HttpError if it is too large, or if there is no room for it."""
        record.size, most = record.packed().size, min(MOST_RESPONSE_BYTES, self._most_bytes)
        if record.size > most:
            message = f"the response and what was before it have {record.size} bytes, and at most {most} are kept"
            raise HttpError(413, f"{message}: send less, or store false")
        self._make_room(record.owner, 1, record.size)
        running = self._running.setdefault(record.owner, {})
        if len(running) >= MOST_STORED or self._bytes[record.owner] + record.size > self._most_bytes:
            message = f"key {record.owner} has {len(running)} responses that run, and no more are kept"
            headers = {"retry-after": "1"}
            raise HttpError(429, f"{message}: wait, or send store false", code="rate_limit_exceeded", headers=headers)
        running[record.id] = record
        self._bytes[record.owner] += record.size

    def end(self, record: Record, ended: Packed) -> Packed | None:
        """Replaces a running response by its stored form. Returns None if the response was forgotten."""
        if self._running.get(record.owner, {}).pop(record.id, None) is None:
            return None
        self._bytes[record.owner] -= record.size
        self._make_room(record.owner, 1, ended.size)
        if self._bytes[record.owner] + ended.size <= self._most_bytes:
            self._ended.setdefault(record.owner, OrderedDict())[record.id] = ended
            self._bytes[record.owner] += ended.size
        return ended

    def find(self, owner: str, response_id: str) -> Record | Packed | None:
        """Returns a response of this key."""
        running = self._running.get(owner, {}).get(response_id)
        return running if running is not None else self._ended.get(owner, OrderedDict()).get(response_id)

    def forget(self, owner: str, response_id: str) -> Record | Packed | None:
        """Removes a response and returns it."""
        running = self._running.get(owner, {}).pop(response_id, None)
        ended = self._ended.get(owner, OrderedDict()).pop(response_id, None)
        found = running if running is not None else ended
        if found is not None:
            self._bytes[owner] -= found.size
        return found

    @property
    def running(self) -> list[Record]:
        """The running responses of all keys."""
        return [record for records in self._running.values() for record in records.values()]

    @property
    def ended(self) -> list[Packed]:
        """The ended responses of all keys."""
        return [packed for kept in self._ended.values() for packed in kept.values()]

    def _make_room(self, owner: str, count: int, size: int) -> None:
        """Drops the oldest ended responses of the owner until there is room, as far as possible."""
        ended, running = self._ended.get(owner, OrderedDict()), self._running.get(owner, {})
        most = self._most_bytes
        while ended and (len(ended) + len(running) + count > MOST_STORED or self._bytes[owner] + size > most):
            _, oldest = ended.popitem(last=False)
            self._bytes[owner] -= oldest.size
