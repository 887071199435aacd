"""Spans of OpenTelemetry as plain data, as they travel to the process that sends them."""

from collections.abc import Mapping, Sequence

import msgspec

Value = str | bool | int | float | list[str]
"""A value of an attribute."""


class Event(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A moment within a span, in seconds since 1970."""

    name: str
    at: float
    attributes: Mapping[str, Value] = {}


class Span(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A part of a request's time. Times are seconds since 1970."""

    name: str
    began: float
    ended: float
    parent: int | None = None
    """The place of the span of which it is a part in the trace; None: the request itself."""
    attributes: Mapping[str, Value] = {}
    events: Sequence[Event] = ()
    error: str = ""
    """The reason why it failed; empty: it did not."""


class Trace(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The spans of one request, a parent before its parts."""

    trace_id: bytes
    """16 bytes: those of the client's trace, if the request is a part of one."""
    parent_id: int
    """The client's span, 64 bits; 0: there is none."""
    spans: Sequence[Span]


class Context(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The trace that a client's request is a part of."""

    trace_id: bytes
    parent_id: int
    is_sampled: bool
    """The client records this trace."""


def read_context(header: str) -> Context | None:
    """Reads a `traceparent` header of W3C's Trace Context, versions after 00 included; None if it is none."""
    parts = header.strip().split("-")
    if len(parts) < 4 or (parts[0] == "00" and len(parts) > 4) or parts[0] == "ff":
        return None
    if [len(part) for part in parts[:4]] != [2, 32, 16, 2] or not all(set(part) <= HEXADECIMAL for part in parts[:4]):
        return None
    trace_id, parent_id = bytes.fromhex(parts[1]), int(parts[2], 16)
    return Context(trace_id, parent_id, bool(int(parts[3], 16) & 1)) if any(trace_id) and parent_id else None


HEXADECIMAL = frozenset("0123456789abcdef")
