"""Building blocks of the OpenAPI document: schemas, and operations with their answers and errors."""

from collections.abc import Mapping
from typing import Any

from kvern.server.handlers.files import MOST_ON_PAGE

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
NAMED: Schema = {"type": "string", "minLength": 1}
NUMBER: Schema = {"type": "number"}
SWITCH: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
ORDERED: dict[str, Schema] = {"order": {"type": "string", "enum": ["asc", "desc"]}}
PAGE: dict[str, Schema] = {"limit": {"type": "integer", "minimum": 1, "maximum": MOST_ON_PAGE}, "after": TEXT}


def listed(items: Schema, **limits: int) -> Schema:
    """Returns the schema of a list."""
    return {"type": "array", "items": items, **limits}


def optional(schema: Schema) -> Schema:
    """Returns the schema of an optional field; null is the same as leaving it out."""
    return {"anyOf": [schema, {"type": "null"}]}


def record(properties: Mapping[str, Schema], *required: str) -> Schema:
    """Returns the schema of an object; fields that are not named are ignored."""
    return {"type": "object", "properties": dict(properties), "required": list(required)}


def one_of(*values: str) -> Schema:
    """Returns the schema of one of these texts."""
    return {"type": "string", "enum": list(values)}


IDENTIFIED = record({"id": TEXT, "object": TEXT}, "id", "object")
LISTING = record({"object": one_of("list"), "data": listed(OBJECT)}, "object", "data")
ERROR = record(
    {
        "error": record(
            {"message": TEXT, "type": TEXT, "param": optional(TEXT), "code": optional(TEXT)},
            "message",
            "type",
            "param",
            "code",
        )
    },
    "error",
)
CLAUDE_ERROR = record(
    {"type": one_of("error"), "error": record({"type": TEXT, "message": TEXT}, "type", "message")}, "type", "error"
)
EVENT = record({"event": TEXT, "data": TEXT}, "data") | {"description": "An event of the stream; data is JSON."}
REASONS = {
    400: "The request is invalid; the message says why.",
    401: "The API key is missing or unknown.",
    403: "The API key may not do this.",
    404: "The object does not exist.",
    409: "Another request is using it.",
    408: "The timeout has passed, or the body arrived too slowly.",
    413: "The body is too large.",
    429: "There are too many requests: try again after the seconds in the header Retry-After.",
    500: "The server has a fault, or the engine died twice with the request.",
    503: "The server cannot answer at present.",
    507: "The server's disk is full.",
}


REFUSALS = (400, 401, 404, 408, 413, 429, 500, 503, 507)
"""Statuses of errors that every operation with a body has."""


def get(
    summary: str,
    answer: Schema | None,
    *statuses: int,
    path: tuple[str, ...] = (),
    query: Mapping[str, Schema] | None = None,
    kind: str = "application/json",
    error: Schema = ERROR,
    open_to_all: bool = False,
) -> Schema:
    """Returns an operation without a body."""
    parameters = [{"name": name, "in": "path", "required": True, "schema": TEXT} for name in path]
    parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in (query or {}).items()]
    refusals = () if open_to_all else (401, *statuses)
    operation = {"summary": summary, "parameters": parameters, "responses": _responses(answer, kind, refusals, error)}
    return {**operation, "security": []} if open_to_all else operation


def post(
    summary: str,
    body: Schema,
    answer: Schema,
    *statuses: int,
    streams: bool = False,
    kind: str = "application/json",
    error: Schema = ERROR,
    path: tuple[str, ...] = (),
) -> Schema:
    """Returns an operation with a body. `statuses` are errors beside those that every such operation has."""
    responses = _responses(answer, "application/json", (*REFUSALS, *statuses), error)
    if streams:
        responses["200"]["content"]["text/event-stream"] = {"schema": EVENT}
    content = {kind: {"schema": body}}
    parameters = [{"name": name, "in": "path", "required": True, "schema": TEXT} for name in path]
    described = {"summary": summary, "requestBody": {"required": True, "content": content}, "responses": responses}
    return {**described, "parameters": parameters} if path else described


def _responses(answer: Schema | None, kind: str, statuses: tuple[int, ...], error: Schema) -> Schema:
    done = {"description": "Done.", "content": {kind: {"schema": answer} if answer is not None else {}}}
    return {"200": done, **{str(status): refused(status, error) for status in sorted(set(statuses))}}


def refused(status: int, error: Schema = ERROR) -> Schema:
    """Returns the answer of an error."""
    return {"description": REASONS[status], "content": {"application/json": {"schema": error}}}
