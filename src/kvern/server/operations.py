"""The operations of the server, as operations.toml describes them for the router and for the OpenAPI document."""

import functools
import tomllib
from pathlib import Path
from typing import Any

import msgspec

JSON = "application/json"


class Operation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One operation: a line of help, its handler, and its fields as words.

    `handler` is a module of `kvern.server.handlers`, a class that is made with `Apis`, and a method, as
    module:class.method; empty: the server handles it itself.
    `body` are the fields of the body, in several forms if it is a tuple; () is no body. `statuses` are errors beside
    those that every operation has, and those of `stored` objects. `kind` is the content type of the answer, or of a
    form's body; `stream` is that of a stream, which the answer may be as well. `is_open` operations need no API key.
    """

    summary: str
    handler: str = ""
    answer: str = ""
    statuses: tuple[int, ...] = ()
    stored: bool = False
    body: str | tuple[str, ...] = ()
    query: str = ""
    kind: str = JSON
    stream: str = ""
    is_open: bool = False


class Operations(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of `operations.toml`; `operations` are by method and path, `reasons` by status."""

    types: dict[str, dict[str, Any]]
    records: dict[str, str]
    fields: dict[str, str]
    reasons: dict[int, str]
    operations: dict[str, Operation]


@functools.cache
def read_operations() -> Operations:
    """Reads `operations.toml`."""
    text = Path(__file__).with_name("operations.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), Operations, str_keys=True)
