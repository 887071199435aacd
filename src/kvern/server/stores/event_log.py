"""The events of a background response, for clients that follow its stream now or later.

Growing text is thousands of events that differ only in `delta`: a `Run` stores them as one. Events that contain the
response store its status then; the response is put in again when they are read.
"""

import asyncio
import bisect
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec

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
