"""What /v1/responses remembers, in memory, with bounds for each key."""

import asyncio
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

from kvern.api.errors import HttpError
from kvern.errors import shown

MOST_STORED = 1000
"""Responses of one key; the oldest that have ended go first."""
MOST_STORED_BYTES = 256 << 20
"""Of all keys together, each of which has an equal part."""
MOST_RESPONSE_BYTES = 4 << 20
"""Of one response and the messages before it, when it begins."""


@dataclass
class Stored:
    """A response as it stands, the messages before it, and the name of the key that asked for it."""

    key: str
    body: dict[str, Any]
    messages: list[dict[str, Any]]
    task: asyncio.Task[None] | None = None
    size: int = 0

    @property
    def background(self) -> bool:
        """Nobody waits for it."""
        return bool(self.body["background"])


@dataclass(frozen=True)
class Packed:
    """A response that has ended: its body and the messages before it, each as JSON."""

    key: str
    body: msgspec.Raw
    messages: msgspec.Raw
    background: bool

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.body) + len(self.messages)

    def unpacked(self) -> Stored:
        """As it was."""
        return Stored(self.key, msgspec.json.decode(self.body), msgspec.json.decode(self.messages))


class ResponseMemory:
    """Responses that run as they are, and those that have ended as JSON, whose length is what they take."""

    def __init__(self, users: int) -> None:
        self._most_bytes = MOST_STORED_BYTES // users
        self._running: dict[str, dict[str, Stored]] = {}
        self._ended: dict[str, OrderedDict[str, Packed]] = {}
        self._bytes: Counter[str] = Counter()

    def add(self, stored: Stored) -> None:
        """Remember one that runs. Raises HttpError if it is too large, or if too many run that may not be forgotten."""
        stored.size, most = packed(stored).size, min(MOST_RESPONSE_BYTES, self._most_bytes)
        if stored.size > most:
            message = f"the response and what was before it have {stored.size} bytes, and at most {most} are kept"
            raise HttpError(413, f"{message}: send less, or store false")
        self._make_room(stored.key, 1, stored.size)
        running = self._running.setdefault(stored.key, {})
        if len(running) >= MOST_STORED or self._bytes[stored.key] + stored.size > self._most_bytes:
            message = f"key {stored.key} has {len(running)} responses that run, and no more are kept"
            headers = {"retry-after": "1"}
            raise HttpError(429, f"{message}: wait, or send store false", code="rate_limit_exceeded", headers=headers)
        running[stored.body["id"]] = stored
        self._bytes[stored.key] += stored.size

    def end(self, stored: Stored) -> None:
        """It changes no more."""
        if self._running.get(stored.key, {}).pop(stored.body["id"], None) is None:
            return
        self._bytes[stored.key] -= stored.size
        ended = packed(stored)
        self._make_room(stored.key, 1, ended.size)
        if self._bytes[stored.key] + ended.size <= self._most_bytes:
            self._ended.setdefault(stored.key, OrderedDict())[stored.body["id"]] = ended
            self._bytes[stored.key] += ended.size

    def find(self, key: str, response_id: str) -> Stored | Packed:
        """A response of this key, which runs or has ended. Raises HttpError 404."""
        running = self._running.get(key, {}).get(response_id)
        if running is not None:
            return running
        ended = self._ended.get(key, OrderedDict()).get(response_id)
        if ended is None:
            message = f"there is no response {shown(response_id)}: it was not stored, or newer ones took its place"
            raise HttpError(404, message, code="response_not_found")
        return ended

    def forget(self, key: str, response_id: str) -> None:
        """End it, if it runs, and know nothing of it."""
        running = self._running.get(key, {}).pop(response_id, None)
        if running is not None:
            self._bytes[key] -= running.size
            if running.task is not None:
                running.task.cancel()
        ended = self._ended.get(key, OrderedDict()).pop(response_id, None)
        if ended is not None:
            self._bytes[key] -= ended.size

    def _make_room(self, key: str, count: int, size: int) -> None:
        """Forget as many old ones that have ended as it takes, and may."""
        ended, running = self._ended.get(key, OrderedDict()), self._running.get(key, {})
        while ended and (len(ended) + len(running) + count > MOST_STORED or self._bytes[key] + size > self._most_bytes):
            _, oldest = ended.popitem(last=False)
            self._bytes[key] -= oldest.size


def packed(stored: Stored) -> Packed:
    """A response as it stands."""
    body, messages = (msgspec.Raw(msgspec.json.encode(part)) for part in (stored.body, stored.messages))
    return Packed(stored.key, body, messages, stored.background)
