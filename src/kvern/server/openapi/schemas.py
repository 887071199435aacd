"""Words of the API's description: schemas, and operations with their answers and errors."""

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
    """A list."""
    return {"type": "array", "items": items, **limits}


def optional(schema: Schema) -> Schema:
    """Null is the same as leaving it out."""
    return {"anyOf": [schema, {"type": "null"}]}


def record(properties: Mapping[str, Schema], *required: str) -> Schema:
    """An object; fields that are not named are ignored."""
    return {"type": "object", "properties": dict(properties), "required": list(required)}


def one_of(*values: str) -> Schema:
    """One of these texts."""
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
EVENT = record({"event": TEXT, "data": TEXT}, "data") | {"description": "One of the stream's events; data is JSON."}
REASONS = {
    400: "The request cannot be carried out as it is; the message says why.",
    401: "The API key is missing or unknown.",
    403: "This key may not.",
    404: "There is no such thing.",
    409: "Another request works with it.",
    408: "The deadline has passed, or the body came too slowly.",
    413: "The body is too large.",
    429: "Too much at once: try again after the seconds in the header Retry-After.",
    500: "The server has a fault, or the engine died over the request twice.",
    503: "Not now.",
    507: "The server's disk is full.",
}


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
    """An operation without a body."""
    parameters = [{"name": name, "in": "path", "required": True, "schema": TEXT} for name in path]
    parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in (query or {}).items()]
    refusals = () if open_to_all else (401, *statuses)
    operation = {"summary": summary, "parameters": parameters, "responses": _responses(answer, kind, refusals, error)}
    return {**operation, "security": []} if open_to_all else operation


def post(
    summary: str,
    body: Schema,
    answer: Schema,
    *,
    streams: bool = False,
    kind: str = "application/json",
    error: Schema = ERROR,
    guarded: bool = False,
    path: tuple[str, ...] = (),
) -> Schema:
    """An operation with a body, `guarded` if not every key may use it."""
    refusals = (400, 401, 404, 408, 413, 429, 500, 503, 507, *((403,) if guarded else ()))
    responses = _responses(answer, "application/json", refusals, error)
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
    """An answer that is an error."""
    return {"description": REASONS[status], "content": {"application/json": {"schema": error}}}
