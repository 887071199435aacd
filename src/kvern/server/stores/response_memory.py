"""Running responses, and ended ones that could not be written to disk, within limits for each key.

The events of a background response are kept for clients that follow its stream now or later. Growing text is thousands
of events that differ only in `delta`: a `Run` stores them as one. Events that contain the response store its status
then; the response is put in again when they are read.
"""

import asyncio
import bisect
import contextlib
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from kvern.api.errors import HttpError
from kvern.io.json_lines import as_json

Event = tuple[str, dict[str, Any]]

RUNNING = ("queued", "in_progress")
LAST = frozenset({"response.completed", "response.incomplete", "response.failed"})
"""Events that end a stream. A cancelled response ends with response.incomplete: clients know no other event for it."""
NOT_YET: dict[str, Any] = {"output": [], "usage": None, "error": None, "incomplete_details": None, "completed_at": None}
"""Fields of a response that has not ended."""


Stored = tuple[int, list[tuple[str, msgspec.Raw]], list[str] | None]
"""A Run as it is stored."""


class Run(msgspec.Struct, array_like=True):
    """One event with a list of `deltas`, or two events that take turns; without deltas a single event.

    `first` is the number of its first event; an event is a kind and its fields.
    """

    first: int
    events: list[Event]
    deltas: list[str] | None = None

    @property
    def end(self) -> int:
        """The number after that of its last event."""
        return self.first + (1 if self.deltas is None else len(self.deltas))

    def takes(self, event: Event, delta: str) -> bool:
        """Adds the delta and returns True if the event continues this run.

        Two events take turns where reasoning is streamed both as itself and as its summary.
        """
        if self.deltas is None:
            return False
        if len(self.events) == len(self.deltas) == 1 and self.events[0] != event:
            self.events.append(event)
        is_next = self.events[len(self.deltas) % len(self.events)] == event
        if is_next:
            self.deltas.append(delta)
        return is_next


class EventLog:
    """Events numbered from 0, each a kind and its fields. `response` is the response that they describe.

    The last event is hidden until the log is closed, so that the response can be stored first.
    """

    def __init__(self, response: Mapping[str, Any], runs: list[Run] | None = None) -> None:
        self._response = response
        self._runs = [] if runs is None else runs
        self._shown = 0
        self._closed = False
        self._news = asyncio.Event()

    def add(self, event: Event) -> None:
        """Appends an event; its fields are `type`, `sequence_number` and those of its kind."""
        kind, told = event
        fields = {name: value for name, value in told.items() if name not in ("type", "sequence_number", "delta")}
        if "response" in fields:
            fields["response"] = self._response["status"]
        last = self._runs[-1] if self._runs else None
        end = 0 if last is None else last.end
        if "delta" not in told:
            self._runs.append(Run(end, [(kind, fields)]))
        elif last is None or not last.takes((kind, fields), told["delta"]):
            self._runs.append(Run(end, [(kind, fields)], [told["delta"]]))
        if kind not in LAST:
            self._show(end + 1)

    def close(self) -> None:
        """Ends the log: no event follows."""
        self._closed = True
        self._show(self._runs[-1].end if self._runs else 0)

    async def follow(self, after: int) -> AsyncIterator[Event]:
        """Yields the events after number `after` until the log is closed."""
        number = after + 1
        place = max(bisect.bisect_right(self._runs, number, key=lambda run: run.first) - 1, 0)
        while True:
            while number < self._shown:
                run = self._runs[place]
                if number < run.end:
                    yield self._event(run, number)
                    number += 1
                else:
                    place += 1
            if self._closed:
                return
            await self._news.wait()

    def packed(self) -> bytes:
        """Returns the log as JSON, which `events_of` reads."""
        return b"[" + b",".join(map(msgspec.json.encode, self._runs)) + b"]"

    def _show(self, number: int) -> None:
        self._shown = number
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _event(self, run: Run, number: int) -> Event:
        kind, fields = run.events[(number - run.first) % len(run.events)]
        fields = dict(fields)
        if "response" in fields:
            status = fields["response"]
            early = {**NOT_YET, "status": status} if status in RUNNING else {}
            fields["response"] = {name: early.get(name, value) for name, value in self._response.items()}
        if run.deltas is not None:
            fields["delta"] = run.deltas[number - run.first]
        return kind, {"type": kind, "sequence_number": number, **fields}


async def events_of(body: bytes, packed: bytes, after: int) -> AsyncIterator[Event]:
    """Yields the events after number `after` of a response that has ended; `body` is its JSON.

    If the server ended before the response did, only the last event is known. Values are not decoded: there may be
    many.
    """
    response: dict[str, Any] = _shallow(body, "status")
    runs = [
        Run(first, [(kind, _shallow(fields, "response")) for kind, fields in events], deltas)
        for first, events, deltas in msgspec.json.decode(packed, type=list[Stored])
    ]
    log = EventLog(response, runs or [Run(after + 1, [("response.failed", {"response": response["status"]})])])
    log.close()
    async for event in log.follow(after):
        yield event


def _shallow(body: bytes | msgspec.Raw, name: str) -> dict[str, Any]:
    """Decodes a JSON object and its value `name`; the other values stay JSON."""
    values: dict[str, Any] = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return values | {name: msgspec.json.decode(values[name])} if name in values else values


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
            raise HttpError(429, f"{message}: wait, or send store false", headers={"retry-after": "1"})
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
